package main

import (
	"fmt"
	"net"
	"strconv"
	"strings"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/status"

	kvcastv1 "github.com/kvcast/kvcast/proto/kvcast/v1"
)

// clientFlags are those of every command that asks a server.
type clientFlags struct {
	Addr   string `default:"localhost:50051" placeholder:"ADDR" help:"The server (${default})."`
	Output string `short:"o" enum:"text,json" default:"text" placeholder:"FORMAT" help:"text for people, json for programs: an object a line (${default})."`
}

// call calls the server, by a connection of its own.
func (c *clientFlags) call(f func(kvcastv1.RouterEventServiceClient) error) error {
	conn, err := dial(c.Addr)
	if err != nil {
		return err
	}
	defer func() { _ = conn.Close() }()
	if err := f(kvcastv1.NewRouterEventServiceClient(conn)); err != nil {
		return callError(c.Addr, err)
	}
	return nil
}

// filterFlags narrow a stream.
type filterFlags struct {
	Worker []string `placeholder:"NAME" help:"Only these workers. Repeatable."`
	Model  []string `placeholder:"NAME" help:"Only workers of these models. Repeatable."`
	Tier   []string `placeholder:"TIER" help:"Only blocks in these tiers: device, host_pinned, disk, external. Repeatable."`
}

// filter returns nil where nothing is to be left out.
func (f *filterFlags) filter() (*kvcastv1.Filter, error) {
	if len(f.Worker)+len(f.Model)+len(f.Tier) == 0 {
		return nil, nil
	}
	out := &kvcastv1.Filter{Workers: f.Worker, Models: f.Model}
	for _, name := range f.Tier {
		tier := kvcastv1.Tier_value["TIER_"+strings.ToUpper(name)]
		if tier == 0 {
			return nil, fmt.Errorf("--tier: %q is not allowed: want device, host_pinned, disk or external", name)
		}
		out.Tiers = append(out.Tiers, kvcastv1.Tier(tier))
	}
	return out, nil
}

// flags writes the flags as they would be given again.
func (f *filterFlags) flags(c clientFlags) string {
	var b strings.Builder
	fmt.Fprintf(&b, " --addr %s", c.Addr)
	if c.Output != "text" {
		fmt.Fprintf(&b, " -o %s", c.Output)
	}
	for _, list := range []struct {
		flag   string
		values []string
	}{{"--worker", f.Worker}, {"--model", f.Model}, {"--tier", f.Tier}} {
		for _, v := range list.values {
			fmt.Fprintf(&b, " %s %s", list.flag, v)
		}
	}
	return b.String()
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

// proto returns nil for a position that is not set.
func (p position) proto() *kvcastv1.Position {
	if !p.set {
		return nil
	}
	return &kvcastv1.Position{Epoch: p.epoch, Seq: p.seq}
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

// callError makes one line of a failed call that says what to do. An error that
// is not of the call stays as it is.
func callError(addr string, err error) error {
	s, ok := status.FromError(err)
	if !ok {
		return err
	}
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
