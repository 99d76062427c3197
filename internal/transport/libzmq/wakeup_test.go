//go:build cgo

package libzmq_test

import (
	"encoding/binary"
	"fmt"
	"math/rand/v2"
	"sync"
	"testing"
	"time"

	"github.com/pebbe/zmq4"

	"github.com/kvcast/kvcast/internal/core/testclass"
	"github.com/kvcast/kvcast/internal/transport/libzmq"
)

// TestNoWakeupIsLost lets sockets of all transports wait for bursts of a few messages. A
// sender often pauses until its last burst has arrived: if a wakeup was lost, no other
// follows, and Wait is interrupted.
func TestNoWakeupIsLost(t *testing.T) {
	t.Parallel()
	messages := testclass.Size(20_000, 400_000)
	more := func(sent int) bool { return sent < messages }
	zctx := newContext(t)
	if err := zctx.SetIoThreads(2); err != nil {
		t.Fatal(err)
	}
	var all sync.WaitGroup
	for _, over := range transports {
		receiver, sender := pair(t, zctx, over.endpoint)
		s := mustOpen(t, receiver)
		arrived := make(chan uint64, 1)
		quit := make(chan struct{})
		all.Go(func() {
			defer close(quit)
			if err := count(s, arrived); err != nil {
				t.Errorf("%s: %v", over.name, err)
			}
		})
		all.Go(func() {
			if err := sendBursts(sender, more, arrived, quit); err != nil {
				t.Errorf("%s: %v", over.name, err)
			}
		})
	}
	all.Wait()
}

// ackFrame is the second frame of a message whose arrival the sender waits for. lastFrame is the
// second frame of the last message, whose arrival the sender also waits for.
var (
	ackFrame  = []byte{1}
	lastFrame = []byte{1, 1}
)

// count receives messages up to the last one, which must come in order.
func count(s *libzmq.Socket, arrived chan<- uint64) error {
	b := libzmq.NewBatch(3)
	timer := time.AfterFunc(patience, s.Interrupt)
	defer timer.Stop()
	for next := uint64(0); ; {
		timer.Reset(patience)
		if err := s.Wait(); err != nil {
			return fmt.Errorf("wait for message %d: %w", next, err)
		}
		// Seldom more than once: remaining messages cause no new edge.
		got, err := receive(s, b)
		if err != nil {
			return err
		}
		if got == 0 {
			return fmt.Errorf("wait for message %d: there is none", next)
		}
		for i := range got {
			m := b.Messages()[i]
			if seq := binary.BigEndian.Uint64(m.Frames[0]); seq != next {
				return fmt.Errorf("got message %d, want %d", seq, next)
			}
			last := len(m.Frames[1]) == len(lastFrame)
			if last || len(m.Frames[1]) == len(ackFrame) {
				arrived <- next
			}
			if last {
				return nil
			}
			next++
		}
	}
}

// sendBursts sends messages in bursts of one to four while more returns true.
func sendBursts(s *zmq4.Socket, more func(sent int) bool, arrived <-chan uint64, quit <-chan struct{}) error {
	random := rand.New(rand.NewPCG(1, 2))
	for seq, last := 0, false; !last; {
		burst := 1 + random.IntN(4)
		last = !more(seq + burst)
		stop := last || random.IntN(4) > 0
		for i := range burst {
			var ack []byte
			switch {
			case i < burst-1:
			case last:
				ack = lastFrame
			case stop:
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
