package ingest

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"time"

	"github.com/kvcast/kvcast/ingest/config"
	"github.com/kvcast/kvcast/ingest/internal/sequence"
	"github.com/kvcast/kvcast/internal/budget"
	"github.com/kvcast/kvcast/internal/feed"
	"github.com/kvcast/kvcast/internal/transport"
)

// startPatience is how long the first request to an engine may wait for a transfer slot. It is longer
// than for other requests, because the engine's blocks are unknown without the replay.
const startPatience = 2 * time.Minute

// requestReplay sends a request in a goroutine of its own.
func (p *publisher) requestReplay(r sequence.Request) {
	p.worker.log.Debug("requesting a replay", "source", p.source, "rank", p.rank, "cause", r.Cause.String(), "from", r.From)
	p.cancelReplay = p.worker.spawn(func(ctx context.Context) { p.replay(ctx, r) })
}

// whileRead returns a function that calls others with the worker's mutex held, unless ctx is done or the worker is not read any more.
func (p *publisher) whileRead(ctx context.Context) func(func()) {
	w := p.worker
	return func(f func()) {
		w.mu.Lock()
		defer w.mu.Unlock()
		if ctx.Err() == nil && w.inStream() {
			f()
		}
	}
}

// replay sends a request, and passes its replies and its end to the machine. It is called without the worker's mutex.
func (p *publisher) replay(ctx context.Context, r sequence.Request) {
	w := p.worker
	locked := p.whileRead(ctx)
	q := transport.Request{
		Endpoint: r.Endpoint, From: r.From, Responsive: r.Answered, Failures: r.Failures,
		Waited: func(d time.Duration) { locked(func() { p.machine.Waited(r.ID, d) }) },
		Sent:   func() { locked(func() { p.machine.Sent(r.ID) }) },
	}
	if p.replayOf != nil {
		q.Peer = budget.AddressOf(p.address)
	}
	if r.Cause == sequence.CauseStart {
		q.Patience = startPatience
	}
	err := w.shared.replays.Replay(ctx, q, func(seq uint64, payload []byte) (more bool) {
		in := w.shared.intake(w)
		defer w.shared.recycle(in)
		locked(func() {
			defer in.release()
			in.arrive(sequence.Batch{Seq: seq, Payload: payload})
			in.load()
			now := time.Now()
			var actions []sequence.Action
			actions, more = p.machine.Reply(now, r.ID, &in.arrival)
			p.applyWith(in, now, actions)
		})
		return more
	})
	locked(func() {
		now := time.Now()
		p.replayErr = err
		if errors.Is(err, transport.ErrTooLong) {
			p.tooLong = err
		}
		if err != nil && !errors.Is(err, transport.ErrReplayYielded) {
			p.warn("replay failed", "endpoint", r.Endpoint, "error", err)
		}
		p.apply(now, p.machine.ReplayEnded(now, r.ID, outcomeOf(err)))
	})
}

func outcomeOf(err error) sequence.Outcome {
	switch {
	case err == nil:
		return sequence.OutcomeComplete
	case errors.Is(err, transport.ErrReplaySilent):
		return sequence.OutcomeSilent
	case errors.Is(err, transport.ErrReplayBusy):
		return sequence.OutcomeBusy
	case errors.Is(err, transport.ErrReplayYielded):
		return sequence.OutcomeYielded
	default:
		return sequence.OutcomeFailed
	}
}

// ReplayFrom requests the batches that an engine still has from seq on, up to its newest, and passes each to the lane once, in order. The
// config has one worker with one source, which has a replay socket; its rank 0 is read. Batches that the engine does not send are reported
// by Lane.Gap. ReplayFrom returns an error if the replay socket does not reply, the config is invalid, or ctx is done first.
func ReplayFrom(ctx context.Context, c config.Config, seq uint64, lane feed.Lane) error {
	in, err := New(c, laneSink{lane})
	if err != nil {
		return err
	}
	err = in.replayFrom(ctx, seq)
	return errors.Join(err, in.Close())
}

func (in *Ingest) replayFrom(ctx context.Context, seq uint64) error {
	ctx, stop := context.WithCancel(ctx)
	var requests sync.WaitGroup
	defer requests.Wait()
	defer stop()
	in.shared.replays.FirstReply = in.shared.config.ReplayTimeout
	w := in.workers[0]
	w.spawnIn(ctx, &requests)
	ended := make(chan error, 1)
	w.mu.Lock()
	p := w.publishers[0]
	p.machine = sequence.New(sequence.Config{
		FirstSeq: seq, FromFirst: true, Grace: in.shared.config.Grace,
		Jitter: func(time.Duration) time.Duration { return 0 },
	})
	p.repairEnded = func(err error) { ended <- err }
	p.connect(sequence.Connection{ID: 1, Replay: w.links[0].replay})
	w.mu.Unlock()
	var err error
	select {
	case err = <-ended:
	case <-ctx.Done():
		err = context.Cause(ctx)
	}
	w.close()
	if err != nil {
		return fmt.Errorf("replay from %d: %w", seq, err)
	}
	return nil
}

// laneSink is a Sink that returns a given Lane.
type laneSink struct{ lane feed.Lane }

func (s laneSink) AddWorker(feed.Worker) feed.Lane { return s.lane }

func (s laneSink) RemoveWorker(string, feed.RemoveReason) {}
