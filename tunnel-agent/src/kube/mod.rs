//! The Kubernetes side of the agent: its servers, its certificate and its pods, from the API server.
