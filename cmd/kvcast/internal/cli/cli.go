// Package cli contains what kvcast's commands share: standard streams and environment, the errors that determine the exit
// status, and the flags for connecting to a server.
package cli

import (
	"errors"
	"io"
	"os"
	"runtime/debug"
	"strings"

	"golang.org/x/term"
)

// Process contains the environment and the standard streams of a command.
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

// UsageError is a mistake in the command line or the configuration. The exit status is 2.
type UsageError struct{ Err error }

func (e UsageError) Error() string { return e.Err.Error() }
func (e UsageError) Unwrap() error { return e.Err }

// ErrSilent is a failure that the command has reported already. The exit status is 1, without a message.
var ErrSilent = errors.New("failed")

// Examples returns the section of a command's help with example command lines.
func Examples(lines ...string) string {
	return "Examples:\n\n  " + strings.Join(lines, "\n  ") + "\n"
}

// version is set by the linker in releases.
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
