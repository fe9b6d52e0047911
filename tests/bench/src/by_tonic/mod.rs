//! Postern's data path as it would be on tonic: the same protocol (`Agent.Relay`, a stream of `Segment`s each way), the
//! same read sizes and the same settings of TCP, TLS and HTTP/2, but tonic's transport and prost's codec instead of h2 and
//! hand-written frames. Nothing else of Postern is in it: no bound on stalled receivers, no fencing, no log.
pub(crate) mod cloud;
pub(crate) mod edge;
mod relay;
