package ingest_test

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"math"
	"net"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/pebbe/zmq4"
	"github.com/tinylib/msgp/msgp"

	"github.com/kvcast/kvcast/feed"
	"github.com/kvcast/kvcast/ingest"
	"github.com/kvcast/kvcast/ingest/config"
)

// blockSize is that of the engines here.
const blockSize = 4

// start runs an Ingest, and ends it with the test. The function it returns ends
// it earlier, and checks that it ends well and soon.
func start(t *testing.T, c config.Config, sink feed.Sink, prepare ...func(*ingest.Ingest)) (in *ingest.Ingest, stop func()) {
	t.Helper()
	c.Listeners = slices.Clone(c.Listeners)
	for i := range c.Listeners {
		if c.Listeners[i].ReplayPort == 0 {
			c.Listeners[i].ReplayPort = -1
		}
	}
	c.ReconnectMin = 10 * time.Millisecond
	c.ReconnectMax = 20 * time.Millisecond
	in, err := ingest.New(c, sink)
	if err != nil {
		t.Fatalf("New: %v", err)
	}
	for _, f := range prepare {
		f(in)
	}
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan error, 1)
	go func() { done <- in.Run(ctx) }()
	stopped := false
	stop = func() {
		t.Helper()
		if stopped {
			return
		}
		stopped = true
		cancel()
		select {
		case err := <-done:
			if err != nil {
				t.Errorf("Run: %v", err)
			}
		case <-time.After(patience):
			t.Fatal("Run does not return")
		}
		if r, ok := sink.(*recorder); ok {
			r.ended.Store(true)
		}
	}
	t.Cleanup(stop)
	return in, stop
}

// engine is the publishing end of an engine. Its socket is an XPUB, which sees
// subscriptions come.
type engine struct {
	t      *testing.T
	zctx   *zmq4.Context
	socket *zmq4.Socket
	closed bool
}

func newEngine(t *testing.T) *engine {
	t.Helper()
	zctx, err := zmq4.NewContext()
	if err != nil {
		t.Fatalf("NewContext: %v", err)
	}
	s, err := zctx.NewSocket(zmq4.XPUB)
	if err != nil {
		t.Fatalf("NewSocket: %v", err)
	}
	if err := errors.Join(s.SetLinger(0), s.SetRcvtimeo(patience), s.SetIpv6(true)); err != nil {
		t.Fatalf("set options: %v", err)
	}
	e := &engine{t: t, zctx: zctx, socket: s}
	t.Cleanup(e.close)
	return e
}

// close ends the engine's process, so to speak.
func (e *engine) close() {
	if e.closed {
		return
	}
	e.closed = true
	if err := errors.Join(e.socket.Close(), e.zctx.Term()); err != nil {
		e.t.Errorf("close engine: %v", err)
	}
}

// bind binds the engine and returns its endpoint.
func (e *engine) bind(endpoint string) (string, error) {
	if err := e.socket.Bind(endpoint); err != nil {
		return "", err
	}
	return e.socket.GetLastEndpoint()
}

func (e *engine) mustBind(endpoint string) string {
	e.t.Helper()
	bound, err := e.bind(endpoint)
	if err != nil {
		e.t.Fatalf("bind %s: %v", endpoint, err)
	}
	return bound
}

func (e *engine) connect(endpoint string) {
	e.t.Helper()
	_, port, err := net.SplitHostPort(strings.TrimPrefix(endpoint, "tcp://"))
	if err != nil {
		e.t.Fatalf("endpoint %s: %v", endpoint, err)
	}
	if err := e.socket.Connect("tcp://127.0.0.1:" + port); err != nil {
		e.t.Fatalf("connect: %v", err)
	}
}

// awaitSubscriber waits until what is sent will arrive.
func (e *engine) awaitSubscriber(topic string) {
	e.t.Helper()
	got, err := e.socket.Recv(0)
	if err != nil {
		e.t.Fatalf("await subscription: %v", err)
	}
	if got != "\x01"+topic {
		e.t.Fatalf("subscription %q, want to %q", got, topic)
	}
}

// send sends frames as they are.
func (e *engine) send(frames ...any) {
	e.t.Helper()
	if _, err := e.socket.SendMessage(frames...); err != nil {
		e.t.Fatalf("send: %v", err)
	}
}

