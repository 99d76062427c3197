package simulator_test

import (
	"bytes"
	"context"
	"encoding/binary"
	"testing"
	"time"

	zmq "github.com/pebbe/zmq4"

	"github.com/kvcast/kvcast/ingest/wire"
	"github.com/kvcast/kvcast/internal/simulator"
)

// waitTimeout bounds each wait of a test.
const waitTimeout = 2 * time.Minute

// newContext returns a ZeroMQ context that ends with the test.
func newContext(t *testing.T) *zmq.Context {
	t.Helper()
	ctx, err := zmq.NewContext()
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := ctx.Term(); err != nil {
			t.Error(err)
		}
	})
	return ctx
}

// newSocket returns a socket whose calls time out after waitTimeout.
func newSocket(t *testing.T, kind zmq.Type) *zmq.Socket {
	t.Helper()
	soc, err := newContext(t).NewSocket(kind)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := soc.Close(); err != nil {
			t.Error(err)
		}
	})
	for _, err := range []error{soc.SetLinger(0), soc.SetRcvtimeo(waitTimeout), soc.SetRcvhwm(0)} {
		if err != nil {
			t.Fatal(err)
		}
	}
	return soc
}

// subscribe returns a SUB socket that is connected and reads every topic.
func subscribe(t *testing.T, endpoint string) *zmq.Socket {
	t.Helper()
	sub := newSocket(t, zmq.SUB)
	if err := sub.SetSubscribe(""); err != nil {
		t.Fatal(err)
	}
	if err := sub.Connect(endpoint); err != nil {
		t.Fatal(err)
	}
	return sub
}

func receive(t *testing.T, soc *zmq.Socket) [][]byte {
	t.Helper()
	frames, err := soc.RecvMessageBytes(0)
	if err != nil {
		t.Fatalf("receive: %v", err)
	}
	return frames
}

// message is a received batch.
type message struct {
	topic   string
	seq     uint64
	payload []byte
}

func receiveBatch(t *testing.T, sub *zmq.Socket) message {
	t.Helper()
	frames := receive(t, sub)
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
	dealer := newSocket(t, zmq.DEALER)
	if err := dealer.Connect(endpoint); err != nil {
		t.Fatal(err)
	}
	if _, err := dealer.SendMessage([][]byte{{}, binary.BigEndian.AppendUint64(nil, from)}); err != nil {
		t.Fatal(err)
	}
	for {
		msg := receive(t, dealer)
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
