package client

import (
	"context"
	"fmt"
	"iter"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/connectivity"
	"google.golang.org/grpc/keepalive"
)

const (
	// pingInterval is the shortest that grpc-go allows; a kvcast server allows it.
	pingInterval = 10 * time.Second
	pingTimeout  = 10 * time.Second
	// maxMessage is far more than a response has: 1 MiB, or a single entry of about
	// 3 MiB, unless one event is larger.
	maxMessage = 64 << 20
)

// Client subscribes to a server. It holds no connection, and has nothing to close.
// Its methods may be called from any goroutine.
type Client struct {
	target  string
	options []grpc.DialOption
	conn    grpc.ClientConnInterface // nil: each stream has a connection of its own
}

// New returns a client of the server at a target, in grpc.NewClient's form. The
// options are passed on to it, and have to name transport credentials. It is an
// error if gRPC does not take them; nothing is connected to yet.
//
// Each stream has a connection of its own. So one that is dead is left behind with
// all it had, the name is looked up anew for the next, and a load balancer chooses
// anew. Connections are pinged after 10 s without traffic.
func New(target string, options ...grpc.DialOption) (*Client, error) {
	c := &Client{target: target, options: append([]grpc.DialOption{
		grpc.WithKeepaliveParams(keepalive.ClientParameters{Time: pingInterval, Timeout: pingTimeout}),
		grpc.WithDefaultCallOptions(grpc.MaxCallRecvMsgSize(maxMessage)),
	}, options...)}
	_, hangUp, err := c.connect()
	if err != nil {
		return nil, fmt.Errorf("new client: %w", err)
	}
	hangUp()
	return c, nil
}

// FromConn returns a client that calls over a connection of the caller's, who
// closes it. A stream that stands still is asked for anew over the same connection:
// the caller sees to it that the connection notices when it is dead, with keepalive.
func FromConn(conn grpc.ClientConnInterface) *Client { return &Client{conn: conn} }

// connect returns a connection, and what to do when it is no longer needed.
func (c *Client) connect() (grpc.ClientConnInterface, func(), error) {
	if c.conn != nil {
		return c.conn, func() {}, nil
	}
	conn, err := grpc.NewClient(c.target, c.options...)
	if err != nil {
		return nil, nil, err
	}
	return conn, func() { _ = conn.Close() }, nil // it fails only if it is closed already
}

// closed tells that the caller's connection is closed for good.
func (c *Client) closed() bool {
	conn, ok := c.conn.(interface{ GetState() connectivity.State })
	return ok && conn.GetState() == connectivity.Shutdown
}

// Subscribe returns the updates of a subscription, which begins when they are
// ranged over; each range is a subscription of its own. It starts no goroutine that
// outlives the range, and reads no further than the caller does.
//
// A range ends when ctx is done, without an error, when the caller leaves it, or
// with an error, which comes alone and last: a *ConfigError; an *Error that asking
// again would not change (INVALID_ARGUMENT, UNAUTHENTICATED, PERMISSION_DENIED,
// UNIMPLEMENTED, OUT_OF_RANGE, such as a position that is ahead of the server, and
// FAILED_PRECONDITION); with GapFail what a snapshot would have mended; or
// ErrConnClosed. All else is an Interruption.
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
