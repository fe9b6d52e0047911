//! Errors of links.

use std::io;
use std::time::Duration;

use tunnel_runtime::error::causes;

use super::settings::PING_TIMEOUT;

/// Reason for giving up a link.
#[derive(Debug, thiserror::Error)]
pub enum LinkDead {
    /// Neither an answer nor anything else arrived within [`PING_TIMEOUT`].
    #[error("no answer to an HTTP/2 PING for {} s", PING_TIMEOUT.as_secs())]
    Timeout,
    /// The other kernel has acknowledged nothing for so long.
    #[error("no answer for {:.1} s", .0.as_secs_f32())]
    Silent(Duration),
    /// The connection failed.
    #[error("{}", reason(.0))]
    Failed(#[source] h2::Error),
}

/// Describes a connection's failure to an operator. `error` or one of its sources is an [`h2::Error`].
pub fn reason(error: &(dyn std::error::Error + 'static)) -> String {
    let Some(h2) = causes(error).find_map(|cause| cause.downcast_ref::<h2::Error>()) else {
        return error.to_string();
    };
    match h2.get_io() {
        Some(io) if io.kind() == io::ErrorKind::UnexpectedEof => "the peer closed the connection".to_owned(),
        Some(io) => io.to_string(),
        None => h2.to_string(),
    }
}
