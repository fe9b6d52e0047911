//go:build tools

// Package peers names what konnectivity's own tests import, which run against Postern's agent; it has no code of its own.
package peers

import (
	_ "go.uber.org/goleak"
	_ "sigs.k8s.io/apiserver-network-proxy/konnectivity-client/pkg/client"
	_ "sigs.k8s.io/apiserver-network-proxy/konnectivity-client/pkg/client/metrics"
	_ "sigs.k8s.io/apiserver-network-proxy/konnectivity-client/pkg/common/metrics/testing"
	_ "sigs.k8s.io/apiserver-network-proxy/pkg/testing/metrics"
	_ "sigs.k8s.io/apiserver-network-proxy/tests/framework"
)
