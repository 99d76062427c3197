package enginegrpc_test

import (
	"bytes"
	"encoding/binary"
	"fmt"
	"math"
	"net"
	"slices"
	"testing"
	"time"

	"google.golang.org/protobuf/proto"

	lmcachev1 "github.com/kvcast/kvcast/internal/peer/lmcache/v1"
	"github.com/kvcast/kvcast/internal/transport"
	"github.com/kvcast/kvcast/internal/transport/enginegrpc"
	"github.com/kvcast/kvcast/internal/wire"
	"github.com/kvcast/kvcast/internal/zmtp"
	"github.com/kvcast/kvcast/test/harness"
	"github.com/kvcast/kvcast/test/rawzmtp"
)

const (
	lmcacheMethod     = "/lmcache.mp.ObservabilityService/SubscribeKvEvents"
	lmcachePingMethod = "/lmcache.mp.ControllerService/Ping"
)

func encodeMessage(t *testing.T, m proto.Message) message {
	t.Helper()
	b, err := proto.Marshal(m)
	if err != nil {
		t.Fatal(err)
	}
	return b
}

// acceptLMCache waits for a subscription to model m after a cursor, and returns its instance.
func (s server) acceptLMCache(cursor int64) (call, int64) {
	s.t.Helper()
	c, err := s.Accept()
	if err != nil {
		s.t.Fatal(err)
	}
	req := new(lmcachev1.SubscribeKvEventsRequest)
	if err := proto.Unmarshal(c.Request, req); err != nil || c.Method != lmcacheMethod {
		s.t.Fatalf("call of %s with %x: %v", c.Method, c.Request, err)
	}
	if req.GetModelName() != "m" || req.GetCursor() != cursor || req.GetMaxEvents() != 64 || req.GetInstanceId() < 0 {
		s.t.Fatalf("got the request %v, want model m and cursor %d", req, cursor)
	}
	return call{c, s.t}, req.GetInstanceId()
}

// chunkHash is a digest of 32 bytes that ends with a number.
func chunkHash(n uint64) []byte {
	return binary.BigEndian.AppendUint64(slices.Repeat([]byte{0xaa}, 24), n)
}

func storedRecord(seq int64, hash uint64, parent []byte, tokens ...int64) *lmcachev1.KVEventRecord {
	return &lmcachev1.KVEventRecord{
		Seq: seq, Kind: "stored", Medium: "CPU", ModelName: "m", BlockHashes: [][]byte{chunkHash(hash)}, ParentBlockHash: parent, TokenIds: tokens,
	}
}

func removedRecord(seq int64, hashes ...uint64) *lmcachev1.KVEventRecord {
	r := &lmcachev1.KVEventRecord{Seq: seq, Kind: "removed", Medium: "CPU", ModelName: "m"}
	for _, h := range hashes {
		r.BlockHashes = append(r.BlockHashes, chunkHash(h))
	}
	return r
}

// batchOf is a batch of run 7 of a server.
func (c call) batchOf(next int64, lost bool, records ...*lmcachev1.KVEventRecord) {
	c.t.Helper()
	c.send(encodeMessage(c.t, &lmcachev1.KVEventBatch{Enabled: true, Incarnation: 7, NextCursor: next, Lost: lost, Events: records}))
}

func subscribeLMCache(t *testing.T, s server, last *uint64, epoch string) *reader {
	t.Helper()
	return subscribe(t, enginegrpc.Subscription{Endpoint: "lmcache://" + s.Address(), Model: "m", Last: last, Epoch: epoch})
}

// TestLMCacheRecordsBecomeBatches has a store, a record of another model, a store with a parent, and a remove.
func TestLMCacheRecordsBecomeBatches(t *testing.T) {
	t.Parallel()
	s := newServer(t, lmcacheMethod)
	r := subscribeLMCache(t, s, nil, "")
	c, _ := s.acceptLMCache(0)
	c.batchOf(0, false)
	r.want("connected, resumed false")
	c.batchOf(4, false, storedRecord(1, 11, nil, 1, 2, 300), storedRecord(3, 12, chunkHash(11), 4, 5, 6), removedRecord(4, 12, 11))
	var got []string
	for len(got) < 4 {
		chunk, err := r.Next(func() time.Time { return time.Now().Add(harness.Timeout) })
		if err != nil {
			t.Fatal(err)
		}
		for _, m := range chunk.Messages {
			b, err := new(wire.Decoder).Decode(m.Frames[2])
			if err != nil {
				t.Fatal(err)
			}
			_, epoch := wire.CutTopic(m.Frames[0])
			line := fmt.Sprintf("%s:%d", epoch, binary.BigEndian.Uint64(m.Frames[1]))
			for _, e := range b.Events {
				line += fmt.Sprintf(" %d %s %d of %d after %d: %d", e.Kind, e.Medium, e.BlockHashes, e.BlockSize, e.Parent, e.Tokens)
			}
			got = append(got, line)
		}
		r.Recycle(chunk)
	}
	want := []string{
		fmt.Sprintf("7:1 %d EXTERNAL [11] of 3 after 0: [1 2 300]", wire.KindStored),
		"7:2",
		fmt.Sprintf("7:3 %d EXTERNAL [12] of 3 after 11: [4 5 6]", wire.KindStored),
		fmt.Sprintf("7:4 %d EXTERNAL [12 11] of 0 after 0: []", wire.KindRemoved),
	}
	if !slices.Equal(got, want) {
		t.Errorf("got %q, want %q", got, want)
	}
}

