//! The first bytes that a client sends to the https listener.
#![no_main]

use libfuzzer_sys::fuzz_target;
use tunnel_server::listener::client_hello::{Hello, parse_client_hello};

fuzz_target!(|bytes: &[u8]| {
    let whole = parse_client_hello(bytes);
    // Bytes arrive in any pieces: a result for the first bytes must not change when more arrive.
    let half = bytes.len() / 2;
    match parse_client_hello(&bytes[..half]) {
        Ok(None) => {}
        early => assert_eq!(early, whole, "the first {half} bytes give another result"),
    }
    if let Ok(Some(Hello { name: Some(name) })) = whole {
        assert!(!name.is_empty() && name.len() <= 255 && name.is_ascii());
    }
});
