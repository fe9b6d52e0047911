//! Output of the commands.

use std::io::{self, Write as _};

use anstream::{AutoStream, ColorChoice};
use clap::builder::{PossibleValuesParser, TypedValueParser};
use clap::{Args, ValueEnum};
use serde::Serialize;

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum)]
pub enum Format {
    #[default]
    Text,
    /// Text with more columns.
    Wide,
    Json,
    Yaml,
}

/// The flag of commands whose text has one width.
#[derive(Args, Clone, Copy, Debug)]
pub struct Output {
    /// text, for humans; json or yaml: one document.
    #[arg(short, long, value_name = "FORMAT", default_value = "text", value_parser = narrow(), global = true)]
    pub output: Format,
}

fn narrow() -> impl TypedValueParser<Value = Format> {
    PossibleValuesParser::new(["text", "json", "yaml"]).try_map(|name| Format::from_str(&name, false))
}

impl Format {
    /// Returns the document in this format, or its text.
    ///
    /// # Errors
    /// Fails if the document has a map whose keys are no texts.
    pub fn show(self, document: &impl Serialize, text: impl FnOnce() -> String) -> io::Result<String> {
        match self {
            Self::Text | Self::Wide => Ok(text()),
            Self::Json => Ok(serde_json::to_string_pretty(document)? + "\n"),
            Self::Yaml => {
                // A text on one line is found by grep.
                let options = serde_saphyr::ser_options! { prefer_block_scalars: false };
                // The library's code is then compiled for JSON's values alone.
                let document = serde_json::to_value(document)?;
                serde_saphyr::to_string_with_options(&document, options).map_err(io::Error::other)
            }
        }
    }
}

/// Returns whether to print colours: if standard output is a terminal, unless NO_COLOR or CLICOLOR_FORCE say otherwise.
pub fn is_coloured() -> bool {
    AutoStream::choice(&io::stdout()) != ColorChoice::Never
}

/// Prints to standard output. Returns false if that is closed, as with `| head`.
///
/// # Errors
/// Fails if standard output fails otherwise.
pub fn print(text: &str) -> io::Result<bool> {
    let mut out = io::stdout().lock();
    match out.write_all(text.as_bytes()).and_then(|()| out.flush()) {
        Ok(()) => Ok(true),
        Err(error) if error.kind() == io::ErrorKind::BrokenPipe => Ok(false),
        Err(error) => Err(error),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::{Value, json};

    /// Names of nodes, ids of tokens and versions that other types of YAML look like, 1.1's among them.
    const TEXTS: &[&str] = &[
        "on",
        "off",
        "yes",
        "no",
        "y",
        "n",
        "null",
        "~",
        "",
        "true",
        "0088",
        "0024",
        "08",
        "010",
        "0o10",
        "0x1f",
        "1e5",
        "12e456",
        "1_000",
        "1:30:00",
        "12:30",
        ".5",
        "1.",
        ".inf",
        "-",
        "--- a",
        "2026-01-02",
        "2026-01-02T03:04:05Z",
        "<<",
        "=",
        "!x",
        "&a",
        "*a",
        "? a",
        "a: b",
        "a #b",
        "@a",
        "`a",
        "%a",
        "{a",
        "[a",
        "'",
        "\"",
        "a\nb\n",
        " a ",
        "\u{1b}[31m",
        "\u{9b}",
        "\u{85}",
        "\u{feff}",
        "\\n",
        "é",
        "…",
    ];

    #[test]
    fn a_document_is_the_same_as_yaml() {
        let numbers = json!([0, -1, 1.5, 1e300, u64::MAX, true, null, {}, [], { "a": [{ "b": 1 }, []] }]);
        let document = json!({ "texts": TEXTS, "keys": TEXTS.iter().map(|key| ((*key).to_owned(), json!(1)))
            .collect::<serde_json::Map<_, _>>(), "numbers": numbers });
        let text = Format::Yaml.show(&document, String::new).unwrap();
        assert!(!text.contains(|c: char| c.is_control() && c != '\n'), "{text:?}");
        let read: Value = serde_saphyr::from_str(&text).unwrap();
        assert_eq!(read, document, "{text}");
    }

    #[test]
    fn only_text_is_made_unless_a_document_is_wanted() {
        let never = || -> String { unreachable!("this format has no text") };
        assert_eq!(Format::Json.show(&json!({ "a": 1 }), never).unwrap(), "{\n  \"a\": 1\n}\n");
        assert_eq!(Format::Wide.show(&(), || "a\n".to_owned()).unwrap(), "a\n");
    }
}
