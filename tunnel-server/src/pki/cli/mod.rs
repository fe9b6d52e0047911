//! `tunnel-server token …` and `tunnel-server ca …`. They work on the files, whether the server runs or not, or on the
//! Secret of a cluster.

mod ca;
mod token;

use std::io::{self, Write};
use std::path::{Path, PathBuf};

use clap::{Args, ValueEnum};
use serde_json::Value;

pub use ca::{CaCommand, CaCommandError};
pub use token::TokenCommand;

use super::{DEFAULT_STATE_DIR, PkiError};

/// What to print.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum)]
pub enum Output {
    /// For people.
    #[default]
    Text,
    /// For programs: one JSON document.
    Json,
}

#[derive(Args, Clone, Debug)]
struct Common {
    /// The server's state directory.
    #[arg(long, value_name = "DIR", default_value = DEFAULT_STATE_DIR, global = true)]
    state_dir: PathBuf,
    /// Output format.
    #[arg(short, long, value_enum, default_value_t, global = true)]
    output: Output,
}

fn print(out: &mut dyn Write, text: &str) -> Result<(), PkiError> {
    out.write_all(text.as_bytes()).map_err(|error| PkiError::io(Path::new("standard output"), error))
}

fn print_json(out: &mut dyn Write, value: &Value) -> Result<(), PkiError> {
    print(out, &format!("{value:#}\n"))
}

fn note(text: &str) {
    // Nothing can be done about a closed stderr.
    let _ = writeln!(io::stderr(), "{text}");
}
