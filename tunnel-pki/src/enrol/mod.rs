//! The identity of an agent or a redirector: a private key, a certificate that names the node, and the roots that
//! verify servers. Also the TCP connections to the servers (`reach`).
//!
//! The first certificate comes from the API server or by token. Renewals always use `renew`:
//!
//! | file | when | by |
//! |---|---|---|
//! | `csr` | the first certificate, in a cluster | a CertificateSigningRequest at the API server |
//! | `token` | the first certificate, without an API server | gRPC at a server, with an enrolment token |
//! | `renew` | every further one, in a cluster too | gRPC at a server, with the present certificate |
//! | `recover` | no server accepts the certificate any more, in a cluster | a CertificateSigningRequest again |
//!
//! | file of the state directory | mode | |
//! |---|---|---|
//! | `agent.key`, `redirector.key` | 0600 | the private key, which never leaves the node |
//! | `agent.crt`, `redirector.crt` | 0644 | the certificate |
//! | `ca.crt` | 0644 | the roots that a server must come from, the one that signs at present first |
//! | `agent.key.next`, `redirector.key.next` | 0600 | the key of a pending request; written before the request, so that a lost answer can be requested again |

mod attempt;
mod bundles;
mod csr;
mod enrollment;
mod error;
mod files;
mod flags;
mod metrics;
pub mod reach;
mod recover;
mod renew;
mod token;

pub use bundles::{Announced, install_bundles};
pub use csr::{CsrEnrolment, Pace};
pub use error::EnrollError;
pub use files::stored_identity;
pub use flags::EnrolmentFlags;
pub use metrics::IdentityMetrics;
pub use recover::{Enrolled, Refusals, Refused, recover};
pub use renew::{IdentityKeeper, Recovery};
pub use token::{EnrollConfig, ensure_identity};
