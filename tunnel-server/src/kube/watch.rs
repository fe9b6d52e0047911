//! Following objects of the API server through its outages.

/// How each watch is doing.
#[derive(Clone, Debug)]
pub struct Health;
