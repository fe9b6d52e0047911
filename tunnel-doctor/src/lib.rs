//! Findings of the `doctor` command of both programs. Each has a stable code, which docs/operate/troubleshooting.md explains.
#![forbid(unsafe_code)]

mod book;
pub mod bundle;
mod checkup;
pub mod cluster;
mod code;
pub mod codes;
mod command;
mod files;
mod limits;
mod names;
mod running;
mod tls;
mod tool;

pub use book::Page;
pub use checkup::{Check, Checkup, Finding, Outcome, Report, State};
pub use code::{Code, Severity};
pub use command::{DoctorCommand, Examine, bad_flags};
pub use files::{private_file, state_directory, validity_of};
pub use names::resolves;
pub use running::{Asked, Running, ask_at, check_running, metric, parse_flags};
pub use tls::{Trusted, judge_chain, judge_handshake_error};
pub use tool::tool_output;
