package ingest

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"time"

	"github.com/kvcast/kvcast/feed"
	"github.com/kvcast/kvcast/ingest/config"
	"github.com/kvcast/kvcast/ingest/sequence"
)

// ReplayFrom requests the batches that an engine remembers from seq on, up to its newest,
// and gives them to the lane, in order and each once. c has one worker with one source,
// which has a replay socket; its rank 0 is read. Batches that the engine does not send are
// reported by Lane.Gap. ReplayFrom returns an error where the replay socket does not
// answer, or c is invalid, and that of ctx when ctx is done before.
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
	in.shared.replays.FirstReply = in.config.ReplayTimeout
	w := in.workers[0]
	w.spawnIn(ctx, &requests)
	ended := make(chan error, 1)
	w.mu.Lock()
	p := w.publishers[0]
	p.machine = sequence.New(sequence.Config{
		FirstSeq: seq, FromFirst: true, Grace: in.shared.grace,
		Jitter: func(time.Duration) time.Duration { return 0 },
	})
	p.repairEnded = func(err error) { ended <- err }
	p.connect(new(intake), 1, w.links[0].replay)
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

// laneSink is a sink of one worker.
type laneSink struct{ lane feed.Lane }

func (s laneSink) AddWorker(feed.Worker) feed.Lane { return s.lane }

func (s laneSink) RemoveWorker(string, feed.RemoveReason) {}
