//go:build cgo

package bench_test

import (
	"context"
	"errors"
	"sync"
	"testing"
	"time"

	"google.golang.org/grpc"

	"github.com/kvcast/kvcast/internal/core/testclass"
	kvcastv1 "github.com/kvcast/kvcast/proto/kvcast/v1"
)

// besideSlow is an observed rig with two more clients: the first never reads, the second reads
// slowly. Both return once the server has aborted their streams.
type besideSlow struct {
	*observed
	conns  []*grpc.ClientConn
	cancel context.CancelFunc
	slow   sync.WaitGroup
}

// trickle is the pause of the slow client between two responses.
const trickle = 100 * time.Millisecond

func openBesideSlow() (*besideSlow, error) {
	o, err := openObserved()
	if err != nil {
		return nil, err
	}
	ctx, cancel := context.WithCancel(context.Background())
	s := &besideSlow{observed: o, cancel: cancel}
	for _, pause := range []time.Duration{time.Hour, trickle} {
		conn, err := dial(s.server.grpc)
		if err != nil {
			return nil, closeAfter(err, s)
		}
		s.conns = append(s.conns, conn)
		s.slow.Go(func() {
			for ctx.Err() == nil {
				readSlowly(ctx, conn, pause)
			}
		})
	}
	if err := s.warm(); err != nil {
		return nil, closeAfter(err, s)
	}
	return s, nil
}

// readSlowly reads a stream until it ends, and pauses after each response.
func readSlowly(ctx context.Context, conn *grpc.ClientConn, pause time.Duration) {
	stream, err := openStream(ctx, conn, kvcastv1.RouterEventService_Subscribe_FullMethodName, fromEarliest())
	for f := new(frame); err == nil; {
		err = stream.RecvMsg(f)
		select {
		case <-time.After(pause):
		case <-stream.Context().Done(): // also when the server has aborted the stream
			return
		}
	}
}

// Close closes all parts.
func (s *besideSlow) Close() error {
	s.cancel()
	s.slow.Wait()
	var errs []error
	for _, c := range s.conns {
		errs = append(errs, c.Close())
	}
	return errors.Join(append(errs, s.observed.Close())...)
}

// TestLatencyBesideSlowSubscribersMeasuresEveryBatch runs few batches.
func TestLatencyBesideSlowSubscribersMeasuresEveryBatch(t *testing.T) {
	testclass.Process(t)
	requireProc(t)
	s, err := openBesideSlow()
	if err != nil {
		t.Fatal(err)
	}
	if _, _, err := s.measure(50); err != nil {
		t.Error(err)
	}
	if err := s.Close(); err != nil {
		t.Error(err)
	}
}