// TestLMCacheTellsWhatIsLost has losses before and after a record, and records of other models at the end.
func TestLMCacheTellsWhatIsLost(t *testing.T) {
	t.Parallel()
	s := newServer(t, lmcacheMethod)
	r := subscribeLMCache(t, s, nil, "")
	c, _ := s.acceptLMCache(0)
	c.batchOf(40, true)
	r.want("connected, resumed false", "40 malformed")
	c.batchOf(42, false, removedRecord(41, 1))
	r.want("41 of rank 0 with 1 events", "42 of rank 0 with 0 events")
	c.batchOf(50, true, removedRecord(47, 1), removedRecord(49, 1))
	r.want("46 malformed", "47 of rank 0 with 1 events", "48 of rank 0 with 0 events", "49 of rank 0 with 1 events", "50 of rank 0 with 0 events")
	c.batchOf(52, true)
	r.want("52 malformed")
	c.batchOf(53, true) // the marker of the loss alone
	r.want("53 malformed")
	c.batchOf(55, true, removedRecord(55, 1))
	r.want("54 malformed", "55 of rank 0 with 1 events")
	c.batchOf(56, true, removedRecord(56, 1)) // what is lost was before the call
	r.want("56 of rank 0 with 1 events")
	c.batchOf(math.MaxInt64, false) // more records of other models than a server keeps
	r.want(fmt.Sprintf("%d of rank 0 with 0 events", int64(math.MaxInt64)))
}

// TestLMCacheResumes resumes with the run of the last record only.
func TestLMCacheResumes(t *testing.T) {
	t.Parallel()
	s := newServer(t, lmcacheMethod)
	for _, tt := range []struct {
		epoch   string
		batch   func(call)
		resumes bool
	}{
		{"7", func(c call) { c.batchOf(5, false, removedRecord(5, 1)) }, true},
		{"7", func(c call) { c.batchOf(6, false, removedRecord(6, 1)) }, true}, // the last one was of another model
		{"7", func(c call) { c.batchOf(9, true, removedRecord(9, 1)) }, true},  // the log no longer has it
		{"6", func(c call) { c.batchOf(5, false, removedRecord(5, 1)) }, false},
		{"", func(c call) { c.batchOf(3, true) }, false}, // the new run has fewer
	} {
		r := subscribeLMCache(t, s, last(5), tt.epoch)
		c, _ := s.acceptLMCache(4)
		tt.batch(c)
		if !tt.resumes {
			c, _ = s.acceptLMCache(0)
			c.batchOf(1, false, removedRecord(1, 1))
			r.want("connected, resumed false", "1 of rank 0 with 1 events")
			continue
		}
		r.want("connected, resumed true")
	}
	r := subscribeLMCache(t, s, last(1), "7") // the first record, and no other
	c, _ := s.acceptLMCache(0)
	c.batchOf(1, false, removedRecord(1, 1))
	r.want("connected, resumed true", "1 of rank 0 with 1 events")
}

