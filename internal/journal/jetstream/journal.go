// Package jetstream is the durable journal: it keeps entries in a stream of NATS JetStream, in an embedded nats-server
// (Config.Dir) or in existing ones (Config.Servers).
//
// Records flow in and are published with a bounded number in flight. An entry becomes visible when the stream has
// acknowledged it, and never before. Reads are served from a mirror in memory, so they never wait for a network or a
// disk. After a restart, Load returns all retained entries, once, in order, and the epoch and all seqs continue.
//
// # One writer, or several
//
// A directory has one writer: the journal locks it. It publishes each entry with the last seq that the stream must have. An
// append whose fate is unknown is never published blindly a second time: the journal reads the stream's last seq and compares
// the messages after the last acknowledged entry with those in flight. Equal ones are acknowledged, and the rest is published
// again.
//
// The stream in Servers has any number of writers, each for the workers that it owns. Claim makes a process the owner of a
// worker: it writes a record among the worker's entries. The owner publishes each entry, or each atomic batch, with the seq
// that the worker's last entry must have. So after a claim by another process, the stream refuses what the former owner
// publishes, however late it comes, and its appends fail with journal.ErrFenced. A message may be published again as long as
// its fate is unknown, since it is stored once at most. Every process reads the stream by a consumer, and what that delivers
// becomes visible and is acknowledged.
//
// A failed journal stays failed: the appends in flight and all later ones return the first error, while reads continue.
//
// # What survives
//
// A crash of the process loses no acknowledged entry, since nats-server writes each message to its file before it
// acknowledges it. A crash of the machine loses none with Config.SyncAlways; otherwise it can lose what was not synced.
// The next Open then sees that the machine has booted again, keeps the entries that are left, and draws a new epoch, so
// that no position is ever used twice. So it does if the directory may be an older copy, or if it is not known which entries
// must be there; see embedded.Position. For Config.Servers, the servers' own settings decide (sync_interval, replicas).
//
// SyncAlways needs nats-server 2.14.6 or later: earlier ones do not sync the files that compaction rewrites, so a crash
// of the machine could lose acknowledged entries. The embedded server is 2.15.2. Open logs a warning if that of Config.Servers is
// earlier than 2.14.6.
package jetstream

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"

	"github.com/kvcast/kvcast/internal/journal"
	"github.com/kvcast/kvcast/internal/journal/jetstream/embedded"
	"github.com/kvcast/kvcast/internal/journal/jetstream/internal/client"
)

// ErrUnreadable means that the stream has lost entries or that one of them cannot be decoded. The error's text names
// the seq. Discard makes the journal usable again.
var ErrUnreadable = errors.New("journal is unreadable")

// Journal is a journal.Journal whose entries survive the process. Call Load once before any other method except
// Checkpoints, Registrations, Discard and Bounds.
type Journal struct {
	cfg      Config
	log      *slog.Logger
	subjects string // the prefix of the entries' subjects, including the last dot
	replies  string // the prefix of the acknowledgements' subjects, including the last dot

	server        *embedded.Server // nil with Config.Servers
	client        *client.Client
	checkpoints   *Checkpoints
	registrations *Registrations
	shared        *shared                        // nil with Config.Dir
	mirror        atomic.Pointer[journal.Memory] // the acknowledged entries; replaced by Load and Discard
	slots         chan struct{}                  // has one element per append in flight
	wake          chan struct{}                  // there is a message to publish
	stuck         stuckDetector                  // of publishLoop
	suspect       chan struct{}                  // the fate of messages in flight is unknown
	failed        chan struct{}                  // closed when err is set
	closing       chan struct{}                  // closed by Close

	ctx    context.Context // ends when the journal has stopped
	stop   context.CancelFunc
	loops  sync.WaitGroup
	start  sync.Once // starts the loops; Load or the first Append does
	closed sync.Once

	acking sync.Mutex // held while entries are acknowledged; taken before mu

	mu       sync.Mutex // guards all below
	w        window
	err      error // the first failure
	refusing bool  // Close was called
	canceled map[*journal.Source]error
	since    time.Time // of the last progress while appends are in flight or the connection is lost

	retain    atomic.Uint64                     // entries after it stay in the stream
	retained  chan struct{}                     // retain was set
	first     uint64                            // oldest seq of the stream when it was opened, or by Mark; with Config.Servers alone
	following atomic.Pointer[nats.Subscription] // of the consumer that is followed
	lacking   int                               // consecutive answers that the stream lacks entries that it must have; used by the loop that follows it alone
	seen      struct{ first, last uint64 }      // seqs of the stream when that loop last looked
	read      lastRead                          // the newest entry that was read; used by that loop, and by Load before it
	verified  bool                              // read was found in the stream since that loop has a consumer
	purged    uint64                            // last seq that was removed from the stream; used by the retention loop alone
}

// lastRead is an entry as the stream has it: the time at which it was stored tells it from any other that has its seq later.
type lastRead struct {
	seq uint64
	at  time.Time
}

