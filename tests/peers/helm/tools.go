//go:build tools

// Package peers names the Helm that the chart's tests run; it has no code of its own.
package peers

import _ "helm.sh/helm/v3/cmd/helm"