// TestLMCacheResponsesThatAreRefused ends calls whose responses are not those of a server, or of one that keeps no log.
func TestLMCacheResponsesThatAreRefused(t *testing.T) {
	t.Parallel()
	batch := func(next int64, records ...*lmcachev1.KVEventRecord) *lmcachev1.KVEventBatch {
		return &lmcachev1.KVEventBatch{Enabled: true, Incarnation: 7, NextCursor: next, Events: records}
	}
	for _, tt := range []struct {
		name     string
		response *lmcachev1.KVEventBatch
		want     string
	}{
		{"no log", &lmcachev1.KVEventBatch{}, "disconnected, lost false: LMCache's server keeps no log of events; want --kv-event-log-size above 0"},
		{"a seq of 0", batch(2, removedRecord(0, 1)), "disconnected, lost true: batches were lost: a response is malformed: the seq of a record is 0"},
		{"a seq that was read", batch(2, removedRecord(2, 1), removedRecord(2, 1)), "disconnected, lost true: batches were lost: a response is malformed: a record has the seq 2; want 3 to 2"},
		{"a seq beyond the batch", batch(2, removedRecord(3, 1)), "disconnected, lost true: batches were lost: a response is malformed: a record has the seq 3; want 1 to 2"},
		{"a negative cursor", batch(-1), "disconnected, lost true: batches were lost: a response is malformed: next_cursor is -1"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			t.Parallel()
			s := newServer(t, lmcacheMethod)
			r := subscribeLMCache(t, s, nil, "")
			c, _ := s.acceptLMCache(0)
			c.header()
			r.want("connected, resumed false")
			c.send(encodeMessage(t, tt.response))
			r.want(tt.want)
			r.wantEnd(transport.ErrEnded)
		})
	}
	s := newServer(t, lmcacheMethod)
	r := subscribeLMCache(t, s, nil, "")
	c, _ := s.acceptLMCache(0)
	c.header()
	c.batchOf(2, false, removedRecord(1, 1), &lmcachev1.KVEventRecord{Seq: 2, Kind: "moved"})
	r.want("connected, resumed false", "1 of rank 0 with 1 events", "2 malformed")
	c.batchOf(4, false, storedRecord(3, 1, nil, 1, -1), storedRecord(4, 1, nil, 1<<32))
	r.want("3 malformed", "4 malformed")
	c.batchOf(1, false)
	r.want("disconnected, lost true: batches were lost: LMCache's server has restarted")
}

// lmcacheByZeroMQ is a server of LMCache that is called over ZeroMQ.
type lmcacheByZeroMQ struct {
	*net.TCPListener
	t *testing.T
}

func newLMCacheByZeroMQ(t *testing.T) lmcacheByZeroMQ {
	t.Helper()
	l, err := net.ListenTCP("tcp", &net.TCPAddr{IP: net.IPv4(127, 0, 0, 1)})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = l.Close() })
	return lmcacheByZeroMQ{l, t}
}

func (s lmcacheByZeroMQ) accept() *rawzmtp.Conn {
	s.t.Helper()
	c, err := rawzmtp.Accept(s.TCPListener, zmtp.ROUTER, harness.Timeout)
	if err != nil {
		s.t.Fatal(err)
	}
	s.t.Cleanup(func() { _ = c.Close() })
	return c
}

// acceptLMCacheCall waits for a subscription after a cursor, and returns what answers it with a batch of an incarnation.
func acceptLMCacheCall(t *testing.T, c *rawzmtp.Conn, cursor int) (answer func(incarnation, next int, events ...any)) {
	t.Helper()
	var frames [][]byte
	for len(frames) != 6 { // others control the stream before
		var err error
		if frames, err = c.Receive(harness.Timeout); err != nil {
			t.Fatal(err)
		}
	}
	if want := [][]byte{encoded(t, "subscribe_kv_events"), encoded(t, "m"), encoded(t, cursor), encoded(t, 64)}; !slices.EqualFunc(want, [][]byte{frames[1], frames[3], frames[4], frames[5]}, bytes.Equal) {
		t.Errorf("got the request %q, want %q", frames, want)
	}
	return func(incarnation, next int, events ...any) {
		t.Helper()
		c.Message(frames[0], frames[1], encoded(t, map[string]any{"enabled": true, "incarnation": incarnation, "next_cursor": next, "lost": false, "events": events}))
		if err := c.Flush(); err != nil {
			t.Error(err)
		}
	}
}

// TestLMCacheByZeroMQ reads a server, resumes, and begins anew over the same connection when the server has restarted.
func TestLMCacheByZeroMQ(t *testing.T) {
	t.Parallel()
	s := newLMCacheByZeroMQ(t)
	subscription := enginegrpc.Subscription{Endpoint: "lmcache://" + s.Addr().String(), Model: "m"}
	r := subscribe(t, subscription)
	c := s.accept()
	answer := acceptLMCacheCall(t, c, 0)
	answer(7, 0)
	r.want("connected, resumed false")
	answer(7, 2, map[string]any{"seq": 2, "kind": "removed", "block_hashes": []any{chunkHash(1)}})
	r.want("1 of rank 0 with 0 events", "2 of rank 0 with 1 events")
	for range 2 { // each batch is acknowledged
		if _, err := c.Receive(harness.Timeout); err != nil {
			t.Error(err)
		}
	}
	if err := c.Close(); err != nil {
		t.Error(err)
	}
	r.want("disconnected, lost false: rpc error: code = Unavailable desc = LMCache's server over ZeroMQ: EOF")

	last := uint64(2)
	subscription.Last, subscription.Epoch = &last, "7"
	resumed := subscribe(t, subscription)
	answer = acceptLMCacheCall(t, s.accept(), 1)
	answer(7, 2, map[string]any{"seq": 2, "kind": "removed", "block_hashes": []any{chunkHash(1)}})
	resumed.want("connected, resumed true", "2 of rank 0 with 1 events")

	restarted := subscribe(t, subscription)
	c = s.accept()
	acceptLMCacheCall(t, c, 1)(8, 1)
	answer = acceptLMCacheCall(t, c, 0)
	answer(8, 1, map[string]any{"seq": 1, "kind": "removed", "block_hashes": []any{chunkHash(2)}})
	restarted.want("connected, resumed false", "1 of rank 0 with 1 events")
}

