// Package client has the requests of a journal to its NATS servers.
//
// Requests flow in, and answers flow out. Guarantee: a request ends within RequestTimeout, or ConfigureTimeout. An error says whether the servers have
// answered it (IsUnanswered), since only an answer shows what they have.
package client

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"sync/atomic"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"

	"github.com/kvcast/kvcast/internal/journal"
)

const (
	// RequestTimeout bounds one request to JetStream.
	RequestTimeout = 5 * time.Second
	// ConfigureTimeout bounds the creation and a change of a stream, for which servers write files: seconds on a busy machine.
	ConfigureTimeout = 30 * time.Second
	// RetryInterval is the time between two attempts of a request that was not answered.
	RetryInterval = 500 * time.Millisecond
)

// Client is the connection to the servers. Its fields do not change after Connect.
type Client struct {
	// Stream names the stream of the entries; the names of other streams begin with it.
	Stream string
	// Replicas is the number of servers that store each stream; 0 means 1 for a new one, and no change of an existing one.
	Replicas int
	// Where names the servers in errors.
	Where string
	// IsTransient reports whether a request that failed with an error is to be made again.
	IsTransient func(error) bool
	Log         *slog.Logger

	Conn *nats.Conn // nil before Connect
	JS   jetstream.JetStream

	denied atomic.Pointer[error]
}

// Connect connects to the servers that an option names.
func (c *Client) Connect(to nats.Option, opts ...nats.Option) error {
	conn, err := nats.Connect("", append(opts, to)...)
	if err != nil {
		return err
	}
	c.Conn = conn
	c.JS, err = jetstream.New(conn)
	return err
}

// Deny records a permission that a server has denied.
func (c *Client) Deny(err error) { c.denied.Store(&err) }

// Denied returns the last permission that a server has denied, or nil.
func (c *Client) Denied() error {
	if denied := c.denied.Load(); denied != nil {
		return *denied
	}
	return nil
}

// UntilPermitted is UntilAnswered while a journal is opened. It does not ask again once the servers have denied something, which
// they do not answer.
func (c *Client) UntilPermitted(ctx context.Context, ask func() error) error {
	return c.UntilAnswered(ctx, func() error {
		err := ask()
		if denied := c.Denied(); err != nil && denied != nil {
			return denied
		}
		return err
	})
}

// UntilAnswered calls a function until the servers answer it, or ctx ends: they may be electing a leader, or be creating the stream
// for another process.
func (c *Client) UntilAnswered(ctx context.Context, ask func() error) error {
	for {
		err := ask()
		if err == nil || !c.IsTransient(err) || ctx.Err() != nil {
			return err
		}
		c.Log.Debug("The servers do not answer.", "error", err)
		select {
		case <-time.After(RetryInterval):
		case <-ctx.Done():
			return err
		}
	}
}

// StreamInfo returns the state of the stream of the entries now.
func (c *Client) StreamInfo(ctx context.Context) (jetstream.Stream, *jetstream.StreamInfo, error) {
	s, err := c.OpenStream(ctx, c.Stream)
	if err != nil {
		return nil, nil, err
	}
	return s, s.CachedInfo(), nil
}

// OpenStream asks for a stream. The servers answer nothing while it has no leader.
func (c *Client) OpenStream(ctx context.Context, name string) (jetstream.Stream, error) {
	ctx, cancel := context.WithTimeout(ctx, RequestTimeout)
	defer cancel()
	return c.JS.Stream(ctx, name)
}

// Place names the stream and where it is.
func (c *Client) Place() string { return fmt.Sprintf("stream %q of %s", c.Stream, c.Where) }

// NoSpace returns a journal.ErrNoSpace for a stream that has refused a message.
func (c *Client) NoSpace(ctx context.Context, stream, description string) error {
	limits := "limits unknown"
	ctx, cancel := context.WithTimeout(ctx, RequestTimeout)
	defer cancel()
	if s, err := c.JS.Stream(ctx, stream); err == nil {
		c := s.CachedInfo().Config
		limits = fmt.Sprintf("max_bytes %d, max_msgs %d, max_msg_size %d; -1 is none", c.MaxBytes, c.MaxMsgs, c.MaxMsgSize)
	}
	return fmt.Errorf("%w: stream %q of %s: %s (%s)", journal.ErrNoSpace, stream, c.Where, description, limits)
}

// CreatedBucket returns a KV bucket that exists. A server that has not heard of it yet has no answer.
func (c *Client) CreatedBucket(ctx context.Context, name string) (jetstream.KeyValue, error) {
	ctx, cancel := context.WithTimeout(ctx, RequestTimeout)
	defer cancel()
	kv, err := c.JS.KeyValue(ctx, name)
	if errors.Is(err, jetstream.ErrBucketNotFound) {
		err = fmt.Errorf("%w: %w", ErrNoAnswer, err)
	}
	return kv, err
}

// peerSilence is the time after which a leader may have been replaced that has not heard a replica: replicas elect another after 4 s
// without it at the earliest, and it hears them every second (minElectionTimeout and hbInterval of nats-server's raft.go).
const peerSilence = 3 * time.Second

// HearsMajority returns an error unless the leader of a stream, which has told cluster, has lately heard so many replicas that there is no
// other. cluster is nil if the stream has one replica.
func HearsMajority(cluster *jetstream.ClusterInfo) error {
	if cluster == nil || len(cluster.Replicas) == 0 {
		return nil
	}
	heard, all := 1, 1+len(cluster.Replicas)
	for _, peer := range cluster.Replicas {
		if !peer.Offline && peer.Active <= peerSilence {
			heard++
		}
	}
	if 2*heard <= all {
		return fmt.Errorf("the leader %s has heard %d of %d replicas in %v, itself included", cluster.Leader, heard, all, peerSilence)
	}
	return nil
}
