package ingest_test

import (
	"context"
	"encoding/binary"
	"fmt"
	"math"
	"net"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/tinylib/msgp/msgp"

	"github.com/kvcast/kvcast/ingest"
	"github.com/kvcast/kvcast/ingest/config"
	"github.com/kvcast/kvcast/internal/feed"
	"github.com/kvcast/kvcast/test/harness"
	"github.com/kvcast/kvcast/test/harness/enginetest"
)

// blockSize is the block size of the engines, in tokens.
const blockSize = 4

// start runs an Ingest until the test ends or stop is called. stop checks that Run returns in time,
// without an error. The first reply of a replay socket may take up to the Config's ReplayTimeout, unless prepare changes that: a busy
// machine may exceed the default of a second, after which batches count as lost that the socket has, and are read again later.
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
	in, err := harness.Bind(func() (*ingest.Ingest, error) { return ingest.New(c, sink) })
	if err != nil {
		t.Fatalf("New: %v", err)
	}
	ingest.SetFirstRequests(in, harness.Timeout/2, harness.Timeout/2)
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
		case <-time.After(harness.Timeout):
			t.Fatal("Run does not return")
		}
		if r, ok := sink.(*recorder); ok {
			r.ended.Store(true)
		}
	}
	t.Cleanup(stop)
	return in, stop
}

// engine is an enginetest.Engine whose failures fail the test.
type engine struct {
	*enginetest.Engine
	t *testing.T
}

func newEngine(t *testing.T) *engine {
	t.Helper()
	return newEngineOf(t, enginetest.Config{})
}

func newEngineOf(t *testing.T, cfg enginetest.Config) *engine {
	t.Helper()
	e := enginetest.New(cfg)
	t.Cleanup(e.Close)
	return &engine{e, t}
}

func (e *engine) mustBind(endpoint string) string {
	e.t.Helper()
	bound, err := e.Bind(endpoint)
	if err != nil {
		e.t.Fatal(err)
	}
	return bound
}

// connect connects to the port of an endpoint on this host.
func (e *engine) connect(endpoint string) {
	e.t.Helper()
	_, port, err := net.SplitHostPort(strings.TrimPrefix(endpoint, "tcp://"))
	if err == nil {
		err = e.Connect("tcp://127.0.0.1:" + port)
	}
	if err != nil {
		e.t.Fatal(err)
	}
}

// awaitSubscriber waits for a subscription to a topic.
func (e *engine) awaitSubscriber(topic string) {
	e.t.Helper()
	got, err := e.AwaitSubscription()
	if err != nil || got != topic {
		e.t.Fatalf("got a subscription to %q and error %v, want one to %q", got, err, topic)
	}
}

// send sends frames, which are strings or bytes.
func (e *engine) send(frames ...any) { e.Send(framesOf(frames)...) }

// framesOf returns frames, which are strings or bytes, as bytes.
func framesOf(frames []any) [][]byte {
	all := make([][]byte, len(frames))
	for i, f := range frames {
		if b, ok := f.([]byte); ok {
			all[i] = b
		} else {
			all[i] = []byte(f.(string))
		}
	}
	return all
}

// publish sends a batch of an engine whose topic is empty.
func (e *engine) publish(seq uint64, events ...[]byte) {
	e.t.Helper()
	e.send("", seqFrame(seq), payload(seq, events...))
}

// newEngines returns engines on consecutive ports, and the endpoint of the first.
func newEngines(t *testing.T, n int) (engines []*engine, first string) {
	t.Helper()
	port := harness.FreePorts(t, n)
	for rank := range n {
		e := newEngine(t)
		e.mustBind(fmt.Sprintf("tcp://127.0.0.1:%d", port+rank))
		engines = append(engines, e)
	}
	return engines, fmt.Sprintf("tcp://127.0.0.1:%d", port)
}

func seqFrame(seq uint64) []byte { return binary.BigEndian.AppendUint64(nil, seq) }

// payload returns a batch without a rank.
func payload(seq uint64, events ...[]byte) []byte {
	return appendBatch(nil, 2, seq, events)
}

// payloadOf returns a batch with a rank.
func payloadOf(rank uint32, seq uint64, events ...[]byte) []byte {
	return msgp.AppendUint32(appendBatch(nil, 3, seq, events), rank)
}

// garbage is a payload that does not decode.
var garbage = []byte{0xc1, 'n', 'o', 't', ' ', 'a', ' ', 'b', 'a', 't', 'c', 'h'}

// epochSeconds returns the timestamp of a batch: a multiple of 1/4 s, which a float represents
// exactly.
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

// stored returns a store of consecutive blocks of blockSize tokens.
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

// storedIn and removedIn return a store and a remove in an attention group. Only the store has the
// group's kind.
func storedIn(group int, kind string, hash uint64) []byte {
	b := stored(hash)
	b[0] += 4 // four more elements: two nils, the group and its kind
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
