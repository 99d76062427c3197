// Package cli contains what kvcast's commands share: the process they run in, the errors that decide its exit
// status, and the flags with which they reach a server.
package cli

import (
	"errors"
	"io"
	"os"
	"runtime/debug"
	"strings"

	"golang.org/x/term"
)

// Process gives a command access to the process it runs in.
type Process struct {
	Environ []string // NAME=VALUE, as os.Environ returns them
	In      io.Reader
	Out     io.Writer
	Err     io.Writer
}

// Getenv returns the value of a variable; empty if it is not set.
func (p Process) Getenv(name string) string {
	for _, variable := range p.Environ {
		if value, ok := strings.CutPrefix(variable, name+"="); ok {
			return value
		}
	}
	return ""
}

// IsTerminal reports whether a standard stream is a terminal.
func IsTerminal(stream any) bool {
	f, ok := stream.(*os.File)
	return ok && term.IsTerminal(int(f.Fd()))
}

// UsageError is a mistake in the command line or the configuration: exit status 2.
type UsageError struct{ Err error }

func (e UsageError) Error() string { return e.Err.Error() }
func (e UsageError) Unwrap() error { return e.Err }

// ErrSilent is a failure that has been reported already: exit status 1, without a message.
var ErrSilent = errors.New("failed")

// Examples returns command lines for a command's help.
func Examples(lines ...string) string {
	return "Examples:\n\n  " + strings.Join(lines, "\n  ") + "\n"
}

// version is set when a release is built.
var version = ""

// Version returns kvcast's version.
func Version() string {
	if version != "" {
		return version
	}
	info, ok := debug.ReadBuildInfo()
	if !ok || info.Main.Version == "" {
		return "(devel)"
	}
	return info.Main.Version
}
