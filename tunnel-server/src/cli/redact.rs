//! `tunnel-server redact`.

use std::io::{self, Read as _, Write as _};

use tunnel_doctor::bundle::redacted;

/// Prints standard input without anything that has the form of a secret.
///
/// # Errors
/// If standard input or output fails.
pub fn redact() -> io::Result<()> {
    let mut bytes = Vec::new();
    io::stdin().lock().read_to_end(&mut bytes)?;
    io::stdout().lock().write_all(redacted(&String::from_utf8_lossy(&bytes)).as_bytes())
}
