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

// publishLoop publishes appends. When the fate of messages is unknown, it finds out, and publishes again what the
// stream does not have.
func (j *Journal) publishLoop() {
	ticker := time.NewTicker(time.Second)
	defer ticker.Stop()
	suspect := false
	for {
		var faults <-chan struct{}
		if j.server != nil {
			faults = j.server.Faults()
		}
		select {
		case <-j.wake:
		case <-j.suspect:
			suspect = true
		case <-faults:
			j.checkServer()
		case <-ticker.C:
			suspect = suspect || j.overdue()
		case <-j.failed:
			return
		case <-j.ctx.Done():
			return
		}
		if suspect {
			suspect = !j.resync()
		}
		if !suspect {
			suspect = !j.publish()
		}
	}
}

// overdue reports whether appends wait for an acknowledgement for too long.
func (j *Journal) overdue() bool {
	silent := time.Duration(0)
	j.mu.Lock()
	if j.w.sent > 0 {
		silent = time.Since(j.since)
	}
	j.mu.Unlock()
	if j.server == nil {
		return silent > ackTimeout
	}
	// No message to the embedded server is lost in transit, so nothing has to be published again: the server is slow or stuck.
	if j.stuck.tick(silent) {
		j.failStuck("acknowledged nothing", stuckTime)
	} else if silent > ackTimeout {
		j.checkServer()
	}
	return false
}

const (
	// stuckTime is the time without an acknowledgement after which the embedded server counts as stuck.
	stuckTime = time.Minute
	// stuckTicks ticks of publishLoop in a row must see that it acknowledges nothing: after a pause of the process, only the
	// first one does.
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
func (j *Journal) failStuck(what string, d time.Duration) {
	j.fail(fmt.Errorf("the NATS server in %s has %s for %v, which can follow an error of its files: start kvcast again", j.cfg.Dir, what, d))
}

// checkServer fails the journal if the embedded nats-server cannot write to one of the streams. It does not answer then,
// and does not write to the stream any more before it is started again.
func (j *Journal) checkServer() {
	for _, stream := range []string{j.cfg.Stream, checkpoints.Stream(j.cfg.Stream), kv.WorkersStream(j.cfg.Stream)} {
		if err := j.server.Health(stream); err != nil && !errors.Is(err, embedded.ErrNoHealth) {
			j.fail(fmt.Errorf("write to stream %q of %s: %w", stream, j.client.Where, err))
		}
	}
}

// resync reads which appends in flight the stream has, acknowledges them, and makes the rest be published again. It
// returns false if the stream cannot be read now.
func (j *Journal) resync() bool {
	j.mu.Lock()
	acked, sent := j.w.acked, j.w.everSent
	j.mu.Unlock()
	s, info, err := j.client.StreamInfo(j.ctx)
	switch {
	case errors.Is(err, jetstream.ErrStreamNotFound):
		j.fail(fmt.Errorf("%w: %s is gone", ErrUnreadable, j.client.Place()))
		return true
	case err != nil:
		j.log.Debug("The stream does not answer.", "error", err)
		return false
	}
	last := info.State.LastSeq
	switch {
	case last < acked:
		j.fail(fmt.Errorf("%w: %s has lost the acknowledged entries %d to %d", ErrUnreadable, j.client.Place(), last+1, acked))
		return true
	case last > acked+uint64(sent):
		j.fail(fmt.Errorf("%w: %s has entry %d, which this process did not append", journal.ErrFenced, j.client.Place(), last))
		return true
	}
	for seq := acked + 1; seq <= last; seq++ {
		mine, err := j.isMine(s, seq)
		switch {
		case err != nil:
			j.log.Debug("A message of the stream cannot be read.", "seq", seq, "error", err)
			return false
		case !mine:
			j.fail(fmt.Errorf("%w: entry %d of %s was appended by another process", journal.ErrFenced, seq, j.client.Place()))
			return true
		}
	}
	j.mu.Lock()
	for seq := acked + 1; seq <= last; seq++ {
		j.w.receive(seq)
	}
	j.mu.Unlock()
	j.acknowledge()
	j.mu.Lock()
	j.w.retry()
	j.mu.Unlock()
	return true
}

// isMine reports whether the message of a seq is the one in flight. An append that was acknowledged meanwhile is.
func (j *Journal) isMine(s jetstream.Stream, seq uint64) (bool, error) {
	ctx, cancel := context.WithTimeout(j.ctx, client.RequestTimeout)
	defer cancel()
	m, err := s.GetMsg(ctx, seq)
	if err != nil {
		return false, err
	}
	j.mu.Lock()
	defer j.mu.Unlock()
	if seq <= j.w.acked || j.err != nil {
		return true, nil
	}
	return j.w.appends[seq-j.w.acked-1].equal(m.Subject, m.Header, m.Data), nil
}
