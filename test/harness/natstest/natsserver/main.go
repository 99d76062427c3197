// Command natsserver is nats-server, with its flags. It exits at the end of its standard input, and so with the process that
// has started it.
package main

import (
	"flag"
	"io"
	"os"

	"github.com/nats-io/nats-server/v2/server"
)

func main() {
	go func() {
		_, _ = io.Copy(io.Discard, os.Stdin)
		os.Exit(1)
	}()
	flags := flag.NewFlagSet("natsserver", flag.ExitOnError)
	exit := func() { os.Exit(2) }
	options, err := server.ConfigureOptions(flags, os.Args[1:], exit, flags.Usage, exit)
	if err != nil {
		server.PrintAndDie(err.Error())
	}
	s, err := server.NewServer(options)
	if err != nil {
		server.PrintAndDie(err.Error())
	}
	s.ConfigureLogger()
	if err := server.Run(s); err != nil {
		server.PrintAndDie(err.Error())
	}
	s.WaitForShutdown()
}
