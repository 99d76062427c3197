package harness

import (
	"context"
	"errors"
	"fmt"
	"net"
	"sync"
	"testing"

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/test/bufconn"

	"github.com/kvcast/kvcast/internal/core/index"
	"github.com/kvcast/kvcast/internal/feed"
	"github.com/kvcast/kvcast/internal/follow"
	"github.com/kvcast/kvcast/internal/journal"
	"github.com/kvcast/kvcast/internal/wire"
	"github.com/kvcast/kvcast/pipeline"
	kvcastv1 "github.com/kvcast/kvcast/proto/kvcast/v1"
	"github.com/kvcast/kvcast/server"
)

// InstanceConfig configures an Instance. The zero value serves on a TCP port of its own.
type InstanceConfig struct {
	Server  server.Config
	Journal journal.Config
	// InMemory replaces TCP by in-memory buffers, as testing/synctest requires.
	InMemory bool
	// Listener, if not nil, replaces TCP. Clients use its DialContext method if it has one, as
	// bufconn.Listener does, and its address otherwise.
	Listener net.Listener
	// Starting keeps the server rejecting subscribers until Server.StartServing is called.
	Starting bool
	// BlockHashes makes the index keep block hashes, for matches.
	BlockHashes bool
	// WrapJournal replaces the server's journal; nil replaces nothing.
	WrapJournal func(*follow.Follower) server.Journal
}

// Instance is kvcast in this process, without engines: the test writes batches directly into the
// pipeline.
type Instance struct {
	Journal  *journal.Memory
	Pipeline *pipeline.Pipeline
	Follower *follow.Follower
	Server   *server.Server
	// Target is the address that clients dial, such as 127.0.0.1:1234.
	Target string

	dialOptions []grpc.DialOption
	served      chan error
	followed    chan error
	following   context.CancelFunc // ends the follower
	stop        func() error
	lanes       map[string]feed.Lane
	batches     int64
}

// visibleJournal is a journal whose appends wait until subscribers can read the entry, so that a test that has written a
// batch finds it everywhere.
type visibleJournal struct {
	*journal.Memory
	follower *follow.Follower
}

func (j visibleJournal) Append(ctx context.Context, r journal.Record) (journal.Pending, error) {
	p, err := j.Memory.Append(ctx, r)
	if err != nil {
		return p, err
	}
	seq, err := p.Wait(ctx)
	if err != nil {
		return p, err
	}
	return p, j.follower.Wait(ctx, seq)
}

// StartInstance starts an instance, which stops with the test.
func StartInstance(t testing.TB, cfg InstanceConfig) *Instance {
	t.Helper()
	i, err := NewInstance(cfg)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := i.Stop(); err != nil {
			t.Error(err)
		}
	})
	return i
}

// NewInstance starts an instance, which the caller stops.
func NewInstance(cfg InstanceConfig) (*Instance, error) {
	i := &Instance{Journal: journal.NewMemory(cfg.Journal), served: make(chan error, 1), followed: make(chan error, 1), lanes: make(map[string]feed.Lane)}
	i.stop = sync.OnceValue(i.shutdown)
	state := index.New()
	if cfg.BlockHashes {
		state.KeepBlockHashes()
	}
	i.Follower = follow.New(i.Journal, state, follow.Delays{})
	i.Follower.Observe(cfg.Server.Incidents.AddEvent)
	var err error
	if i.Pipeline, err = pipeline.New(pipeline.Config{MaxBlocks: pipeline.MaxMaxBlocks}, visibleJournal{i.Journal, i.Follower}); err != nil {
		return nil, fmt.Errorf("start server: %w", err)
	}
	var entries server.Journal = i.Follower
	if cfg.WrapJournal != nil {
		entries = cfg.WrapJournal(i.Follower)
	}
	if cfg.Server.Aliases == nil {
		cfg.Server.Aliases = i.Pipeline.Aliases
	}
	i.Server = server.New(cfg.Server, entries, i.Follower.Index())
	l, err := i.listen(cfg)
	if err != nil {
		return nil, fmt.Errorf("start server: %w", err)
	}
	following, cancel := context.WithCancel(context.Background())
	i.following = cancel
	go func() { i.followed <- i.Follower.Run(following) }()
	go func() { i.served <- i.Server.Serve(l) }()
	if !cfg.Starting {
		i.Server.StartServing()
	}
	return i, nil
}

// listen returns the listener of a config, and sets how clients connect to it.
func (i *Instance) listen(cfg InstanceConfig) (net.Listener, error) {
	l := cfg.Listener
	switch {
	case l != nil:
	case cfg.InMemory:
		l = bufconn.Listen(1 << 20)
	default:
		var err error
		if l, err = new(net.ListenConfig).Listen(context.Background(), "tcp", "127.0.0.1:0"); err != nil {
			return nil, err
		}
	}
	i.Target = l.Addr().String()
	if in, ok := l.(interface {
		DialContext(ctx context.Context) (net.Conn, error)
	}); ok {
		i.Target = "passthrough:///" + i.Target
		i.dialOptions = append(i.dialOptions, grpc.WithContextDialer(
			func(ctx context.Context, _ string) (net.Conn, error) { return in.DialContext(ctx) }))
	}
	return l, nil
}

// Stop shuts the server down gracefully and waits for it. Further calls return the same error.
func (i *Instance) Stop() error { return i.stop() }

func (i *Instance) shutdown() error {
	ctx, cancel := context.WithTimeout(context.Background(), Timeout)
	defer cancel()
	i.following()
	followed := <-i.followed
	i.Server.Shutdown(ctx)
	if err := errors.Join(followed, <-i.served, ctx.Err()); err != nil {
		return fmt.Errorf("stop server: %w", err)
	}
	return nil
}

// Dial returns a connection to the server, which is closed when the test ends, before the server
// stops. It has no TLS unless the options set it.
func (i *Instance) Dial(t testing.TB, opts ...grpc.DialOption) *grpc.ClientConn {
	t.Helper()
	return Dial(t, i.Target, append(i.dialOptions[:len(i.dialOptions):len(i.dialOptions)], opts...)...)
}

// Client returns a client with a new connection, as Dial does.
func (i *Instance) Client(t testing.TB, opts ...grpc.DialOption) kvcastv1.RouterEventServiceClient {
	t.Helper()
	return kvcastv1.NewRouterEventServiceClient(i.Dial(t, opts...))
}

// Dial returns a connection to a server, which is closed when the test ends. It has no TLS unless
// the options set it.
func Dial(t testing.TB, target string, opts ...grpc.DialOption) *grpc.ClientConn {
	t.Helper()
	opts = append([]grpc.DialOption{grpc.WithTransportCredentials(insecure.NewCredentials())}, opts...)
	conn, err := grpc.NewClient(target, opts...)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := conn.Close(); err != nil {
			t.Errorf("close client: %v", err)
		}
	})
	return conn
}

// AddWorker adds a worker, whose batches Batch writes.
func (i *Instance) AddWorker(w feed.Worker) { i.lanes[w.Name] = i.Pipeline.AddWorker(w) }

// Lane returns the lane of an added worker.
func (i *Instance) Lane(worker string) feed.Lane { return i.lanes[worker] }

// Batch writes a batch of a worker's engine. The engine and ingest times of batches are 1 ns, 2 ns, 3 ns and so on.
func (i *Instance) Batch(worker string, events ...wire.Event) {
	i.batches++
	i.lanes[worker].Batch(&feed.Batch{EngineTime: i.batches, IngestTime: i.batches, Events: events})
}
