//! `postern.tunnel.v1`, generated from `proto/` and checked in (a test compares).

#![expect(clippy::allow_attributes_without_reason, reason = "generated code")]

include!("generated.rs");

/// Omits the token.
impl std::fmt::Debug for EnrollRequest {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("EnrollRequest")
            .field("node", &self.node)
            .field("csr", &self.csr)
            .finish_non_exhaustive()
    }
}
