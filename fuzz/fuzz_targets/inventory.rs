//! The inventory's text, and label selectors.
#![no_main]

use std::collections::BTreeSet;

use libfuzzer_sys::fuzz_target;
use tunnel_routing::inventory::{Selector, parse};

fuzz_target!(|bytes: &[u8]| {
    let Ok(text) = std::str::from_utf8(bytes) else { return };
    match parse(text, &Selector::default()) {
        Ok(inventory) => {
            let names: BTreeSet<_> = inventory.iter().map(|node| &node.name).collect();
            assert_eq!(names.len(), inventory.len(), "a duplicate name");
        }
        Err(error) => assert!(!error.reason.is_empty()),
    }
    if let Some(Err(error)) = text.lines().next().map(str::parse::<Selector>) {
        assert!(!error.to_string().is_empty());
    }
});
