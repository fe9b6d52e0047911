//! What `doctor` of both programs finds: each finding has a stable code, which docs/troubleshooting.md explains.

mod checkup;
mod code;
pub mod codes;
mod files;
mod limits;
mod names;
mod output;
mod running;
mod tls;

pub use checkup::{Check, Checkup, Finding, Outcome, Report, State};
pub use code::{Code, Severity};
pub use files::{private_file, state_directory, validity_of};
pub use limits::judge_limits;
pub use names::resolves;
pub use output::DoctorOutput;
pub use running::{Running, ask, judge_running, metric};
pub use tls::{Trusted, judge_chain, judge_handshake_error};
