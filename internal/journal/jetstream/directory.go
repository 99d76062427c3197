package jetstream

import (
	"context"
	"fmt"
	"sync"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"

	"github.com/kvcast/kvcast/internal/journal"
	"github.com/kvcast/kvcast/internal/journal/jetstream/embedded"
	"github.com/kvcast/kvcast/internal/journal/jetstream/internal/checkpoints"
	"github.com/kvcast/kvcast/internal/journal/jetstream/internal/client"
	"github.com/kvcast/kvcast/internal/journal/jetstream/internal/kv"
)

// directory is the mode of a journal in Config.Dir. This process is the only one that uses the streams, whose server it runs.
type directory struct {
	j       *Journal
	server  *embedded.Server // nil before connect
	renewed time.Time        // when the position was renewed; used by the retention loop alone
	wake    chan struct{}    // there is a message to publish
	suspect chan struct{}    // the fate of messages in flight is unknown
	stuck   stuckDetector    // of publishLoop

	acking sync.Mutex // held while entries are acknowledged; taken before mu

	mu       sync.Mutex // guards all below
	w        window
	canceled map[*journal.Source]error
}

func newDirectory(j *Journal) *directory {
	j.client.Where = j.cfg.Dir
	j.client.IsTransient = client.IsDisconnected // the server is in this process, and the connection is soon replaced
	return &directory{
		j: j, renewed: time.Now(), wake: make(chan struct{}, 1), suspect: make(chan struct{}, 1), canceled: make(map[*journal.Source]error),
	}
}

func (d *directory) connect(ctx context.Context) error {
	cfg := &d.j.cfg
	entries, stored, registrations := cfg.Stream, checkpoints.Stream(cfg.Stream), kv.WorkersStream(cfg.Stream)
	var err error
	d.server, err = embedded.Start(embedded.Config{
		Dir: cfg.Dir, SyncAlways: cfg.SyncAlways, SyncInterval: cfg.SyncInterval, Log: d.j.log,
	}, entries, stored, registrations)
	if err != nil {
		return fmt.Errorf("open journal: %w", err)
	}
	for _, streams := range [][]string{
		{entries, stored}, // checkpoints belong to the entries, so they are moved away together
		{stored},
		{registrations},
	} {
		if _, err := d.server.MoveUnreadable(streams...); err != nil {
			return fmt.Errorf("open journal: %w", err)
		}
	}
	if err := ctx.Err(); err != nil {
		return err
	}
	return d.j.client.Connect(nats.InProcessServer(d.server.NATS()), d.j.options()...)
}

func (d *directory) createStream(ctx context.Context) (streamState, error) {
	st, err := d.j.createStream(ctx, func(c *jetstream.StreamConfig) {
		label(c, formatWithoutOwners, embedded.BootID(), d.j.cfg.SyncAlways)
		c.AllowAtomicPublish = d.j.cfg.SyncAlways
	})
	if err != nil {
		return st, err
	}
	d.server.Position.Forget()
	return st, d.syncMetadata()
}

func (d *directory) adoptStream(ctx context.Context, info *jetstream.StreamInfo) (streamState, error) {
	return d.j.adoptStream(ctx, info, func(c *jetstream.StreamConfig) {
		boot := embedded.BootID()
		rebooted, synced := boot == "" || boot != c.Metadata[metadataBoot], c.Metadata[metadataSynced] == "true"
		doubt := d.server.Position.Doubt(c.Metadata[metadataEpoch])
		beginEpoch := func(why string, args ...any) {
			d.server.Position.Forget()
			c.Metadata[metadataEpoch] = journal.NewEpoch()
			d.j.log.Warn(why+" The journal continues in a new epoch.", append(args, "dir", d.j.cfg.Dir, "entries", info.State.Msgs,
				"last", info.State.LastSeq, "epoch", c.Metadata[metadataEpoch])...)
		}
		switch {
		case rebooted && !synced:
			beginEpoch("The machine has booted since the journal was written without sync always: entries may be lost.")
		case doubt != nil:
			beginEpoch("It is not known whether entries are lost, or the directory is an older copy.", "reason", doubt)
		}
		label(c, formatWithoutOwners, boot, d.j.cfg.SyncAlways && (synced || rebooted))
		c.AllowAtomicPublish = c.AllowAtomicPublish || d.j.cfg.SyncAlways
	})
}

