//! Output of the `token`, `agent` and `ca` commands.

use std::fmt::Display;
use std::io::{self, Write};
use std::path::{Path, PathBuf};

use clap::Args;
use serde_json::Value;
use tunnel_runtime::output::Format;

use crate::pki::{DEFAULT_STATE_DIR, PkiError};
use crate::status::write_table;

#[derive(Args, Clone, Debug)]
pub(super) struct Common {
    /// The server's state directory.
    #[arg(long, value_name = "DIR", default_value = DEFAULT_STATE_DIR, global = true)]
    pub(super) state_dir: PathBuf,
    /// text, for humans, or json: one document.
    #[arg(short, long, value_name = "FORMAT", default_value = "text", global = true)]
    pub(super) output: Format,
}

impl Common {
    /// Prints the text, or the JSON if that is wanted.
    pub(super) fn show(&self, out: &mut dyn Write, text: &str, json: &Value) -> Result<(), PkiError> {
        match self.output {
            Format::Text => print(out, text),
            Format::Json => print_json(out, json),
        }
    }
}

pub(super) fn print(out: &mut dyn Write, text: &str) -> Result<(), PkiError> {
    out.write_all(text.as_bytes()).map_err(|error| PkiError::io(Path::new("standard output"), error))
}

pub(super) fn print_json(out: &mut dyn Write, value: &Value) -> Result<(), PkiError> {
    print(out, &format!("{value:#}\n"))
}

pub(super) fn print_table(
    out: &mut dyn Write,
    columns: &[&str],
    rows: impl Iterator<Item = Vec<String>>,
) -> Result<(), PkiError> {
    let mut text = String::new();
    // A string takes everything.
    let _ = write_table(&mut text, columns, rows);
    print(out, &text)
}

pub(super) fn note(text: &str) {
    // A closed stderr cannot be reported anywhere.
    let _ = writeln!(io::stderr(), "{text}");
}

/// Fails with the first error and prints the others: readable records are listed, but the command still fails.
pub(super) fn fail_if_any<E: Display>(errors: Vec<E>) -> Result<(), E> {
    let mut errors = errors.into_iter();
    let first = errors.next();
    for error in errors {
        note(&format!("error: {error}"));
    }
    first.map_or(Ok(()), Err)
}
