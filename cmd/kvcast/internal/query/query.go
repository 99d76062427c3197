// Package query contains the commands that read from a server: subscribe, replay, snapshot, match, workers and status.
package query

import (
	"github.com/kvcast/kvcast/cmd/kvcast/internal/cli"
	kvcastv1 "github.com/kvcast/kvcast/proto/kvcast/v1"
)

// flags are the flags of every command in this package.
type flags struct {
	cli.Connection
	Output string `short:"o" enum:"text,json" default:"text" placeholder:"FORMAT" help:"Output format: text, or json for an object per line (${default})."`
}

// call runs a function with a connection to the server.
func (f *flags) call(p cli.Process, call func(kvcastv1.RouterEventServiceClient) error) error {
	conn, err := f.Dial(p)
	if err != nil {
		return err
	}
	defer func() { _ = conn.Close() }()
	if err := call(kvcastv1.NewRouterEventServiceClient(conn)); err != nil {
		return f.Error(err)
	}
	return nil
}

// streamFlags are the flags of the commands that print a stream.
type streamFlags struct {
	flags
	cli.Filter
}

// given returns the flags as on a command line, each after a space.
func (f *streamFlags) given() string {
	text := f.ConnectionFlags()
	if f.Output != "text" {
		text += " -o " + f.Output
	}
	return text + f.FilterFlags()
}
