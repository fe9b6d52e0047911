//! The CA, kept in a Secret.
