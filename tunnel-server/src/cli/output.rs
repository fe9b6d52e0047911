//! Output of the `token`, `agent` and `ca` commands.

use std::fmt::Display;
use std::io::{self, Write};
use std::path::{Path, PathBuf};

use clap::Args;
use serde_json::Value;
use tunnel_runtime::output::Output;

use crate::pki::{DEFAULT_STATE_DIR, PkiError};
use crate::status::write_table;

#[derive(Args, Clone, Debug)]
pub(super) struct Common {
    /// The server's state directory.
    #[arg(long, value_name = "DIR", default_value = DEFAULT_STATE_DIR, global = true)]
    pub(super) state_dir: PathBuf,
    #[command(flatten)]
    output: Output,
}

impl Common {
    /// Prints the text, or the document if that is wanted.
    pub(super) fn show(&self, out: &mut dyn Write, text: &str, document: &Value) -> Result<(), PkiError> {
        let shown = self.output.output.show(document, || text.to_owned());
        shown
            .and_then(|shown| out.write_all(shown.as_bytes()))
            .map_err(|error| PkiError::io(Path::new("standard output"), error))
    }
}

/// Returns a table, or the text for having no rows.
pub(super) fn table(
    columns: &[&str],
    rows: impl ExactSizeIterator<Item = Vec<String>>,
    none: &str,
) -> String {
    if rows.len() == 0 {
        return format!("{none}\n");
    }
    let mut text = String::new();
    // A string takes everything.
    let _ = write_table(&mut text, columns, rows);
    text
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
