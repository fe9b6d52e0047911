//! Control messages of both ends, and the values parsed from them.
#![no_main]

use libfuzzer_sys::fuzz_target;
use prost::Message;
use tunnel_link::proto::agent_event::Event;
use tunnel_link::proto::{
    AgentEvent, EnrollRequest, EnrollResponse, Notice, NoticeAck, RenewRequest, Segment, Welcome, notice,
};
use tunnel_pki::{TrustBundle, public_key_of_csr};
use tunnel_runtime::NodeName;
use tunnel_server::pki::Token;

fn message<M: Message + Default + PartialEq + std::fmt::Debug>(bytes: &[u8]) -> Option<M> {
    let message = M::decode(bytes).ok()?;
    assert_eq!(M::decode(message.encode_to_vec().as_slice()).ok().as_ref(), Some(&message), "not stable");
    Some(message)
}

fn name(text: &str) {
    if let Ok(name) = text.parse::<NodeName>() {
        assert_eq!(name.as_str(), text);
        assert!(
            text.len() <= 253
                && text.bytes().all(|byte| byte.is_ascii_graphic() && !byte.is_ascii_uppercase())
        );
    }
}

fn bundle(pem: &str) {
    if let Ok(bundle) = TrustBundle::from_pem(pem) {
        assert!(!bundle.roots().is_empty());
        assert!(TrustBundle::from_pem(&bundle.to_pem()).is_ok(), "the bundle does not parse again");
    }
}

fuzz_target!(|input: &[u8]| {
    let Some((&kind, bytes)) = input.split_first() else { return };
    match kind % 8 {
        0 => {
            if let Some(AgentEvent { event: Some(Event::Hello(hello)) }) = message(bytes) {
                name(&hello.node);
            }
        }
        1 => {
            if let Some(welcome) = message::<Welcome>(bytes) {
                bundle(&welcome.trust_bundle);
            }
        }
        2 => {
            if let Some(Notice { notice: Some(notice::Notice::TrustBundle(announced)) }) = message(bytes) {
                bundle(&announced.pem);
            }
        }
        3 => {
            if let Some(request) = message::<EnrollRequest>(bytes) {
                name(&request.node);
                let _ = public_key_of_csr(&request.csr);
                if let Ok(token) = request.token.parse::<Token>() {
                    assert_eq!(token.expose(), request.token);
                }
            }
        }
        4 => {
            if let Some(response) = message::<EnrollResponse>(bytes) {
                bundle(&response.trust_bundle);
            }
        }
        5 => drop(message::<RenewRequest>(bytes)),
        6 => drop(message::<NoticeAck>(bytes)),
        _ => drop(message::<Segment>(bytes)),
    }
});
