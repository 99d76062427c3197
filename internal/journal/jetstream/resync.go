package jetstream

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/nats-io/nats.go/jetstream"

	"github.com/kvcast/kvcast/internal/journal"
	"github.com/kvcast/kvcast/internal/journal/jetstream/embedded"
	"github.com/kvcast/kvcast/internal/journal/jetstream/internal/checkpoints"
	"github.com/kvcast/kvcast/internal/journal/jetstream/internal/client"
	"github.com/kvcast/kvcast/internal/journal/jetstream/internal/kv"
)

// ackTimeout is how long acknowledgements may stay away before the journal looks what the stream has.
const ackTimeout = 5 * time.Second

// publishLoop publishes appends. When the fate of messages is unknown, it finds out, and publishes again what the stream does not have.
func (d *directory) publishLoop() {
	ticker := time.NewTicker(time.Second)
	defer ticker.Stop()
	suspect := false
	for {
		select {
		case <-d.wake:
		case <-d.suspect:
			suspect = true
		case <-d.server.Faults():
			d.checkServer()
		case <-ticker.C:
			d.checkProgress()
		case <-d.j.Failed():
			return
		case <-d.j.ctx.Done():
			return
		}
		if suspect {
			suspect = !d.resync()
		}
		if !suspect {
			suspect = !d.publish()
		}
	}
}

// checkProgress fails the journal if the server acknowledges nothing any more. No message to the embedded server is lost in transit, so
// nothing has to be published again: the server is slow or stuck.
func (d *directory) checkProgress() {
	silent := time.Duration(0)
	d.mu.Lock()
	if d.w.sent > 0 {
		silent = time.Since(d.j.stall.began())
	}
	d.mu.Unlock()
	if d.stuck.tick(silent) {
		d.failStuck("acknowledged nothing", stuckTime)
	} else if silent > ackTimeout {
		d.checkServer()
	}
}

const (
	// stuckTime is the time without an acknowledgement after which the embedded server counts as stuck.
	stuckTime = time.Minute
	// stuckTicks ticks of publishLoop in a row must see that it acknowledges nothing: after a pause of the process, only the first one does.
	stuckTicks = 10
)

// stuckDetector decides when the embedded server counts as stuck.
type stuckDetector struct{ ticks int }

// tick reports whether the server is stuck. silent is the time since its last acknowledgement; 0 if nothing is in flight.
func (d *stuckDetector) tick(silent time.Duration) bool {
	if silent <= ackTimeout {
		d.ticks = 0
		return false
	}
	d.ticks++
	return d.ticks >= stuckTicks && silent > stuckTime
}

// failStuck fails the journal because the embedded server is stuck: it can deadlock after an error of its files. Only a restart
// of the process ends a deadlock.
func (d *directory) failStuck(what string, after time.Duration) {
	d.j.fail(fmt.Errorf("the NATS server in %s has %s for %v, which can follow an error of its files: start kvcast again", d.j.cfg.Dir, what, after))
}

// checkServer fails the journal if the embedded nats-server cannot write to one of the streams. It does not answer then,
// and does not write to the stream any more before it is started again.
func (d *directory) checkServer() {
	for _, stream := range []string{d.j.cfg.Stream, checkpoints.Stream(d.j.cfg.Stream), kv.WorkersStream(d.j.cfg.Stream)} {
		if err := d.server.Health(stream); err != nil && !errors.Is(err, embedded.ErrNoHealth) {
			d.j.fail(fmt.Errorf("write to stream %q of %s: %w", stream, d.j.client.Where, err))
		}
	}
}

// resync reads which appends in flight the stream has, acknowledges them, and makes the rest be published again. It
// returns false if the stream cannot be read now.
func (d *directory) resync() bool {
	d.mu.Lock()
	acked, sent := d.w.acked, d.w.everSent
	d.mu.Unlock()
	s, info, err := d.j.client.StreamInfo(d.j.ctx)
	switch {
	case errors.Is(err, jetstream.ErrStreamNotFound):
		d.j.fail(fmt.Errorf("%w: %s is gone", ErrUnreadable, d.j.client.Place()))
		return true
	case err != nil:
		d.j.log.Debug("The stream does not answer.", "error", err)
		return false
	}
	last := info.State.LastSeq
	switch {
	case last < acked:
		d.j.fail(fmt.Errorf("%w: %s has lost the acknowledged entries %d to %d", ErrUnreadable, d.j.client.Place(), last+1, acked))
		return true
	case last > acked+uint64(sent):
		d.j.fail(fmt.Errorf("%w: %s has entry %d, which this process did not append", journal.ErrFenced, d.j.client.Place(), last))
		return true
	}
	for seq := acked + 1; seq <= last; seq++ {
		mine, err := d.isMine(s, seq)
		switch {
		case err != nil:
			d.j.log.Debug("A message of the stream cannot be read.", "seq", seq, "error", err)
			return false
		case !mine:
			d.j.fail(fmt.Errorf("%w: entry %d of %s was appended by another process", journal.ErrFenced, seq, d.j.client.Place()))
			return true
		}
	}
	d.mu.Lock()
	for seq := acked + 1; seq <= last; seq++ {
		d.w.receive(seq)
	}
	d.mu.Unlock()
	d.acknowledge()
	d.mu.Lock()
	d.w.retry()
	d.mu.Unlock()
	return true
}

// isMine reports whether the message of a seq is the one in flight. An append that was acknowledged meanwhile is.
func (d *directory) isMine(s jetstream.Stream, seq uint64) (bool, error) {
	ctx, cancel := context.WithTimeout(d.j.ctx, client.RequestTimeout)
	defer cancel()
	m, err := s.GetMsg(ctx, seq)
	if err != nil {
		return false, err
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	if seq <= d.w.acked || d.j.Err() != nil {
		return true, nil
	}
	return d.w.appends[seq-d.w.acked-1].equal(m.Subject, m.Header, m.Data), nil
}
