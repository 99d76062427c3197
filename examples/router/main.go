// Program router is an example: a reverse proxy for OpenAI's completions API. It sends each request to the engine that
// holds the longest prefix of the prompt. See README.md.
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"os"
	"os/signal"
	"syscall"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"

	"github.com/kvcast/kvcast/client"
)

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	err := run(ctx, os.Args[1:], os.Stdout, os.Stderr)
	stop()
	if err != nil && !errors.Is(err, flag.ErrHelp) {
		fmt.Fprintln(os.Stderr, "router:", err)
		os.Exit(1)
	}
}

func run(ctx context.Context, args []string, stdout, stderr io.Writer) error {
	flags := flag.NewFlagSet("router", flag.ContinueOnError)
	flags.SetOutput(stderr)
	addr := flags.String("kvcast", "localhost:50051", "address of the kvcast server")
	listen := flags.String("listen", "localhost:8080", "HTTP listen address")
	how := flags.String("policy", string(policyPrefix), "routing policy: prefix (with a View), match (with MatchPrefixes), routed (that, and with NoteRouted) or round-robin")
	demo := flags.String("demo", "", "path of a kvcast program: run the demo with it instead")
	requests := flags.Int("requests", 1200, "number of requests of the demo")
	if err := flags.Parse(args); err != nil {
		return err
	}
	if *demo != "" {
		return runDemo(ctx, stdout, *demo, *requests)
	}
	log := slog.New(slog.NewTextHandler(stderr, nil))
	l, err := new(net.ListenConfig).Listen(ctx, "tcp", *listen)
	if err != nil {
		return err
	}
	log.Info("serving", "http", l.Addr().String(), "policy", *how)
	return serve(ctx, l, *addr, policy(*how), client.NewView(), log)
}

// serve routes requests until ctx ends or the subscription to the server at addr fails.
func serve(ctx context.Context, l net.Listener, addr string, p policy, view *client.View, log *slog.Logger) error {
	defer func() { _ = l.Close() }()
	c, err := client.New(addr, grpc.WithTransportCredentials(insecure.NewCredentials()))
	if err != nil {
		return err
	}
	ctx, stop := context.WithCancel(ctx)
	defer stop()
	followed := make(chan error, 1)
	go func() {
		defer stop()
		followed <- view.Follow(c.Subscribe(ctx, client.Config{ClientID: "router", Logger: log}))
	}()
	matcher := c.NewMatcher()
	defer matcher.Close()
	reporter := c.NewReporter(log)
	defer reporter.Close()
	server := &http.Server{Handler: newRouter(view, matcher, reporter, p), ReadHeaderTimeout: 10 * time.Second}
	unblock := context.AfterFunc(ctx, func() { _ = server.Close() })
	defer unblock()
	if err := server.Serve(l); !errors.Is(err, http.ErrServerClosed) {
		return err
	}
	return <-followed
}
