//go:build tools

// Package peers names the konnectivity programs that Postern is measured against and speaks with; it has no code of its own.
package peers

import (
	_ "sigs.k8s.io/apiserver-network-proxy/cmd/agent"
	_ "sigs.k8s.io/apiserver-network-proxy/cmd/server"
	_ "sigs.k8s.io/apiserver-network-proxy/cmd/test-client"
)
