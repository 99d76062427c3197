// Package jetstream is the durable journal: it keeps entries in a stream of NATS JetStream, in an embedded nats-server
// (Config.Dir) or in existing ones (Config.Servers).
//
// Records flow in and are published with a bounded number in flight. An entry becomes visible when the stream has
// acknowledged it, and never before. Reads are served from a mirror in memory, so they never wait for a network or a
// disk. After a restart, Load returns all retained entries, once, in order, and the epoch and all seqs continue.
//
// # One writer, or several
//
// A directory has one writer: the journal locks it. It publishes each entry with the last seq that the stream must have, and asks for one
// answer for many entries. If it is not known whether entries are stored, they are not simply published again: the journal reads the stream's
// last seq and compares the messages after the last acknowledged entry with those in flight. Equal ones are acknowledged, and the rest is
// published again.
//
// The stream in Servers has any number of writers, each for the workers that it owns. Claim makes a process the owner of a worker: it
// writes a record among the worker's entries. The owner publishes each entry, or each atomic batch, with the seq that the worker's last
// entry must have. So after a claim by another process, the stream refuses what the former owner publishes, however late it comes, and its
// appends fail with journal.ErrFenced. A message may be published again as long as its fate is unknown, since it is stored once at most.
// Every process reads the stream by a consumer, and what that delivers becomes visible and is acknowledged.
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
// SyncAlways needs nats-server 2.14.6 or later: earlier ones do not sync the files that compaction rewrites, so a crash of the machine
// could lose acknowledged entries. The version of the embedded server is in go.mod. Open logs a warning if that of Config.Servers is earlier than 2.14.6.
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
	"github.com/kvcast/kvcast/internal/journal/jetstream/internal/client"
	"github.com/kvcast/kvcast/internal/journal/jetstream/internal/entry"
)

// ErrUnreadable means that the stream has lost entries or, in a directory, that one of them cannot be decoded. The error's text names
// the seq. Discard makes the journal usable again.
var ErrUnreadable = errors.New("journal is unreadable")

// Journal is a journal.Journal whose entries survive the process. Call Load once before any other method except
// Checkpoints, Registrations, Discard and Bounds.
type Journal struct {
	cfg     Config
	log     *slog.Logger
	codec   entry.Codec // its prefix is that of the entries' subjects
	replies string      // the prefix of the acknowledgements' subjects, including the last dot

	client        *client.Client
	mode          mode
	shared        *shared // nil in a directory
	checkpoints   *Checkpoints
	registrations *Registrations                 // nil with Config.Follow
	mirror        atomic.Pointer[journal.Memory] // the acknowledged entries; replaced by Load and Discard
	retention     *retention
	stall         stall
	foreign       atomic.Uint64 // messages that kvcast has not written
	*admission

	ctx    context.Context // ends when the journal has stopped
	stop   context.CancelFunc
	loops  sync.WaitGroup
	start  sync.Once // starts the loops; Load or the first Append does
	closed sync.Once
}

var _ journal.Journal = (*Journal)(nil)

// Open starts the embedded nats-server or connects to Servers, and creates or checks the stream. The caller then calls
// Load. With Dir, Open fails if another process uses the directory, and moves files aside that nats-server cannot read:
// the journal is then empty and has a new epoch.
func Open(ctx context.Context, cfg Config) (_ *Journal, err error) {
	cfg = cfg.withDefaults()
	j := &Journal{
		cfg:       cfg,
		log:       cfg.Log.With("stream", cfg.Stream),
		codec:     entry.Codec{Prefix: "kvcast." + cfg.Stream + ".", Instance: cfg.Instance},
		replies:   nats.NewInbox() + ".",
		admission: newAdmission(cfg.InFlight),
	}
	j.client = &client.Client{Stream: cfg.Stream, Replicas: cfg.Replicas, Log: j.log}
	j.codec.MaxPayload = func() int64 { return j.client.Conn.MaxPayload() }
	j.retention = &retention{j: j, changed: make(chan struct{}, 1)}
	j.mode = newMode(j)
	j.ctx, j.stop = context.WithCancel(context.Background())
	defer func() {
		if err != nil {
			err = errors.Join(err, j.release())
		}
	}()
	if err := j.mode.connect(ctx); err != nil {
		return nil, err
	}
	var st streamState
	err = j.client.UntilPermitted(ctx, func() error {
		st, err = j.openStream(ctx)
		return err
	})
	if err != nil {
		return nil, err
	}
	j.mode.mark(st.first)
	j.reset(st.epoch, st.last)
	if err := j.mode.openStores(ctx); err != nil {
		return nil, err
	}
	acks, err := j.client.Conn.Subscribe(j.replies+">", j.mode.onReply)
	if err != nil {
		return nil, err
	}
	return j, acks.SetPendingLimits(-1, -1)
}

