//! The ports of the internal Service.