// publish sends a batch of an engine whose topic is empty.
func (e *engine) publish(seq uint64, events ...[]byte) {
	e.t.Helper()
	e.send("", seqFrame(seq), payload(seq, events...))
}

// newEngines returns engines on ports one after the other, and the endpoint of
// the first.
func newEngines(t *testing.T, n int) (engines []*engine, first string) {
	t.Helper()
	const attempts = 100
next:
	for range attempts {
		for _, e := range engines {
			e.close()
		}
		engines = []*engine{newEngine(t)}
		first = engines[0].mustBind("tcp://127.0.0.1:*")
		port, err := strconv.Atoi(first[strings.LastIndex(first, ":")+1:])
		if err != nil {
			t.Fatalf("endpoint %s: %v", first, err)
		}
		for r := 1; r < n; r++ {
			e := newEngine(t)
			engines = append(engines, e)
			if _, err := e.bind(fmt.Sprintf("tcp://127.0.0.1:%d", port+r)); err != nil {
				continue next
			}
		}
		return engines, first
	}
	t.Fatalf("found no %d free ports in a row", n)
	return nil, ""
}

func seqFrame(seq uint64) []byte { return binary.BigEndian.AppendUint64(nil, seq) }

// payload is a batch that names no rank.
func payload(seq uint64, events ...[]byte) []byte {
	return appendBatch(nil, 2, seq, events)
}

// payloadOf is a batch that names its rank.
func payloadOf(rank uint32, seq uint64, events ...[]byte) []byte {
	return msgp.AppendUint32(appendBatch(nil, 3, seq, events), rank)
}

// garbage is no batch.
var garbage = []byte{0xc1, 'n', 'o', 't', ' ', 'a', ' ', 'b', 'a', 't', 'c', 'h'}

// epochSeconds is the time of a batch: a quarter of a second each, which a
// float has exactly.
func epochSeconds(seq uint64) float64 { return 1_700_000_000 + float64(seq)/4 }

func engineTime(seq uint64) int64 {
	whole, fraction := math.Modf(epochSeconds(seq))
	return int64(whole)*1e9 + int64(fraction*1e9)
}

func appendBatch(b []byte, elements uint32, seq uint64, events [][]byte) []byte {
	b = msgp.AppendArrayHeader(b, elements)
	b = msgp.AppendFloat64(b, epochSeconds(seq))
	b = msgp.AppendArrayHeader(b, uint32(len(events)))
	for _, e := range events {
		b = append(b, e...)
	}
	return b
}

// stored is a store of one block after another, of blockSize tokens each.
func stored(hashes ...uint64) []byte { return storedBlocks(blockSize, hashes...) }

func storedBlocks(size int, hashes ...uint64) []byte {
	b := msgp.AppendArrayHeader(nil, 7)
	b = msgp.AppendString(b, "BlockStored")
	b = appendHashes(b, hashes)
	b = msgp.AppendNil(b)
	b = msgp.AppendArrayHeader(b, uint32(len(hashes)*size))
	for i := range len(hashes) * size {
		b = msgp.AppendUint32(b, uint32(i))
	}
	b = msgp.AppendInt(b, size)
	b = msgp.AppendNil(b)
	return msgp.AppendString(b, "GPU")
}

func removed(hashes ...uint64) []byte {
	b := msgp.AppendArrayHeader(nil, 3)
	b = msgp.AppendString(b, "BlockRemoved")
	b = appendHashes(b, hashes)
	return msgp.AppendString(b, "GPU")
}

// storedIn and removedIn are of an attention group; only stores tell its kind.
func storedIn(group int, kind string, hash uint64) []byte {
	b := stored(hash)
	b[0] += 4 // elements: two absent, then the group and its kind
	b = msgp.AppendNil(msgp.AppendNil(b))
	return msgp.AppendString(msgp.AppendInt(b, group), kind)
}

func removedIn(group int, hash uint64) []byte {
	b := removed(hash)
	b[0]++
	return msgp.AppendInt(b, group)
}

func cleared() []byte {
	return msgp.AppendString(msgp.AppendArrayHeader(nil, 1), "AllBlocksCleared")
}

func appendHashes(b []byte, hashes []uint64) []byte {
	b = msgp.AppendArrayHeader(b, uint32(len(hashes)))
	for _, h := range hashes {
		b = msgp.AppendUint64(b, h)
	}
	return b
}