// options returns the options of every connection.
func (j *Journal) options() []nats.Option {
	return []nats.Option{
		nats.Name("kvcast"),
		nats.MaxReconnects(-1),
		nats.ReconnectBufSize(-1), // what is in flight is published again by resync
		nats.ReconnectWait(500 * time.Millisecond),
		nats.PingInterval(2 * time.Second), // a connection that has ended unnoticed is replaced after two that are not answered
		nats.DisconnectErrHandler(func(_ *nats.Conn, err error) {
			if j.Err() == nil {
				j.stall.begin()
			}
			if j.ctx.Err() == nil {
				j.log.Warn("The connection to the journal's servers is lost; entries wait for it.", "error", err)
			}
		}),
		nats.ReconnectHandler(func(*nats.Conn) {
			j.log.Info("The connection to the journal's servers is back.")
			j.mode.reconnected()
		}),
		nats.ErrorHandler(func(_ *nats.Conn, _ *nats.Subscription, err error) {
			j.log.Warn("NATS reports an error.", "error", err)
			if !errors.Is(err, nats.ErrPermissionViolation) {
				return
			}
			j.client.Deny(err)
			if strings.Contains(err.Error(), `Publish to "`+j.codec.Prefix) { // an entry, which is never answered
				j.fail(fmt.Errorf("append an entry: %w; permit the NATS user to publish to %q", err, j.codec.Prefix+">"))
			}
		}),
	}
}

// reset makes the journal continue an epoch after a seq, with an empty mirror.
func (j *Journal) reset(epoch string, last uint64) {
	retention := j.cfg.Retention
	retention.Epoch, retention.After = epoch, last
	j.mirror.Store(journal.NewMemory(retention))
	j.mode.reset(last)
}

// startLoops starts the loops, once.
func (j *Journal) startLoops() { j.start.Do(j.mode.start) }

// Append starts to append an entry. It blocks while Config.InFlight appends are not acknowledged, until ctx ends or the journal fails.
func (j *Journal) Append(ctx context.Context, r journal.Record) (journal.Pending, error) {
	if j.cfg.Follow {
		return journal.Pending{}, errors.New("the journal follows another process, and appends no entries")
	}
	m, err := j.codec.Encode(r)
	if err == nil {
		err = j.acquire(ctx)
	}
	if err != nil { // no later entry of the source may be visible without this one
		j.mode.cancel(r.Source, err)
		return journal.Pending{}, err
	}
	return j.mode.push(r, m)
}

// fail fails the journal: the appends in flight and all later ones. Only the first error counts.
func (j *Journal) fail(err error) {
	if !j.admission.fail(err) {
		return
	}
	if !errors.Is(err, context.Canceled) {
		j.log.Error("The journal has failed: it accepts no entries until it is opened again.", "error", err)
	}
	j.mode.fail(err)
}

// refusedFor returns the error of an entry that the stream has refused.
func (j *Journal) refusedFor(code jetstream.ErrorCode, description string) error {
	if client.IsNoSpace(code) {
		return j.client.NoSpace(j.ctx, j.cfg.Stream, description)
	}
	return fmt.Errorf("JetStream error %d: %s", code, description)
}

