//! Tunnels, as Events and as a condition of their Node.
