//! The head of a request to the http door.
#![no_main]

use libfuzzer_sys::fuzz_target;
use tunnel_server::door::http_head::parse;

fuzz_target!(|bytes: &[u8]| {
    let whole = parse(bytes);
    // Bytes arrive in any pieces: a result for the first bytes must not change when more arrive.
    let half = bytes.len() / 2;
    match parse(&bytes[..half]) {
        Ok(None) => {}
        Ok(early) => assert_eq!(Ok(early), whole, "the first {half} bytes give another head"),
        Err(_) => assert!(whole.is_err(), "the first {half} bytes are refused, and all are not"),
    }
    let Ok(Some(head)) = whole else { return };
    assert!(head.length <= bytes.len());
    // What the target gets is a whole head without a rest, has one meaning, and is not changed by another door.
    let again = match parse(&head.rewritten) {
        // Two headers and some spaces are added.
        Err(reason) => {
            return assert!(reason.contains("larger") || reason.contains("too many headers"), "{reason}");
        }
        Ok(again) => again.expect("the target's head is cut"),
    };
    assert_eq!(again.length, head.rewritten.len());
    assert_eq!(again.rewritten, head.rewritten);
    assert!(again.proxy_host.is_none() && again.proxy_dest.is_none());
});
