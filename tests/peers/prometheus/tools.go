//go:build tools

// Package peers names the Prometheus of the test cluster; it has no code of its own.
package peers

import _ "github.com/prometheus/prometheus/cmd/prometheus"