func (d *directory) openStores(ctx context.Context) (err error) {
	if d.j.checkpoints, err = checkpoints.Open(ctx, d.j.client, d.j.host(d), 0); err != nil {
		return err
	}
	d.j.registrations, err = kv.OpenInDirectory(ctx, d.j.client, d.j.cfg.Dir, d.server.SyncMessages)
	return err
}

func (d *directory) SyncEntries() error {
	if d.j.cfg.SyncAlways {
		return nil
	}
	return d.server.SyncMessages(d.j.cfg.Stream)
}

func (d *directory) CheckpointsStuck(after time.Duration) {
	d.failStuck("stored no checkpoint", after)
}

func (d *directory) mark(uint64) {}

func (d *directory) checkRange(first, last uint64) error {
	if err := d.server.Position.Check(first, last); err != nil {
		return fmt.Errorf("%w: %w", ErrUnreadable, err)
	}
	return nil
}

func (d *directory) continueAfter(epoch string, last, purged uint64) error {
	d.mu.Lock()
	d.w.acked = last // nothing is appended yet
	d.mu.Unlock()
	return d.server.Position.Set(epoch, last, purged)
}

func (d *directory) isPurged(context.Context, uint64) (bool, error) { return false, nil }

func (d *directory) endEpoch(context.Context, string) error { return nil }

func (d *directory) renameEpoch(context.Context, *jetstream.StreamConfig) error { return nil }

func (d *directory) newest() uint64 { return d.server.Position.Newest() }

// renewInterval is the least time between two renewals of the position in a directory; see embedded.Position.
const renewInterval = time.Minute

// maintain returns an error if files were removed, and renews the position.
func (d *directory) maintain() error {
	if err := d.server.CheckDir(d.j.cfg.Stream); err != nil {
		return err
	}
	if time.Since(d.renewed) < renewInterval {
		return nil
	}
	d.renewed = time.Now()
	if err := d.server.Position.Renew(); err != nil {
		d.j.log.Warn("The position cannot be renewed. An older copy of it is not noticed if it is written over the file in place.",
			"dir", d.j.cfg.Dir, "error", err)
	}
	return nil
}

func (d *directory) purgeable(_, until uint64) uint64 { return until }

func (d *directory) purging(until uint64) error { return d.server.Position.SetPurged(until) }

// syncMetadata syncs the stream's metadata to the disk, which the embedded nats-server does only with SyncAlways.
func (d *directory) syncMetadata() error { return d.server.SyncMetadata(d.j.cfg.Stream) }

func (d *directory) close() error {
	if d.server == nil {
		return nil
	}
	// A callback of the connection may still acknowledge; it finds nothing in flight after this.
	d.acking.Lock()
	defer d.acking.Unlock()
	return d.server.Close()
}

func (d *directory) start() {
	d.j.loops.Go(d.publishLoop)
	d.j.loops.Go(d.j.retention.loop)
}

func (d *directory) delivered(_ *nats.Msg, _ journal.Source, e *Entry, _ time.Time, show func() error) error {
	if e.Invalid != nil { // nobody else publishes to a directory
		return fmt.Errorf("%w: entry %d: %w", ErrUnreadable, e.Seq, e.Invalid)
	}
	return show()
}

func (d *directory) reset(last uint64) {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.w = window{acked: last}
}

func (d *directory) reconnected() {
	d.mu.Lock()
	if len(d.w.appends) == 0 {
		d.j.stall.end()
	}
	d.mu.Unlock()
	signal(d.suspect)
}

func (d *directory) oldest() time.Time { return time.Time{} }
