// Package client is the Go client for routers: a subscription that resumes, and a View of all KV caches.
//
// Subscribe streams of kvcast.v1 flow in. Updates flow out, each with the position from which to resume when it is applied. Guarantee:
// since the last SnapshotBegin, every entry is delivered once and in order, over any number of streams. If that is impossible, the caller
// gets the reason, and a snapshot follows. A stream that ends, sends no message within a timeout, or violates the contract is replaced by
// another stream that resumes after the last position.
//
//	c, err := client.New("kvcast:50051", grpc.WithTransportCredentials(insecure.NewCredentials()))
//	...
//	view := client.NewView()
//	go func() { done <- view.Follow(c.Subscribe(ctx, client.Config{})) }()
//	...
//	for _, m := range view.Match(client.Prompt{Model: "m", Tokens: tokens}) {
//		// m.Worker has the first m.Blocks blocks of the prompt.
//	}
//
// A caller with its own state ranges over Subscribe instead. It discards its state at each SnapshotBegin, and stores a position only
// together with the state that includes it. Between SnapshotBegin and SnapshotEnd the state is incomplete, and updates have no position.
//
// The package needs neither cgo nor libzmq.
package client

import (
	"context"
	"fmt"
	"iter"
	"strings"
	"sync/atomic"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/connectivity"
	"google.golang.org/grpc/keepalive"

	kvcastv1 "github.com/kvcast/kvcast/proto/kvcast/v1"
)

const (
	// pingInterval is the shortest interval that grpc-go allows. Servers allow it by default.
	pingInterval = 10 * time.Second
	pingTimeout  = 10 * time.Second
	// maxMessage in bytes is larger than any response: a response has at most 1 MiB or a single entry, and an
	// entry has at most about 3 MiB or a single event.
	maxMessage = 64 << 20
)

// Client subscribes to a server, or to one of several that serve the same workers. It has no connection between streams
// and needs no Close. It is safe for concurrent use.
type Client struct {
	targets []string
	options []grpc.DialOption
	conn    grpc.ClientConnInterface // nil: each stream opens a connection
	current atomic.Uint32            // index of the target to use; it grows when that target fails
}

// shuffled makes a connection try the addresses of its target in random order: a DNS name may have many.
const shuffled = `{"loadBalancingConfig": [{"pick_first": {"shuffleAddressList": true}}]}`

// New returns a client for a server, with the target and options of grpc.NewClient. The options must include
// transport credentials. New does not connect.
//
// The target may be a list, separated by commas. The client then uses the first one until a stream ends or a call finds
// it unavailable, and then the next. It resumes at its position there, if the servers share their journal; otherwise their
// epochs differ, and it continues with a snapshot.
//
// Each stream opens its own connection. After a failure, the target is therefore resolved again, and a load balancer can choose another
// server. Of a name with several addresses, one is chosen at random. A connection without traffic for 10 s is pinged.
func New(target string, options ...grpc.DialOption) (*Client, error) {
	c := &Client{targets: strings.Split(target, ","), options: append([]grpc.DialOption{
		grpc.WithKeepaliveParams(keepalive.ClientParameters{Time: pingInterval, Timeout: pingTimeout}),
		grpc.WithDefaultCallOptions(grpc.MaxCallRecvMsgSize(maxMessage)),
		grpc.WithDefaultServiceConfig(shuffled),
	}, options...)}
	for _, t := range c.targets {
		if t == "" {
			return nil, fmt.Errorf("new client: target %q: want one or more servers, separated by commas", target)
		}
		conn, err := grpc.NewClient(t, c.options...) // validates the target and the options
		if err != nil {
			return nil, fmt.Errorf("new client: %w", err)
		}
		_ = conn.Close()
	}
	return c, nil
}

// FromConn returns a client that uses a connection owned by the caller. All streams use the connection, even
// after an ErrIdle, so the connection should use keepalive.
func FromConn(conn grpc.ClientConnInterface) *Client { return &Client{conn: conn} }

