package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"strconv"
	"strings"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/status"

	kvcastv1 "github.com/kvcast/kvcast/proto/kvcast/v1"
)

type subscribeCmd struct {
	Addr   string   `default:"localhost:50051" placeholder:"ADDR" help:"The server (${default})."`
	After  position `placeholder:"EPOCH:SEQ" help:"Resume after this position; :SEQ means the server's current epoch."`
	From   string   `placeholder:"START" help:"Start from earliest (the default: all that the server retains) or latest (new entries only)."`
	Count  uint64   `placeholder:"N" help:"End after this many events, and the rest of their entry."`
	Output string   `short:"o" enum:"text,json" default:"text" placeholder:"FORMAT" help:"text for people, json for programs: an object a line (${default})."`
}

// position is a Position as people write it.
type position struct {
	set   bool
	epoch string
	seq   uint64
}

// UnmarshalText implements encoding.TextUnmarshaler.
func (p *position) UnmarshalText(text []byte) error {
	epoch, digits, ok := strings.Cut(string(text), ":")
	seq, err := strconv.ParseUint(digits, 10, 64)
	if !ok || err != nil {
		return fmt.Errorf("%q is not allowed: want EPOCH:SEQ, or :SEQ for the server's current epoch, such as :42", text)
	}
	*p = position{set: true, epoch: epoch, seq: seq}
	return nil
}

func (p position) String() string { return fmt.Sprintf("%s:%d", p.epoch, p.seq) }

func (c *subscribeCmd) request() *kvcastv1.SubscribeRequest {
	switch {
	case c.After.set:
		return &kvcastv1.SubscribeRequest{Start: &kvcastv1.SubscribeRequest_After{
			After: &kvcastv1.Position{Epoch: c.After.epoch, Seq: c.After.seq},
		}}
	case c.From == "latest":
		return &kvcastv1.SubscribeRequest{Start: &kvcastv1.SubscribeRequest_Latest{Latest: &kvcastv1.FromLatest{}}}
	}
	return &kvcastv1.SubscribeRequest{Start: &kvcastv1.SubscribeRequest_Earliest{Earliest: &kvcastv1.FromEarliest{}}}
}

// Run prints the stream until ctx is done, the stream ends, or enough has come.
func (c *subscribeCmd) Run(ctx context.Context, std stdio) error {
	if c.After.set && c.From != "" {
		return usageError{errors.New("--after and --from can't be used together: give one of them")}
	}
	if c.From != "" && c.From != "earliest" && c.From != "latest" {
		return usageError{fmt.Errorf("--from: %q is not allowed: want earliest or latest", c.From)}
	}
	conn, err := dial(c.Addr)
	if err != nil {
		return err
	}
	defer func() { _ = conn.Close() }()
	p := newPrinter(std.out, c.Output)
	reached, err := c.follow(ctx, kvcastv1.NewRouterEventServiceClient(conn), p)
	if reached.set {
		format := ""
		if c.Output != "text" {
			format = " -o " + c.Output
		}
		_, _ = fmt.Fprintf(std.err, "resume with: kvcast subscribe --addr %s --after %s%s\n", c.Addr, reached, format)
	}
	return err
}

// follow prints the stream, and returns the position reached.
func (c *subscribeCmd) follow(ctx context.Context, client kvcastv1.RouterEventServiceClient, p *printer) (reached position, err error) {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	stream, err := client.Subscribe(ctx, c.request())
	if err != nil {
		return reached, callError(c.Addr, err)
	}
	var events uint64
	for c.Count == 0 || events < c.Count {
		m, err := stream.Recv()
		if errors.Is(err, io.EOF) || ctx.Err() != nil {
			return reached, nil
		}
		if err != nil {
			return reached, callError(c.Addr, err)
		}
		if a := m.GetAccepted(); a != nil {
			reached.epoch = a.GetEpoch()
		}
		for _, e := range m.GetEntries() {
			if err := p.entry(reached.epoch, e); err != nil {
				return reached, err
			}
			events += uint64(len(e.GetEvents()))
			reached.set, reached.seq = true, e.GetSeq()
			if c.Count > 0 && events >= c.Count {
				return reached, nil
			}
		}
		if err := p.control(m); err != nil {
			return reached, err
		}
		if pos := m.GetPosition(); pos != nil {
			reached.set, reached.seq = true, pos.GetSeq()
		}
	}
	return reached, nil
}

// dial makes a connection that is opened by its first call.
func dial(addr string) (*grpc.ClientConn, error) {
	if _, port, err := net.SplitHostPort(addr); err != nil || port == "" {
		return nil, usageError{fmt.Errorf("--addr: %q is not allowed: want HOST:PORT, without a scheme", addr)}
	}
	conn, err := grpc.NewClient(addr, grpc.WithTransportCredentials(insecure.NewCredentials()))
	if err != nil {
		return nil, usageError{fmt.Errorf("--addr: %q is not allowed: want HOST:PORT: %w", addr, err)}
	}
	return conn, nil
}

// callError makes one line of a failed call that says what to do.
func callError(addr string, err error) error {
	s := status.Convert(err)
	if s.Code() == codes.Unavailable && len(s.Details()) == 0 {
		return fmt.Errorf("no kvcast server answers at %s%s; start one with kvcast serve, or name another with --addr", addr, dialCause(s.Message()))
	}
	return fmt.Errorf("%s: %s", codeName(s.Code()), s.Message())
}

// dialCause finds in gRPC's message why no connection was made; the rest of it
// says no more.
func dialCause(message string) string {
	_, cause, ok := strings.Cut(message, "dial tcp")
	if !ok {
		return ""
	}
	if i := strings.LastIndex(cause, ": "); i >= 0 {
		cause = cause[i+2:]
	}
	return ": " + strings.Trim(cause, ` "`)
}

// codeName writes a code as the contract does.
func codeName(c codes.Code) string {
	var b strings.Builder
	for i, r := range c.String() {
		if i > 0 && r >= 'A' && r <= 'Z' {
			b.WriteByte('_')
		}
		b.WriteRune(r)
	}
	return strings.ToUpper(b.String())
}
