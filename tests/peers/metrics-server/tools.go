//go:build tools

// Package peers names the metrics-server that `kubectl top` asks; it has no code of its own.
package peers

import _ "sigs.k8s.io/metrics-server/cmd/metrics-server"
