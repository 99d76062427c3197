//go:build cgo

package libzmq_test

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"math/rand/v2"
	"runtime"
	"strings"
	"sync"
	"testing"
	"unsafe"

	"github.com/google/go-cmp/cmp"
	"github.com/pebbe/zmq4"
	"pgregory.net/rapid"

	"github.com/kvcast/kvcast/internal/core/testclass"
	"github.com/kvcast/kvcast/internal/transport"
	"github.com/kvcast/kvcast/internal/transport/libzmq"
)

// received is a message, copied.
type received struct {
	Frames [][]byte // the kept frames
	Count  int
}

// take receives n messages, in any number of batches.
func take(s *libzmq.Socket, b *libzmq.Batch, n int) ([]received, error) {
	var all []received
	for len(all) < n {
		if err := s.Wait(); err != nil {
			return all, fmt.Errorf("after %d messages: %w", len(all), err)
		}
		got, err := receive(s, b)
		if err != nil {
			return all, err
		}
		for i := range got {
			m := b.Messages()[i]
			r := received{Count: m.Count}
			for _, f := range m.Frames {
				r.Frames = append(r.Frames, bytes.Clone(f))
			}
			all = append(all, r)
		}
	}
	return all, nil
}

// frameLength draws the length of a frame: those around where libzmq begins to
// keep a message outside of its zmq_msg_t, and outside of its read buffer, and
// some that are large.
func frameLength() *rapid.Generator[int] {
	return rapid.OneOf(
		rapid.Just(0), rapid.IntRange(1, 64), rapid.IntRange(1000, 1400), rapid.IntRange(8000, 8400),
		rapid.IntRange(0, 1<<20),
	)
}

func TestMessagesAreReceivedAsSent(t *testing.T) {
	t.Parallel()
	for _, over := range transports {
		t.Run(over.name, func(t *testing.T) {
			receiver, sender := pair(t, newContext(t), over.endpoint)
			s := mustOpen(t, receiver)
			rapid.Check(t, func(rt *rapid.T) {
				lengths := rapid.SliceOfN(rapid.SliceOfN(frameLength(), 1, 9), 1, 12).Draw(rt, "lengths")
				random := rand.NewChaCha8([32]byte{rapid.Byte().Draw(rt, "seed")})
				var want []received
				for _, message := range lengths {
					var frames [][]byte
					for _, n := range message {
						f := make([]byte, n)
						_, _ = random.Read(f) // it never fails
						frames = append(frames, f)
					}
					sendTo(t, sender, frames...)
					want = append(want, received{frames[:min(len(frames), transport.KeptFrames)], len(frames)})
				}
				b := libzmq.NewBatch(rapid.IntRange(1, 8).Draw(rt, "room"))
				defer b.Release()
				got, err := take(s, b, len(want))
				if err != nil {
					rt.Fatal(err)
				}
				if !equal(got, want) {
					rt.Fatalf("got another %d messages of lengths %v", len(got), lengths)
				}
			})
		})
	}
}

// equal compares messages. A nil frame equals an empty one.
func equal(a, b []received) bool {
	return cmp.Equal(a, b, cmp.Comparer(bytes.Equal))
}

func TestReceiveIsBoundedByTheRoomOfTheBatch(t *testing.T) {
	t.Parallel()
	receiver, sender := pair(t, newContext(t), "inproc://room")
	s := mustOpen(t, receiver)
	b := libzmq.NewBatch(4)
	for i := range 10 {
		sendTo(t, sender, []byte{byte(i)}, nil)
	}
	next := byte(0)
	for _, want := range []int{4, 4, 2, 0, 0} {
		n, err := receive(s, b)
		if n != want || err != nil {
			t.Fatalf("after %d messages: got %d more, %v; want %d", next, n, err, want)
		}
		for i := range n {
			m := b.Messages()[i]
			if m.Count != 2 || m.Conn != -1 || m.Frames[0][0] != next || len(m.Frames[1]) != 0 {
				t.Errorf("message %d: got %+v", next, m)
			}
			next++
		}
	}
}

func TestReleaseClearsTheFrames(t *testing.T) {
	t.Parallel()
	receiver, sender := pair(t, newContext(t), "inproc://release")
	s := mustOpen(t, receiver)
	sendTo(t, sender, []byte("frame"))
	sendTo(t, sender, []byte("frame"))
	b := libzmq.NewBatch(1)
	for range 2 {
		if n, err := receive(s, b); n != 1 || err != nil {
			t.Fatal(n, err)
		}
		m := b.Messages()[0]
		b.Release()
		b.Release()
		if len(m.Frames) != 1 || m.Frames[0] != nil {
			t.Errorf("got frames %q of a message that was given back", m.Frames)
		}
	}
}

