package zmqio_test

import (
	"encoding/binary"
	"fmt"
	"math/rand/v2"
	"sync"
	"testing"

	"github.com/pebbe/zmq4"

	"github.com/kvcast/kvcast/internal/zmqio"
)

// TestNoWakeupIsLost lets sockets of all transports wait for bursts of a few
// messages. A sender often, but not always, stops until its last burst has
// arrived: a wakeup that is lost would then be the last, and Wait end by its
// deadline.
func TestNoWakeupIsLost(t *testing.T) {
	perSocket := 400_000
	if testing.Short() {
		perSocket = 20_000
	}
	zctx := newContext(t)
	if err := zctx.SetIoThreads(2); err != nil {
		t.Fatal(err)
	}
	var all sync.WaitGroup
	for i, transport := range append(transports, transports[0]) {
		receiver, sender := pair(t, zctx, transport.endpoint)
		s := openers[i/len(transports)].mustOpen(t, receiver)
		arrived := make(chan uint64, 1)
		quit := make(chan struct{})
		all.Go(func() {
			defer close(quit)
			if err := count(s, perSocket, arrived); err != nil {
				t.Errorf("%s: %v", transport.name, err)
			}
		})
		all.Go(func() {
			if err := sendBursts(sender, perSocket, arrived, quit); err != nil {
				t.Errorf("%s: %v", transport.name, err)
			}
		})
	}
	all.Wait()
}

// ackFrame is the second frame of a message whose arrival its sender waits for.
var ackFrame = []byte{1}

// count receives n messages, which must come in order.
func count(s *zmqio.Socket, n int, arrived chan<- uint64) error {
	b := zmqio.NewBatch(3)
	for next := uint64(0); next < uint64(n); {
		if err := s.Wait(); err != nil {
			return fmt.Errorf("wait for message %d: %w", next, err)
		}
		// Seldom more than once: what is left makes no new edge.
		got, err := s.Receive(b)
		if err != nil {
			return err
		}
		if got == 0 {
			return fmt.Errorf("wait for message %d: there is none", next)
		}
		for i := range got {
			m := b.Message(i)
			if seq := binary.BigEndian.Uint64(m.Frames[0]); seq != next {
				return fmt.Errorf("got message %d, want %d", seq, next)
			}
			if len(m.Frames[1]) == len(ackFrame) {
				arrived <- next
			}
			next++
		}
	}
	return nil
}

// sendBursts sends n messages in bursts of one to four.
func sendBursts(s *zmq4.Socket, n int, arrived <-chan uint64, quit <-chan struct{}) error {
	random := rand.New(rand.NewPCG(1, uint64(n)))
	for seq := 0; seq < n; {
		burst := min(1+random.IntN(4), n-seq)
		stop := random.IntN(4) > 0
		for i := range burst {
			var ack []byte
			if stop && i == burst-1 {
				ack = ackFrame
			}
			if _, err := s.SendBytes(binary.BigEndian.AppendUint64(nil, uint64(seq)), zmq4.SNDMORE); err != nil {
				return err
			}
			if _, err := s.SendBytes(ack, 0); err != nil {
				return err
			}
			seq++
		}
		if stop {
			select {
			case <-arrived:
			case <-quit: // the receiver failed
				return nil
			}
		}
	}
	return nil
}