// signal makes a loop that waits for c run once.
func signal(c chan<- struct{}) {
	select {
	case c <- struct{}{}:
	default:
	}
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
	since := j.mode.oldest()
	if began := j.stall.began(); since.IsZero() || !began.IsZero() && began.Before(since) {
		since = began
	}
	return since
}

// Connection reports whether there is a connection to a server, and how often one was restored.
func (j *Journal) Connection() (connected bool, reconnects uint64) {
	return j.client.Conn.IsConnected(), j.client.Conn.Stats().Reconnects
}

// reportForeign counts and logs a message of the stream that is no entry, or that its worker's owner has not written.
func (j *Journal) reportForeign(subject string, seq uint64, why error) {
	j.foreign.Add(1)
	j.log.Warn("The stream has a message that is not an entry of kvcast: somebody else publishes to its subjects.", "subject", subject, "seq", seq, "cause", why)
}

// Foreign returns the number of messages that were read from the stream and are no entries, or that their worker's owner has not written.
func (j *Journal) Foreign() uint64 { return j.foreign.Load() }

// Close waits until every append is acknowledged or has failed, or until ctx ends, which is an error if there are appends in
// flight. It then stops the embedded nats-server or the connection.
func (j *Journal) Close(ctx context.Context) error {
	var err error
	j.closed.Do(func() {
		j.endAdmission()
		for range cap(j.slots) {
			select {
			case j.slots <- struct{}{}:
				continue // whether or not ctx has ended
			default:
			}
			select {
			case j.slots <- struct{}{}:
				continue
			case <-j.Failed():
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
	return j.mode.close()
}

// MaxRecordBytes returns the size of the largest message that the servers take (max_payload): a record's body and state, the
// escaped names of worker and model, and some 50 bytes.
func (j *Journal) MaxRecordBytes() int { return int(j.codec.MaxPayload()) }

// retentionInterval is the time between two looks at what can be removed from the stream.
const retentionInterval = time.Second

// retention removes the entries from the stream that the mirror has evicted and that recovery does not need.
type retention struct {
	j       *Journal
	after   atomic.Uint64 // entries after it stay in the stream
	changed chan struct{} // after was set
	purged  uint64        // last seq that was removed from the stream; used by the loop, and by Load before it
}

// Retain makes the stream keep all entries after a seq until the next call. It removes earlier ones when the mirror
// has evicted them. Until the first call, the stream keeps all entries.
func (j *Journal) Retain(seq uint64) {
	j.retention.after.Store(seq)
	signal(j.retention.changed)
}

// loop removes entries until the journal fails or ends.
func (r *retention) loop() {
	ticker := time.NewTicker(retentionInterval)
	defer ticker.Stop()
	for {
		select {
		case <-ticker.C:
		case <-r.changed:
		case <-r.j.Failed():
			return
		case <-r.j.ctx.Done():
			return
		}
		if err := r.j.mode.maintain(); err != nil {
			r.j.fail(err)
			return
		}
		if err := r.purge(r.j.ctx); err != nil && r.j.ctx.Err() == nil {
			r.j.log.Warn("The stream keeps more entries than it should: they cannot be purged.", "error", err)
		}
	}
}

func (r *retention) purge(ctx context.Context) error {
	evicted := r.j.mirror.Load().Bounds().Oldest - 1
	until := r.j.mode.purgeable(evicted, min(evicted, r.after.Load()))
	if until <= r.purged {
		return nil
	}
	if err := r.j.mode.purging(until); err != nil {
		return err
	}
	s, _, err := r.j.client.StreamInfo(ctx)
	if err != nil {
		return err
	}
	ctx, cancel := context.WithTimeout(ctx, client.RequestTimeout)
	defer cancel()
	if err := s.Purge(ctx, jetstream.WithPurgeSequence(until+1)); err != nil {
		return err
	}
	r.purged = until
	return nil
}
