// Package client is the Go client for routers: a subscription that resumes by itself, and a
// view of all KV caches that follows from it.
//
// Subscribe streams of kvcast.v1 flow in; updates flow out, each with the position to resume from once it is
// applied. Guarantee: since the last SnapshotBegin, every entry is delivered once and in order, over any number
// of streams; otherwise the caller is told why not, and a snapshot follows. A stream that ends, is silent for
// too long or violates the contract is replaced by another that continues after it.
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
// A caller with its own state ranges over Subscribe instead. It discards its state at each
// SnapshotBegin, and stores a position only together with the state up to it. Between
// SnapshotBegin and SnapshotEnd the state is incomplete, and updates have no position.
//
// The package needs neither cgo nor libzmq.
package client

import (
	"context"
	"fmt"
	"iter"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/connectivity"
	"google.golang.org/grpc/keepalive"

	kvcastv1 "github.com/kvcast/kvcast/proto/kvcast/v1"
)

const (
	// pingInterval is the shortest that grpc-go allows. kvcast servers allow it too.
	pingInterval = 10 * time.Second
	pingTimeout  = 10 * time.Second
	// maxMessage exceeds every response: they have at most 1 MiB, or a single entry of
	// about 3 MiB unless one event is larger.
	maxMessage = 64 << 20
)

// Client subscribes to a server. It holds no connection between streams and needs no Close.
// It is safe for concurrent use.
type Client struct {
	target  string
	options []grpc.DialOption
	conn    grpc.ClientConnInterface // nil: each stream opens a connection
}

// New returns a client for a server. Target and options are those of grpc.NewClient; the
// options must include transport credentials. New does not connect.
//
// Each stream opens its own connection, so that after a failure the name is resolved and a
// load balancer chooses a server again. Connections are pinged after 10 s without traffic.
func New(target string, options ...grpc.DialOption) (*Client, error) {
	c := &Client{target: target, options: append([]grpc.DialOption{
		grpc.WithKeepaliveParams(keepalive.ClientParameters{Time: pingInterval, Timeout: pingTimeout}),
		grpc.WithDefaultCallOptions(grpc.MaxCallRecvMsgSize(maxMessage)),
	}, options...)}
	_, closeConn, err := c.connect() // validates the options
	if err != nil {
		return nil, fmt.Errorf("new client: %w", err)
	}
	closeConn()
	return c, nil
}

// FromConn returns a client that uses a connection owned by the caller. A stream that is silent for too long is
// replaced over the same connection, so the connection should use keepalive.
func FromConn(conn grpc.ClientConnInterface) *Client { return &Client{conn: conn} }

// connect returns a connection and the function that closes it.
func (c *Client) connect() (grpc.ClientConnInterface, func(), error) {
	if c.conn != nil {
		return c.conn, func() {}, nil
	}
	conn, err := grpc.NewClient(c.target, c.options...)
	if err != nil {
		return nil, nil, err
	}
	return conn, func() { _ = conn.Close() }, nil // fails only if it is already closed
}

// connClosed reports whether the caller has closed its connection.
func (c *Client) connClosed() bool {
	conn, ok := c.conn.(interface{ GetState() connectivity.State })
	return ok && conn.GetState() == connectivity.Shutdown
}

// Subscribe returns the updates of a subscription. Each range over it is a new subscription. It starts no
// goroutine that outlives the range, and reads no further than the caller does.
//
// The range ends when ctx ends, without an error; when the caller leaves it; or with an
// error, which is the last element: a *ConfigError; an *Error that a retry would repeat
// (INVALID_ARGUMENT, UNAUTHENTICATED, PERMISSION_DENIED, UNIMPLEMENTED, OUT_OF_RANGE such as
// a position ahead of the server, FAILED_PRECONDITION); with GapFail, an error that a snapshot
// would have repaired; or ErrConnClosed. All other errors are Interruptions.
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

// Update is a step of a subscription: a message from the server or an Interruption.
type Update struct {
	// Message is the message as the contract describes it; nil with an Interruption. The
	// caller may keep it but must not modify it, since a View may reference it.
	//
	// The first message of each stream has an Accepted. Messages from SnapshotBegin, at which
	// the caller discards its state, to SnapshotEnd are parts of a snapshot.
	Message *kvcastv1.SubscribeResponse
	// Position is where to resume once this and all earlier updates are applied. It is zero
	// while the delivered state is incomplete: before the first position, from SnapshotBegin
	// to SnapshotEnd, and with an Interruption that is followed by a snapshot.
	Position Position
	// Interruption is set when a stream has ended and another follows. The caller need not do anything.
	Interruption *Interruption

	subscription *subscription
}

// Interruption is the time between two streams.
type Interruption struct {
	// Err is why the stream ended or failed to start: an *Error, a *ViolationError, ErrIdle,
	// ErrEnded, or the cause passed to Resnapshot.
	Err error
	// Snapshot reports whether the next stream starts with a snapshot because what was
	// delivered cannot be continued.
	Snapshot bool
	// Wait is the time until the next stream starts.
	Wait time.Duration
	// Failures is the number of consecutive streams without progress, including this one.
	Failures int
}

// Resnapshot makes the subscription start again with a snapshot, because the caller found
// its state to be wrong. It must be called before the next update is requested, which is then
// an Interruption with the cause. With GapFail the cause ends the subscription instead.
func (u Update) Resnapshot(cause error) {
	if u.subscription != nil {
		u.subscription.rejected = cause
	}
}
