package simulator_test

import (
	"bytes"
	"context"
	"encoding/binary"
	"strings"
	"testing"
	"time"

	"github.com/kvcast/kvcast/internal/simulator"
	"github.com/kvcast/kvcast/internal/wire"
	"github.com/kvcast/kvcast/internal/zmtp"
	"github.com/kvcast/kvcast/test/rawzmtp"
)

// waitTimeout bounds each wait of a test.
const waitTimeout = 2 * time.Minute

// subscriber is a SUB socket of every topic. It connects again when its connection ends.
type subscriber struct {
	messages chan [][]byte
	close    func()
}

// subscribe returns a subscriber that connects to an endpoint.
func subscribe(t *testing.T, endpoint string) *subscriber {
	t.Helper()
	ctx, cancel := context.WithCancel(t.Context())
	s := &subscriber{messages: make(chan [][]byte, 100)}
	done := make(chan struct{})
	go func() {
		defer close(done)
		retry := time.NewTicker(time.Millisecond)
		defer retry.Stop()
		for ctx.Err() == nil {
			s.read(ctx, address(endpoint))
			<-retry.C
		}
	}()
	s.close = func() {
		cancel()
		<-done
	}
	t.Cleanup(s.close)
	return s
}

// read reads one connection.
func (s *subscriber) read(ctx context.Context, address string) {
	c, err := rawzmtp.Dial(ctx, zmtp.SUB, address, waitTimeout)
	if err != nil {
		return
	}
	defer func() { _ = c.Close() }()
	stop := context.AfterFunc(ctx, func() { _ = c.Close() })
	defer stop()
	for {
		frames, err := c.Receive(waitTimeout)
		if err != nil {
			return
		}
		select {
		case s.messages <- frames:
		case <-ctx.Done():
			return
		}
	}
}

func address(endpoint string) string { return strings.TrimPrefix(endpoint, "tcp://") }

func (s *subscriber) receive(t *testing.T) [][]byte {
	t.Helper()
	select {
	case frames := <-s.messages:
		return frames
	case <-time.After(waitTimeout):
		t.Fatal("no message")
		return nil
	}
}

// dealer is a DEALER socket.
type dealer struct {
	*rawzmtp.Conn
	t *testing.T
}

func newDealer(t *testing.T, endpoint string) dealer {
	t.Helper()
	c, err := rawzmtp.Dial(t.Context(), zmtp.DEALER, address(endpoint), waitTimeout)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = c.Close() })
	return dealer{c, t}
}

func (d dealer) send(frames ...[]byte) {
	d.t.Helper()
	d.Message(frames...)
	if err := d.Flush(); err != nil {
		d.t.Fatal(err)
	}
}

func (d dealer) receive() [][]byte {
	d.t.Helper()
	frames, err := d.Receive(waitTimeout)
	if err != nil {
		d.t.Fatal(err)
	}
	return frames
}

// message is a received batch.
type message struct {
	topic   string
	seq     uint64
	payload []byte
}

func receiveBatch(t *testing.T, sub *subscriber) message {
	t.Helper()
	return batchOf(t, sub.receive(t))
}

func batchOf(t *testing.T, frames [][]byte) message {
	t.Helper()
	if len(frames) != 3 || len(frames[1]) != 8 {
		t.Fatalf("got %d frames (%x), want topic, seq and payload", len(frames), frames)
	}
	return message{string(frames[0]), binary.BigEndian.Uint64(frames[1]), frames[2]}
}

// decode decodes a payload, and keeps only the event fields that the simulator sets.
func decode(t *testing.T, payload []byte) *wire.Batch {
	t.Helper()
	var d wire.Decoder
	b, err := d.Decode(payload)
	if err != nil {
		t.Fatalf("decode: %v", err)
	}
	return b
}

// decodable returns the error with which a payload is rejected, or nil.
func decodable(payload []byte) (*wire.Batch, error) {
	var d wire.Decoder
	return d.Decode(payload)
}

// applyCounting applies events to the copies of each hash.
func applyCounting(counts map[uint64]int, events []wire.Event) {
	for _, ev := range events {
		for _, h := range ev.BlockHashes {
			if ev.Kind == wire.KindStored {
				counts[h]++
			} else if counts[h]--; counts[h] <= 0 {
				delete(counts, h)
			}
		}
		if ev.Kind == wire.KindCleared {
			clear(counts)
		}
	}
}

func plain(events []wire.Event) []wire.Event {
	var out []wire.Event
	for _, ev := range events {
		e := wire.Event{
			Kind: ev.Kind, Parent: ev.Parent, HasParent: ev.HasParent,
			BlockSize: ev.BlockSize, Medium: ev.Medium,
		}
		e.BlockHashes = append(e.BlockHashes, ev.BlockHashes...)
		e.Tokens = append(e.Tokens, ev.Tokens...)
		out = append(out, e)
	}
	return out
}

// replay requests all batches from a seq on from a replay socket. It returns the batches, and the
// number of frames of each reply and of the end marker.
func replay(t *testing.T, endpoint string, from uint64) (batches []message, frames, endFrames int) {
	t.Helper()
	d := newDealer(t, endpoint)
	d.send(nil, binary.BigEndian.AppendUint64(nil, from))
	for {
		msg := d.receive()
		if len(msg[0]) != 0 {
			t.Fatalf("got %x, want an empty delimiter first", msg)
		}
		seq, payload, end, err := wire.ParseReply(msg)
		if err != nil {
			t.Fatal(err)
		}
		if end {
			return batches, frames, len(msg)
		}
		frames = len(msg)
		topic := string(bytes.Join(msg[1:len(msg)-2], nil))
		batches = append(batches, message{topic, seq, payload})
	}
}

// run runs an engine until the test ends. The test fails if Run returns an error.
func run(t *testing.T, e *simulator.Engine) {
	t.Helper()
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan error, 1)
	go func() { done <- e.Run(ctx) }()
	t.Cleanup(func() {
		cancel()
		if err := <-done; err != nil {
			t.Error(err)
		}
	})
}

func finished(t *testing.T, e *simulator.Engine) {
	t.Helper()
	select {
	case <-e.Finished():
	case <-time.After(waitTimeout):
		t.Fatal("the engine does not finish")
	}
}