// connection is a connection for a stream or a call.
type connection struct {
	grpc.ClientConnInterface
	close  func()
	failed func() // makes the next connection go to the next target
}

func (c *Client) connect() (connection, error) {
	if c.conn != nil {
		return connection{c.conn, func() {}, func() {}}, nil
	}
	i := c.current.Load()
	conn, err := grpc.NewClient(c.targets[int(i)%len(c.targets)], c.options...)
	if err != nil {
		return connection{}, err
	}
	return connection{
		conn,
		func() { _ = conn.Close() }, // an error means that the connection is already closed
		func() { c.current.CompareAndSwap(i, i+1) },
	}, nil
}

// servers returns the number of targets, at least 1.
func (c *Client) servers() int { return max(1, len(c.targets)) }

// connClosed reports whether the caller has closed its connection.
func (c *Client) connClosed() bool {
	conn, ok := c.conn.(interface{ GetState() connectivity.State })
	return ok && conn.GetState() == connectivity.Shutdown
}

// Subscribe returns the updates of a subscription. Each range over the result is a new subscription. Subscribe
// starts no goroutine that outlives the range, and does not read ahead of the caller.
//
// The range ends without an error when ctx ends or when the caller breaks the loop. Otherwise its last element has the error that ended it:
//
//   - a *ConfigError;
//   - an *Error that a retry would repeat: INVALID_ARGUMENT, UNAUTHENTICATED (unless the stream has delivered entries: the credentials of the
//     next may be others), PERMISSION_DENIED, UNIMPLEMENTED, OUT_OF_RANGE (such as a position beyond the server's newest entry) or
//     FAILED_PRECONDITION;
//   - with GapFail, an error after which GapSnapshot would continue with a snapshot;
//   - ErrConnClosed.
//
// All other errors are reported as an Interruption.
func (c *Client) Subscribe(ctx context.Context, cfg Config) iter.Seq2[Update, error] {
	return func(yield func(Update, error) bool) {
		s, err := newSubscription(c, cfg)
		if err == nil {
			err = s.run(ctx, func(u Update) bool { return yield(u, nil) })
		}
		if err != nil {
			yield(Update{}, err)
		}
	}
}

// Update is a message from the server or an Interruption.
type Update struct {
	// Message is a message of the contract; nil with an Interruption. The caller may keep the message but must
	// not modify it, since a View may reference it.
	//
	// The first message of each stream has an Accepted. The messages from SnapshotBegin to SnapshotEnd are a
	// snapshot: the caller discards its state at SnapshotBegin.
	Message *kvcastv1.SubscribeResponse
	// Position is the position from which to resume when this and all earlier updates are applied. It is zero while the delivered state is
	// incomplete or about to be replaced: before the first position, from an Accepted with MODE_SNAPSHOT or a SnapshotBegin to SnapshotEnd, and with an
	// Interruption whose Snapshot is true.
	Position Position
	// Interruption is set when a stream has ended and another follows. The caller may ignore it.
	Interruption *Interruption

	subscription *subscription
}

// Interruption describes the end of a stream that another stream replaces.
type Interruption struct {
	// Err is why the stream ended or failed to start: an *Error, a *ViolationError, ErrIdle, ErrEnded, or the cause passed to Resnapshot.
	Err error
	// Snapshot reports whether the next stream starts with a snapshot.
	Snapshot bool
	// Wait is the time until the next stream starts.
	Wait time.Duration
	// Failures is the number of consecutive streams without progress, including this one.
	Failures int
}

// Resnapshot ends the current stream and starts another stream with a snapshot. The caller uses it when its state
// is wrong, and must call it before it requests the next update, which is then an Interruption with the cause.
// With GapFail, the cause ends the subscription instead.
func (u Update) Resnapshot(cause error) {
	if u.subscription != nil {
		u.subscription.rejected = cause
	}
}
