//! Identity from end to end: the server's CA, tokens and certificates and the agent's enrolment and renewals, over
//! real TLS connections on loopback.

#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

mod enrolment;
mod harness;
mod impostors;
mod key_exchange;
mod kubernetes;
mod redirectors;
mod resumption;
mod revocation;
mod rotation;
mod server;
