// Cilium's own code at its start without socket load balancing: it detaches every program from the hooks of what it takes for the
// root of the cgroups. Here that is a mount of another cgroup.
package main

import (
	"fmt"
	"log/slog"
	"os"
	"path/filepath"

	"github.com/cilium/cilium/pkg/cgroups"
	"github.com/cilium/cilium/pkg/socketlb"
)

func main() {
	if err := run(os.Args[1]); err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
}

func run(mount string) error {
	// The true root, which Cilium would mount there if nothing were, has no such file.
	if _, err := os.Stat(filepath.Join(mount, "cgroup.events")); err != nil {
		return fmt.Errorf("not a cgroup below the root: %w", err)
	}
	logger := slog.New(slog.NewTextHandler(os.Stderr, nil))
	cgroups.CheckOrMountCgrpFS(logger, mount)
	if _, err := os.Stat(filepath.Join(cgroups.GetCgroupRoot(), "cgroup.events")); err != nil {
		return fmt.Errorf("Cilium has mounted the root of the cgroups: %w", err)
	}
	return socketlb.Disable(logger)
}