// TestLMCacheByZeroMQWithoutEvents has a server that does not know the operation, to which it then sends nothing.
func TestLMCacheByZeroMQWithoutEvents(t *testing.T) {
	t.Parallel()
	s := newLMCacheByZeroMQ(t)
	address := s.Addr().String()
	r := subscribeWithin(t, enginegrpc.Subscription{Endpoint: "lmcache://" + address, Model: "m"}, 500*time.Millisecond)
	s.accept()
	r.want("failed: call " + address + ": the server did not answer in time; want lmcache 0.5.6 or later")
}

// TestLMCacheIsPinged waits for pings of the instance that has subscribed, also after one that was not answered.
func TestLMCacheIsPinged(t *testing.T) {
	t.Parallel()
	s := newServer(t, lmcacheMethod, lmcachePingMethod)
	tr := enginegrpc.New(enginegrpc.Config{})
	tr.SetPing(time.Millisecond)
	r := subscribeBy(t, tr, enginegrpc.Subscription{Endpoint: "lmcache://" + s.Address(), Model: "m"}, harness.Timeout)
	c, instance := s.acceptLMCache(0)
	c.batchOf(0, false)
	r.want("connected, resumed false")
	for range 3 {
		ping := s.accept(lmcachePingMethod, encodeMessage(t, &lmcachev1.PingRequest{InstanceId: &instance}))
		ping.end(nil)
	}
}

// FuzzLMCache passes on two responses. Seqs grow, none of a response is beyond what the response says, and empty batches are bounded.
func FuzzLMCache(f *testing.F) {
	encode := func(b *lmcachev1.KVEventBatch) []byte {
		b.Enabled, b.Incarnation = true, 7
		out, err := proto.Marshal(b)
		if err != nil {
			f.Fatal(err)
		}
		return out
	}
	stored := &lmcachev1.KVEventBatch{NextCursor: 4, Events: []*lmcachev1.KVEventRecord{storedRecord(1, 11, nil, 1, 2, 300), storedRecord(3, 12, chunkHash(11), 4, 5, 6)}}
	removed := &lmcachev1.KVEventBatch{NextCursor: 9, Lost: true, Events: []*lmcachev1.KVEventRecord{removedRecord(8, 12, 11)}}
	f.Add(encode(stored), encode(removed))
	f.Add(encode(&lmcachev1.KVEventBatch{NextCursor: math.MaxInt64}), encode(&lmcachev1.KVEventBatch{NextCursor: 3, Lost: true}))
	far := &lmcachev1.KVEventBatch{NextCursor: 200_000}
	for n := range int64(6) { // many records of other models between those of this one
		far.Events = append(far.Events, removedRecord(30_000*(n+1), 1))
	}
	f.Add(encode(far), encode(removed))
	f.Add([]byte{}, []byte{8, 1, 24, 5})
	f.Fuzz(func(t *testing.T, first, second []byte) {
		last, empty := uint64(0), 0
		err := enginegrpc.PassLMCache([][]byte{first, second}, func(m transport.Message) {
			seq := binary.BigEndian.Uint64(m.Frames[1])
			if seq <= last || seq > math.MaxInt64 {
				t.Errorf("seq %d follows %d", seq, last)
			}
			last = seq
			b, err := new(wire.Decoder).Decode(m.Frames[2])
			if err == nil && len(b.Events) == 0 {
				empty++
			}
			if _, epoch := wire.CutTopic(m.Frames[0]); len(epoch) == 0 {
				t.Errorf("the topic %q has no epoch", m.Frames[0])
			}
		})
		if most := 2<<15 + len(first) + len(second); empty > most {
			t.Errorf("%d empty batches of %d bytes, %v", empty, len(first)+len(second), err)
		}
	})
}
