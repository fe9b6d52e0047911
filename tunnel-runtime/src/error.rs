//! Errors and their causes.

use std::error::Error;

/// Iterates over `error` and its sources, outermost first.
pub fn causes<'a>(error: &'a (dyn Error + 'static)) -> impl Iterator<Item = &'a (dyn Error + 'static)> {
    std::iter::successors(Some(error), |error: &&'a (dyn Error + 'static)| (*error).source())
}

/// Formats an error and its sources on one line, because outer errors often say little ("client error (Connect)"). A
/// source already quoted in the text is not repeated.
pub fn chain(error: &(dyn Error + 'static)) -> String {
    let mut text = String::new();
    for part in causes(error).map(ToString::to_string) {
        if text.is_empty() {
            text = part;
        } else if !text.contains(&part) {
            text = format!("{text}: {part}");
        }
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[derive(Debug, thiserror::Error)]
    #[error("{text}")]
    struct Layer {
        text: &'static str,
        source: Option<Box<Layer>>,
    }

    #[test]
    fn every_cause_is_named_once() {
        let inner = Layer { text: "no route to host", source: None };
        let quoting = Layer { text: "tcp connect: no route to host", source: Some(Box::new(inner)) };
        let outer = Layer { text: "client error", source: Some(Box::new(quoting)) };
        assert_eq!(chain(&outer), "client error: tcp connect: no route to host");
        assert_eq!(causes(&outer).count(), 3);
    }
}
