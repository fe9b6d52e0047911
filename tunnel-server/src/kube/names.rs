//! What the server's certificate names in a cluster.