func TestMessagesOutliveSocketAndBatch(t *testing.T) {
	t.Parallel()
	long := []byte(strings.Repeat("long", 1000))
	hold := func() transport.Message {
		zctx, err := zmq4.NewContext()
		if err != nil {
			t.Fatal(err)
		}
		receiver, err := zctx.NewSocket(zmq4.PAIR)
		if err != nil {
			t.Fatal(err)
		}
		sender, err := zctx.NewSocket(zmq4.PAIR)
		if err != nil {
			t.Fatal(err)
		}
		connectTo(t, sender, bindOf(t, receiver, "tcp://127.0.0.1:*"))
		sendTo(t, sender, []byte("short"), long)
		s, err := libzmq.Open(receiver)
		if err != nil {
			t.Fatal(err)
		}
		if err := s.Wait(); err != nil {
			t.Fatal(err)
		}
		b := libzmq.NewBatch(1)
		if n, err := receive(s, b); n != 1 || err != nil {
			t.Fatal(n, err)
		}
		if err := errors.Join(s.Close(), sender.Close(), zctx.Term()); err != nil {
			t.Fatal(err)
		}
		return b.Messages()[0]
	}
	m := hold()
	for range 10 {
		runtime.GC()
	}
	if string(m.Frames[0]) != "short" || !bytes.Equal(m.Frames[1], long) {
		t.Error("frames changed while the message was held")
	}
	runtime.KeepAlive(m)
}

// TestBatchesAreCollected drops the references to many batches that contain messages.
func TestBatchesAreCollected(t *testing.T) {
	t.Parallel()
	receiver, sender := pair(t, newContext(t), "inproc://collected")
	s := mustOpen(t, receiver)
	long := make([]byte, 4000)
	for i := range 1000 {
		sendTo(t, sender, long, nil, long, long, long, long)
		if n, err := receive(s, libzmq.NewBatch(2)); n != 1 || err != nil {
			t.Fatal(n, err)
		}
		if i%100 == 0 {
			runtime.GC()
		}
	}
	runtime.GC()
}

func TestReceiveDoesNotAllocate(t *testing.T) {
	testclass.WithoutRace(t)
	receiver, sender := pair(t, newContext(t), "inproc://allocate")
	s := mustOpen(t, receiver)
	const runs, burst = 200, 8
	payload := make([]byte, 1300)
	for range (runs + 1) * burst {
		sendTo(t, sender, []byte("topic"), make([]byte, 8), payload)
	}
	b := libzmq.NewBatch(burst)
	sum := 0
	allocs := testing.AllocsPerRun(runs, func() {
		if err := s.Wait(); err != nil {
			t.Fatal(err)
		}
		n, err := receive(s, b)
		if n != burst || err != nil {
			t.Fatal(n, err)
		}
		for i := range n {
			sum += len(b.Messages()[i].Frames[2])
		}
	})
	if allocs != 0 {
		t.Errorf("got %v allocations a batch", allocs)
	}
	if want := (runs + 1) * burst * len(payload); sum != want {
		t.Errorf("got %d bytes, want %d", sum, want)
	}
}

func TestErrorsOfAnEndedContext(t *testing.T) {
	t.Parallel()
	zctx, err := zmq4.NewContext()
	if err != nil {
		t.Fatal(err)
	}
	zs, err := zctx.NewSocket(zmq4.SUB)
	if err != nil {
		t.Fatal(err)
	}
	s := mustOpen(t, zs)
	ended := make(chan error)
	go func() { ended <- zctx.Term() }() // it waits for the socket to close
	if err := s.Wait(); !errors.Is(err, zmq4.ETERM) {
		t.Errorf("Wait: got %v, want %v", err, zmq4.ETERM)
	}
	b := libzmq.NewBatch(1)
	if n, err := receive(s, b); n != 0 || !errors.Is(err, zmq4.ETERM) {
		t.Errorf("Receive: got %d, %v, want %v", n, err, zmq4.ETERM)
	}
	closeNow(t, s)
	if err := <-ended; err != nil {
		t.Error(err)
	}
	if n, err := receive(s, b); n != 0 || err == nil {
		t.Errorf("Receive of a closed socket: got %d, %v", n, err)
	}
	if err := s.Wait(); err == nil {
		t.Error("Wait for a closed socket: got no error")
	}
}