var _ journal.Journal = (*Journal)(nil)

// Open starts the embedded nats-server or connects to Servers, and creates or checks the stream. The caller then calls
// Load. With Dir, Open fails if another process uses the directory, and moves files aside that nats-server cannot read:
// the journal is then empty and has a new epoch.
func Open(ctx context.Context, cfg Config) (_ *Journal, err error) {
	if err := cfg.Validate(); err != nil {
		return nil, err
	}
	cfg = cfg.withDefaults()
	j := &Journal{
		cfg:      cfg,
		log:      cfg.Log.With("stream", cfg.Stream),
		subjects: "kvcast." + cfg.Stream + ".",
		replies:  nats.NewInbox() + ".",
		slots:    make(chan struct{}, cfg.InFlight),
		wake:     make(chan struct{}, 1),
		suspect:  make(chan struct{}, 1),
		retained: make(chan struct{}, 1),
		failed:   make(chan struct{}),
		closing:  make(chan struct{}),
		canceled: make(map[*journal.Source]error),
	}
	j.client = &client.Client{Stream: cfg.Stream, Replicas: cfg.Replicas, Where: cfg.Dir, IsTransient: func(error) bool { return false }, Log: j.log}
	if cfg.Dir == "" {
		j.shared = newShared(j)
		j.client.Where = strings.Join(cfg.Servers, ",")
		j.client.IsTransient = func(err error) bool { return client.IsUnanswered(err) || errors.Is(err, context.DeadlineExceeded) }
	}
	j.ctx, j.stop = context.WithCancel(context.Background())
	defer func() {
		if err != nil {
			err = errors.Join(err, j.release())
		}
	}()
	if cfg.Dir != "" {
		if err := j.openEmbedded(ctx); err != nil {
			return nil, err
		}
	} else if err := j.connect(); err != nil {
		return nil, fmt.Errorf("connect to %v: %w", cfg.Servers, err)
	} else if v := j.client.Conn.ConnectedServerVersion(); !syncsCompaction(v) {
		j.log.Warn("the NATS server may lose acknowledged entries if its machine crashes, also with sync_interval: always: it does not sync what compaction rewrites; "+
			"want nats-server 2.14.6 or later", "version", v)
	}
	var st streamState
	err = j.client.UntilPermitted(ctx, func() error {
		st, err = j.openStream(ctx)
		return err
	})
	if err != nil {
		return nil, err
	}
	j.first = st.first
	j.reset(st.epoch, st.last)
	if err := j.client.UntilPermitted(ctx, func() error { return j.openCheckpoints(ctx) }); err != nil {
		return nil, err
	}
	if !cfg.Follow { // the processes that append have the workers
		if err := j.client.UntilPermitted(ctx, func() error { return j.openRegistrations(ctx) }); err != nil {
			return nil, err
		}
	}
	onReply := j.onReply
	if j.shared != nil {
		onReply = j.shared.onReply
	}
	acks, err := j.client.Conn.Subscribe(j.replies+">", onReply)
	if err != nil {
		return nil, err
	}
	return j, acks.SetPendingLimits(-1, -1)
}

// reset makes the journal continue an epoch after a seq, with an empty mirror.
func (j *Journal) reset(epoch string, last uint64) {
	retention := j.cfg.Retention
	retention.Epoch, retention.After = epoch, last
	j.mirror.Store(journal.NewMemory(retention))
	j.w = window{acked: last}
	if j.shared != nil {
		j.shared.forgetOwners()
	}
}

// startLoops starts the loops, once.
func (j *Journal) startLoops() {
	j.start.Do(func() {
		if j.shared == nil {
			j.loops.Go(j.publishLoop)
		} else {
			j.loops.Go(j.followLoop)
		}
		if j.cfg.Follow {
			return
		}
		if j.shared != nil {
			j.loops.Go(j.shared.loop)
		}
		j.loops.Go(j.retentionLoop)
	})
}

// Read returns entries from the mirror; see journal.Journal.
func (j *Journal) Read(ctx context.Context, q journal.Query) (journal.Chunk, error) {
	return j.mirror.Load().Read(ctx, q)
}

// Bounds returns the epoch and the range of entries that Read returns.
func (j *Journal) Bounds() journal.Bounds { return j.mirror.Load().Bounds() }

// Changed returns a channel that is closed when the next entry is acknowledged.
func (j *Journal) Changed() <-chan struct{} { return j.mirror.Load().Changed() }

// Pin makes the mirror retain all entries after a seq until the next call; see journal.Memory. While the mirror has no
// room, entries stay in flight, and Append blocks.
func (j *Journal) Pin(seq uint64) { j.mirror.Load().Pin(seq) }

// Bytes returns the memory of the mirror's entries and their index.
func (j *Journal) Bytes() int { return j.mirror.Load().Bytes() }

// EvictedBytes returns the memory of entries evicted from the mirror that is not freed yet.
func (j *Journal) EvictedBytes() int { return j.mirror.Load().EvictedBytes() }

