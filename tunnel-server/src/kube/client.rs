//! The client of the API server.
