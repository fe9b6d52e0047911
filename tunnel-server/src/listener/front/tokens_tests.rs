//! Tokens at a listener without TLS.

use std::sync::Arc;

use http::{HeaderMap, StatusCode};

use super::kinds::{Admission, Front, Peer};
use super::served::Served;
use crate::admission::Shares;
use crate::caller::{Authenticator, Tokens};
use crate::listener::context::ListenerContext;

#[tokio::test]
async fn the_plain_listener_takes_no_token_of_another_host_unless_told_to() {
    for (client, exposed_tokens, status) in [
        ("192.0.2.1:1", false, StatusCode::FORBIDDEN),
        ("[::ffff:192.0.2.1]:1", false, StatusCode::FORBIDDEN),
        // Looked up, and not known.
        ("127.0.0.1:1", false, StatusCode::UNAUTHORIZED),
        ("[::1]:1", false, StatusCode::UNAUTHORIZED),
        ("192.0.2.1:1", true, StatusCode::UNAUTHORIZED),
    ] {
        let authenticator = Arc::new(Authenticator::new(Tokens::default(), None));
        let admission =
            Admission::Listed { clients: Vec::new(), ports: Vec::new(), authenticator, exposed_tokens };
        let front =
            Front { listener: "plain", admission, tls: None, targets: None, pods: None, metrics: None };
        let peer = Peer::new(client.parse().unwrap(), None, None);
        let context = ListenerContext::without_nodes();
        let served = Served::new(Arc::new(front), peer, None, context, Shares::new(1));
        let mut headers = HeaderMap::new();
        headers.insert("authorization", "Bearer some-token".parse().unwrap());
        let refused = served.caller(&headers).await.unwrap_err();
        assert_eq!(refused.status, status, "{client}: {}", refused.reason);
        assert_eq!(refused.reason.contains("--plain-tokens=on"), status == StatusCode::FORBIDDEN);
    }
}
