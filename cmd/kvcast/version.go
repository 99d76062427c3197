package main

import (
	"fmt"
	"runtime/debug"

	"github.com/pebbe/zmq4"
)

// version is set when a release is built.
var version = ""

type versionCmd struct{}

// Run prints the version of kvcast and of libzmq, which decides much of what
// ingest can rely on.
func (versionCmd) Run(std stdio) error {
	major, minor, patch := zmq4.Version()
	_, err := fmt.Fprintf(std.out, "kvcast %s (libzmq %d.%d.%d)\n", currentVersion(), major, minor, patch)
	return err
}

func currentVersion() string {
	if version != "" {
		return version
	}
	info, ok := debug.ReadBuildInfo()
	if !ok || info.Main.Version == "" {
		return "(devel)"
	}
	return info.Main.Version
}