// Stalled returns since when no append in flight was acknowledged, or since when the connection to the servers is lost:
// a moment ago while the journal makes progress, and the zero time while it has nothing to do. It never blocks.
func (j *Journal) Stalled() time.Time {
	since := time.Time{}
	if j.shared != nil {
		since = j.shared.oldest()
	}
	j.mu.Lock()
	defer j.mu.Unlock()
	if since.IsZero() || !j.since.IsZero() && j.since.Before(since) {
		since = j.since
	}
	return since
}

// InFlight returns the number of appends that are not acknowledged yet.
func (j *Journal) InFlight() int { return len(j.slots) }

// Connection reports whether there is a connection to a server, and how often one was restored.
func (j *Journal) Connection() (connected bool, reconnects uint64) {
	return j.client.Conn.IsConnected(), j.client.Conn.Stats().Reconnects
}

// Failed returns a channel that is closed when the journal has failed; see Err.
func (j *Journal) Failed() <-chan struct{} { return j.failed }

// Err returns the error that has failed the journal, or nil.
func (j *Journal) Err() error {
	j.mu.Lock()
	defer j.mu.Unlock()
	return j.err
}

// Close waits until every append is acknowledged or has failed, or until ctx ends, which is an error if there are appends in
// flight. It then stops the embedded nats-server or the connection.
func (j *Journal) Close(ctx context.Context) error {
	var err error
	j.closed.Do(func() {
		j.mu.Lock()
		j.refusing = true
		j.mu.Unlock()
		close(j.closing)
		for range cap(j.slots) {
			select {
			case j.slots <- struct{}{}:
				continue // whether or not ctx has ended
			default:
			}
			select {
			case j.slots <- struct{}{}:
				continue
			case <-j.failed:
			case <-ctx.Done():
				err = fmt.Errorf("close journal: %w", ctx.Err())
				j.fail(ctx.Err())
			}
			break
		}
		err = errors.Join(err, j.release())
	})
	return err
}

// release stops what Open has started.
func (j *Journal) release() error {
	j.stop()
	if m := j.mirror.Load(); m != nil {
		_ = m.Close(j.ctx)
	}
	j.loops.Wait()
	if j.client.Conn != nil {
		j.client.Conn.Close()
	}
	if j.server == nil {
		return nil
	}
	// A callback of the connection may still acknowledge; it finds nothing in flight after this.
	j.acking.Lock()
	defer j.acking.Unlock()
	return j.server.Close()
}

// Retain makes the stream keep all entries after a seq until the next call. It removes earlier ones when the mirror
// has evicted them. Until the first call, the stream keeps all entries.
func (j *Journal) Retain(seq uint64) {
	j.retain.Store(seq)
	signal(j.retained)
}

const (
	// retentionInterval is the time between two looks at what can be removed from the stream.
	retentionInterval = time.Second
	// renewInterval is the least time between two renewals of the position in a directory; see embedded.Position.
	renewInterval = time.Minute
)

// retentionLoop removes entries from the stream, and renews the position in a directory.
func (j *Journal) retentionLoop() {
	renewed := time.Now()
	ticker := time.NewTicker(retentionInterval)
	defer ticker.Stop()
	for {
		select {
		case <-ticker.C:
		case <-j.retained:
		case <-j.failed:
			return
		case <-j.ctx.Done():
			return
		}
		if j.server != nil {
			if err := j.server.CheckDir(j.cfg.Stream); err != nil {
				j.fail(err)
				return
			}
		}
		if err := j.purge(j.ctx); err != nil && j.ctx.Err() == nil {
			j.log.Warn("The stream keeps more entries than it should: they cannot be purged.", "error", err)
		}
		if j.server == nil || time.Since(renewed) < renewInterval {
			continue
		}
		renewed = time.Now()
		if err := j.server.Position.Renew(); err != nil {
			j.log.Warn("The position cannot be renewed. An older copy of it is not noticed if it is written over the file in place.",
				"dir", j.cfg.Dir, "error", err)
		}
	}
}

// purge removes the entries that the mirror has evicted and that recovery does not need.
func (j *Journal) purge(ctx context.Context) error {
	evicted := j.mirror.Load().Bounds().Oldest - 1
	until := min(evicted, j.retain.Load())
	if j.shared != nil {
		j.shared.renew(evicted + 1)
		until = min(until, j.shared.firstRecord(until+1)-1)
	}
	if until <= j.purged {
		return nil
	}
	if j.server != nil {
		if err := j.server.Position.SetPurged(until); err != nil {
			return err
		}
	}
	if err := j.purgeStream(ctx, until); err != nil {
		return err
	}
	j.purged = until
	return nil
}

// purgeStream removes the entries up to a seq.
func (j *Journal) purgeStream(ctx context.Context, until uint64) error {
	s, _, err := j.client.StreamInfo(ctx)
	if err != nil {
		return err
	}
	ctx, cancel := context.WithTimeout(ctx, client.RequestTimeout)
	defer cancel()
	return s.Purge(ctx, jetstream.WithPurgeSequence(until+1))
}