func TestReceiveAddsToABatchUntilItIsFull(t *testing.T) {
	t.Parallel()
	zctx := newContext(t)
	receiver, sender := pair(t, zctx, "inproc://more")
	s := mustOpen(t, receiver)
	b := libzmq.NewBatch(4)
	for i := range 3 {
		sendTo(t, sender, fmt.Append(nil, i), []byte("second"))
		if err := s.Receive(b); err != nil || b.Len() != i+1 {
			t.Fatalf("Receive: %v, %d messages, want %d", err, b.Len(), i+1)
		}
	}
	if b.Len() != 3 || b.Full() || b.Bytes() != 3*(1+len("second")) {
		t.Errorf("Len %d, Full %v, Bytes %d", b.Len(), b.Full(), b.Bytes())
	}
	b.Drop(1)
	if m := b.Messages()[1]; m.Count != 0 || len(m.Frames) != 0 || b.Bytes() != 2*(1+len("second")) {
		t.Errorf("dropped message %+v, %d bytes left", m, b.Bytes())
	}
	if got := string(b.Messages()[2].Frames[0]); got != "2" {
		t.Errorf("message behind the dropped one begins with %q", got)
	}
	sendTo(t, sender, make([]byte, libzmq.MaxBatchBytes))
	sendTo(t, sender, []byte("no room"))
	if err := s.Receive(b); err != nil || b.Len() != 4 || !b.Full() {
		t.Errorf("Receive: %v, %d messages, full %v, want 4 and full", err, b.Len(), b.Full())
	}
	if err := s.Receive(b); err != nil || b.Len() != 4 {
		t.Errorf("Receive into a full batch: %v, %d messages", err, b.Len())
	}
	b.Release()
	if b.Len() != 0 || b.Bytes() != 0 {
		t.Errorf("released batch has %d messages, %d bytes", b.Len(), b.Bytes())
	}
	if n, err := receive(s, b); err != nil || n != 1 || string(b.Messages()[0].Frames[0]) != "no room" {
		t.Errorf("Receive after Release = %d, %v", n, err)
	}
}

func TestBatchStopsAtItsBytes(t *testing.T) {
	t.Parallel()
	zctx := newContext(t)
	receiver, sender := pair(t, zctx, "inproc://bytes")
	s, err := libzmq.Open(receiver)
	if err != nil {
		t.Fatal(err)
	}
	defer closeNow(t, s)
	for range 5 {
		sendTo(t, sender, make([]byte, libzmq.MaxBatchBytes/2))
	}
	b := libzmq.NewBatch(64)
	defer b.Release()
	if n, err := receive(s, b); err != nil || n != 2 || !b.Full() {
		t.Errorf("Receive = %d, %v, full %v, want 2 and full", n, err, b.Full())
	}
}

func TestPeer(t *testing.T) {
	t.Parallel()
	zctx := newContext(t)
	receiver, sender := pair(t, zctx, "tcp://127.0.0.1:*")
	s, err := libzmq.Open(receiver)
	if err != nil {
		t.Fatal(err)
	}
	defer closeNow(t, s)
	sendTo(t, sender, []byte("x"))
	if err := s.Wait(); err != nil {
		t.Fatal(err)
	}
	b := libzmq.NewBatch(1)
	defer b.Release()
	if n, err := receive(s, b); err != nil || n != 1 {
		t.Fatal(n, err)
	}
	if got := b.Peer(0).String(); got != "127.0.0.1" {
		t.Errorf("Peer = %s", got)
	}
}

// Memory of C that is reused for batches may contain what looks like a pointer into Go's heap, here the addresses of freed
// memory. The garbage collector must not see them.
func TestBatchesInMemoryThatLooksLikePointers(t *testing.T) {
	memory := make([][]byte, 64)
	freed := make([]uintptr, len(memory))
	for i := range memory {
		memory[i] = make([]byte, 1<<20)
		freed[i] = uintptr(unsafe.Pointer(&memory[i][0]))
	}
	clear(memory)
	runtime.GC()
	pattern := make([]byte, 0, 24<<10)
	for len(pattern) < cap(pattern) {
		pattern = binary.NativeEndian.AppendUint64(pattern, uint64(freed[len(pattern)/8%len(freed)]))
	}
	receiver, sender := pair(t, newContext(t), "inproc://looks-like-pointers")
	s := mustOpen(t, receiver)
	stop := make(chan struct{})
	var collecting sync.WaitGroup
	collecting.Go(func() {
		for {
			select {
			case <-stop:
				return
			default:
				runtime.GC()
			}
		}
	})
	for range 300 {
		for range 8 {
			sendTo(t, sender, pattern)
		}
		b := libzmq.NewBatch(8)
		if n, err := receive(s, b); n != 8 || err != nil {
			t.Fatal(n, err)
		}
		b.Release() // the patterns are free
		for range 20 {
			libzmq.NewBatch(64)
		}
	}
	close(stop)
	collecting.Wait()
}
