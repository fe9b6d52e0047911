//! The nodes, as an inventory.
