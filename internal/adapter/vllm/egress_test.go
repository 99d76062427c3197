package vllm_test

import (
	"cmp"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"log/slog"
	"math"
	"net"
	"runtime"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/testutil"
	"google.golang.org/protobuf/proto"

	"github.com/kvcast/kvcast/internal/adapter/vllm"
	"github.com/kvcast/kvcast/internal/core/index"
	"github.com/kvcast/kvcast/internal/core/kvblock"
	"github.com/kvcast/kvcast/internal/follow"
	"github.com/kvcast/kvcast/internal/journal"
	"github.com/kvcast/kvcast/internal/transport"
	"github.com/kvcast/kvcast/internal/transport/native"
	"github.com/kvcast/kvcast/internal/wire"
	"github.com/kvcast/kvcast/internal/zmtp"
	kvcastv1 "github.com/kvcast/kvcast/proto/kvcast/v1"
	"github.com/kvcast/kvcast/test/rawzmtp"
)

// patience bounds every wait of the tests.
const patience = time.Minute

// service is an egress with its journal and index.
type service struct {
	t       *testing.T
	journal *journal.Memory
	index   *index.Index
	egress  *vllm.Egress
	metrics *prometheus.Registry
	stop    func()
}

// start starts an egress, which stops with the test.
func start(t *testing.T, cfg vllm.Config) *service {
	t.Helper()
	s := &service{t: t, journal: journal.NewMemory(journal.Config{}), index: index.New(), metrics: prometheus.NewRegistry()}
	s.index.RetainTokenIDs(1 << 30)
	follower := follow.New(s.journal, s.index, follow.Delays{})
	if cfg.HistoryBatches == 0 {
		cfg.HistoryBatches = 10_000
	}
	cfg.HistoryBytes, cfg.StateBytes, cfg.MaxConsumers = 1<<20, cmp.Or(cfg.StateBytes, 1<<30), cmp.Or(cfg.MaxConsumers, 100)
	if cfg.Logger == nil {
		cfg.Logger = slog.New(slog.DiscardHandler)
	}
	cfg.Topic, cfg.Registerer = cmp.Or(cfg.Topic, "kv@{endpoint}@{model}"), s.metrics
	var err error
	if s.egress, err = vllm.New(t.Context(), cfg, follower, s.index); err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	var running sync.WaitGroup
	running.Go(func() { _ = follower.Run(ctx) })
	running.Go(func() {
		if err := s.egress.Run(ctx); err != nil {
			t.Error(err)
		}
	})
	s.stop = sync.OnceFunc(func() {
		cancel()
		running.Wait()
		_ = s.journal.Close(context.Background())
	})
	t.Cleanup(s.stop)
	return s
}

// apply appends an entry of a worker.
func (s *service) apply(worker string, events ...*kvcastv1.RouterEvent) {
	s.t.Helper()
	body, err := proto.Marshal(&kvcastv1.Entry{Worker: worker, Model: "m", Events: events})
	if err != nil {
		s.t.Fatal(err)
	}
	p, err := s.journal.Append(s.t.Context(), journal.Record{Source: &journal.Source{Worker: worker, Model: "m"}, Tiers: kvblock.AllEvents, Body: body})
	if err == nil {
		_, err = p.Wait(s.t.Context())
	}
	if err != nil {
		s.t.Fatal(err)
	}
}

func added() *kvcastv1.RouterEvent {
	return &kvcastv1.RouterEvent{Event: &kvcastv1.RouterEvent_WorkerAdded{WorkerAdded: &kvcastv1.WorkerAdded{Model: "m", BlockSize: 2, Ranks: []uint32{0}}}}
}

func removedWorker() *kvcastv1.RouterEvent {
	return &kvcastv1.RouterEvent{Event: &kvcastv1.RouterEvent_WorkerRemoved{WorkerRemoved: &kvcastv1.WorkerRemoved{}}}
}

// chain stores blocks with the hashes from first to last, as the start of a prompt.
func chain(first, last uint64) *kvcastv1.RouterEvent {
	c := &kvcastv1.Stored{BlockSize: 2}
	for hash := first; hash <= last; hash++ {
		c.BlockHashes, c.TokenIds = append(c.BlockHashes, hash), append(c.TokenIds, uint32(hash), 7)
	}
	c.TokensHashes = kvblock.AppendTokensHashes(nil, c.GetTokenIds(), 2, kvblock.Seed("", ""), false, nil)
	return &kvcastv1.RouterEvent{Tier: 1, DpRank: proto.Uint32(0), Event: &kvcastv1.RouterEvent_Stored{Stored: c}}
}

func removal(hashes ...uint64) *kvcastv1.RouterEvent {
	return &kvcastv1.RouterEvent{Tier: 1, DpRank: proto.Uint32(0), Event: &kvcastv1.RouterEvent_Removed{Removed: &kvcastv1.Removed{BlockHashes: hashes}}}
}

// subscriber is a consumer: the blocks of each topic, and the seqs in the order in which they came.
type subscriber struct {
	t       *testing.T
	mu      sync.Mutex // guards all below
	blocks  map[string]map[uint64]bool
	seqs    map[string][]uint64
	changed chan struct{}
}

func newSubscriber(t *testing.T) *subscriber {
	return &subscriber{t: t, blocks: make(map[string]map[uint64]bool), seqs: make(map[string][]uint64), changed: make(chan struct{})}
}

func (s *subscriber) apply(topic string, seq uint64, payload []byte) {
	var d wire.Decoder
	batch, err := d.Decode(payload)
	if err != nil {
		s.t.Errorf("%s: batch %d: %v", topic, seq, err)
		return
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.blocks[topic] == nil {
		s.blocks[topic] = make(map[uint64]bool)
	}
	for _, e := range batch.Events {
		for _, hash := range e.BlockHashes {
			if s.blocks[topic][hash] = true; e.Kind == wire.KindRemoved {
				delete(s.blocks[topic], hash)
			}
		}
		if e.Kind == wire.KindCleared {
			clear(s.blocks[topic])
		}
	}
	s.seqs[topic] = append(s.seqs[topic], seq)
	close(s.changed)
	s.changed = make(chan struct{})
}

// await waits until the blocks of a topic are those given, as numbers, and returns the seqs so far.
func (s *subscriber) await(topic string, want ...uint64) []uint64 {
	s.t.Helper()
	timeout := time.After(patience)
	for {
		s.mu.Lock()
		got := make([]uint64, 0, len(s.blocks[topic]))
		for hash := range s.blocks[topic] {
			got = append(got, hash)
		}
		slices.Sort(got)
		seqs, known, changed := slices.Clone(s.seqs[topic]), s.blocks[topic] != nil, s.changed
		s.mu.Unlock()
		if known && slices.Equal(got, want) {
			return seqs
		}
		select {
		case <-changed:
		case <-timeout:
			s.t.Fatalf("%s: got the blocks %v, want %v", topic, got, want)
		}
	}
}

// read makes a subscriber apply what a receiver has, until the test ends.
func (s *subscriber) read(r transport.Receiver) {
	var reading sync.WaitGroup
	reading.Go(func() {
		for {
			chunk, err := r.Next(func() time.Time { return time.Time{} })
			if err != nil {
				return
			}
			for _, m := range chunk.Messages {
				if m.Count == 3 {
					s.apply(string(m.Frames[0]), binary.BigEndian.Uint64(m.Frames[1]), m.Frames[2])
				}
			}
			r.Recycle(chunk)
		}
	})
	s.t.Cleanup(func() {
		r.Interrupt()
		reading.Wait()
		_ = r.Close()
	})
}

func subscribe(t *testing.T, endpoint, topic string) *subscriber {
	t.Helper()
	r, err := native.New(native.Config{}).Subscribe(endpoint, topic, nil)
	if err != nil {
		t.Fatal(err)
	}
	s := newSubscriber(t)
	s.read(r)
	return s
}

// replay returns the blocks and the seqs of the answer to a replay request.
func replay(t *testing.T, endpoint string, from uint64) *subscriber {
	t.Helper()
	r, err := native.New(native.Config{}).Request(endpoint, nil, nil, binary.BigEndian.AppendUint64(nil, from))
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = r.Close() }()
	s, deadline := newSubscriber(t), time.Now().Add(patience)
	for {
		chunk, err := r.Next(func() time.Time { return deadline })
		if err != nil {
			t.Fatal(err)
		}
		for _, m := range chunk.Messages {
			if m.Count != 4 || len(m.Frames[0]) > 0 {
				t.Fatalf("a reply has the frames %q", m.Frames)
			}
			seq := binary.BigEndian.Uint64(m.Frames[2])
			if len(m.Frames[3]) == 0 {
				if seq != math.MaxUint64 || len(m.Frames[1]) > 0 {
					t.Fatalf("the end has the frames %q", m.Frames)
				}
				return s
			}
			s.apply(string(m.Frames[1]), seq, m.Frames[3])
		}
		r.Recycle(chunk)
	}
}

func contiguous(seqs []uint64) bool {
	for i, seq := range seqs[1:] {
		if seq != seqs[i]+1 {
			return false
		}
	}
	return true
}

// TestSubscribersOfOneEndpointGetAllWorkers has subscribers from the start, with another topic, and late, at an endpoint
// without replay.
func TestSubscribersOfOneEndpointGetAllWorkers(t *testing.T) {
	t.Parallel()
	s := start(t, vllm.Config{Endpoints: []vllm.EndpointConfig{{Bind: "tcp://127.0.0.1:*"}}})
	endpoint := s.egress.Bound()[0].Bind
	early := subscribe(t, endpoint, "kv@")
	s.apply("a", added())
	s.apply("a", chain(1, 3))
	s.apply("b", added(), chain(5, 6))
	early.await("kv@a@m", 1, 2, 3)
	early.await("kv@b@m", 5, 6)
	s.apply("a", removal(3))
	s.apply("a", chain(1, 2)) // announces blocks that are held
	s.apply("a", chain(10, 11))
	early.await("kv@a@m", 1, 2, 10, 11)
	late, other := subscribe(t, endpoint, ""), subscribe(t, endpoint, "kv@b")
	late.await("kv@a@m", 1, 2, 10, 11)
	late.await("kv@b@m", 5, 6)
	other.await("kv@b@m", 5, 6)
	s.apply("a", removal(11))
	s.apply("b", removedWorker())
	s.apply("b", added(), chain(7, 7))
	for _, c := range []*subscriber{early, late} {
		if seqs := c.await("kv@a@m", 1, 2, 10); !contiguous(seqs) {
			t.Errorf("seqs of a: %v", seqs)
		}
		c.await("kv@b@m", 7)
	}
	if seqs := other.await("kv@b@m", 7); !contiguous(seqs) {
		t.Errorf("seqs of a worker that was removed and added: %v", seqs)
	}
	if other.blocks["kv@a@m"] != nil {
		t.Error("a subscriber of another topic got blocks")
	}
}

// TestReplaysAnswerLateAndMissedBatches requests batches that are retained, and batches that are not, of a worker with
// endpoints of its own.
func TestReplaysAnswerLateAndMissedBatches(t *testing.T) {
	t.Parallel()
	s := start(t, vllm.Config{FirstSeq: 100, HistoryBatches: 4, Endpoints: []vllm.EndpointConfig{
		{Worker: "a", Bind: "tcp://127.0.0.1:*", Replay: "tcp://127.0.0.1:*"},
		{Worker: "a", Rank: 1, Bind: "tcp://127.0.0.1:*", Replay: "tcp://127.0.0.1:*"},
	}})
	at := s.egress.Bound()[0]
	if got := replay(t, at.Replay, 0); len(got.seqs) > 0 {
		t.Errorf("a worker that is unknown has the batches %v", got.seqs)
	}
	live := subscribe(t, at.Bind, "")
	s.apply("a", added())
	s.apply("b", added(), chain(99, 99)) // is not published here
	for hash := uint64(1); hash <= 8; hash++ {
		s.apply("a", chain(10*hash, 10*hash))
	}
	s.apply("a", removal(10))
	want := []uint64{20, 30, 40, 50, 60, 70, 80}
	// The subscription may be later than some batches, which are not sent again.
	s.awaitSeq(at.Replay, 109)
	for from, first := range map[uint64]uint64{0: 100, 100: 100, 103: 103, 106: 106, 108: 108, 109: 109} {
		got := replay(t, at.Replay, from)
		seqs := got.seqs["kv@a@m"]
		if !contiguous(seqs) || seqs[0] != first || seqs[len(seqs)-1] != 109 {
			t.Errorf("from %d: got the batches %v, want %d to 109", from, seqs, first)
		}
		if from < 106 { // a state
			got.await("kv@a@m", want...)
		}
	}
	if got := replay(t, at.Replay, 110); len(got.seqs) > 0 {
		t.Errorf("beyond the newest batch: got %v", got.seqs)
	}
	s.apply("a", chain(90, 90))
	s.awaitSeq(at.Replay, 110)
	live.mu.Lock()
	defer live.mu.Unlock()
	// It misses batches if the log has evicted them before it reads them: the log keeps four.
	seqs := live.seqs["kv@a@m"]
	for i := 1; i < len(seqs); i++ {
		if seqs[i] <= seqs[i-1] {
			t.Errorf("the subscriber got the batches %v", seqs)
		}
	}
}

// awaitSeq waits until a batch is published.
func (s *service) awaitSeq(endpoint string, seq uint64) {
	s.t.Helper()
	for until := time.Now().Add(patience); ; {
		got := replay(s.t, endpoint, seq)
		for _, seqs := range got.seqs {
			if len(seqs) > 0 {
				return
			}
		}
		if time.Now().After(until) {
			s.t.Fatalf("batch %d is not published", seq)
		}
	}
}

// TestConnectsToConsumers connects to a consumer that has bound, and again after it was closed.
func TestConnectsToConsumers(t *testing.T) {
	t.Parallel()
	consumer := newSubscriber(t)
	first, bound, err := native.New(native.Config{}).Bind("tcp://127.0.0.1:*", nil)
	if err != nil {
		t.Fatal(err)
	}
	s := start(t, vllm.Config{Endpoints: []vllm.EndpointConfig{{Connect: bound}}})
	s.apply("a", added(), chain(1, 2))
	done := make(chan struct{})
	go func() {
		defer close(done)
		for {
			chunk, err := first.Next(func() time.Time { return time.Time{} })
			if err != nil {
				return
			}
			for _, m := range chunk.Messages {
				consumer.apply(string(m.Frames[0]), binary.BigEndian.Uint64(m.Frames[1]), m.Frames[2])
			}
			first.Recycle(chunk)
		}
	}()
	consumer.await("kv@a@m", 1, 2)
	first.Interrupt()
	<-done
	if err := first.Close(); err != nil {
		t.Fatal(err)
	}
	s.apply("a", removal(2))
	again := newSubscriber(t)
	var r transport.Receiver
	for until := time.Now().Add(patience); ; { // the port may be in use for a moment
		if r, _, err = native.New(native.Config{}).Bind(bound, nil); err == nil {
			break
		}
		if time.Now().After(until) {
			t.Fatal(err)
		}
	}
	again.read(r)
	again.await("kv@a@m", 1)
}

// TestSlowConsumerDelaysNobody has a consumer that reads nothing, while another one gets more than all buffers hold.
func TestSlowConsumerDelaysNobody(t *testing.T) {
	vllm.DisableTimeouts(t)
	s := start(t, vllm.Config{HistoryBatches: 100, Endpoints: []vllm.EndpointConfig{{Bind: "tcp://127.0.0.1:*"}}})
	endpoint := s.egress.Bound()[0].Bind
	slow, err := rawzmtp.Dial(t.Context(), zmtp.SUB, strings.TrimPrefix(endpoint, "tcp://"), patience)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = slow.Close() })
	quick := subscribe(t, endpoint, "")
	s.apply("a", added())
	const rounds, blocks = 60, 20_000
	for round := range rounds {
		s.apply("a", chain(1, blocks))
		if round < rounds-1 {
			s.apply("a", &kvcastv1.RouterEvent{DpRank: proto.Uint32(0), Event: &kvcastv1.RouterEvent_Cleared{Cleared: &kvcastv1.Cleared{}}})
		}
	}
	s.apply("a", &kvcastv1.RouterEvent{DpRank: proto.Uint32(0), Event: &kvcastv1.RouterEvent_Cleared{Cleared: &kvcastv1.Cleared{}}})
	s.apply("a", chain(1, 3))
	quick.await("kv@a@m", 1, 2, 3)
	// The slow one catches up by a state.
	caught := newSubscriber(t)
	for {
		frames, err := slow.Receive(patience)
		if err != nil {
			t.Fatal(err)
		}
		caught.apply(string(frames[0]), binary.BigEndian.Uint64(frames[1]), frames[2])
		if len(caught.blocks["kv@a@m"]) == 3 {
			break
		}
	}
	caught.await("kv@a@m", 1, 2, 3)
	if seqs := caught.seqs["kv@a@m"]; len(seqs) > 2*rounds || !slices.IsSorted(seqs) {
		t.Errorf("the slow consumer got %d batches, sorted %t", len(seqs), slices.IsSorted(seqs))
	}
}

// TestHostilePeers sends what no consumer sends. Others are served afterwards.
func TestHostilePeers(t *testing.T) {
	t.Parallel()
	s := start(t, vllm.Config{Endpoints: []vllm.EndpointConfig{{Worker: "a", Bind: "tcp://127.0.0.1:*", Replay: "tcp://127.0.0.1:*"}}})
	at := s.egress.Bound()[0]
	s.apply("a", added(), chain(1, 1))
	s.awaitSeq(at.Replay, 0)
	for name, attack := range map[string]func(c *rawzmtp.Conn){
		"a large topic":         func(c *rawzmtp.Conn) { c.Command("SUBSCRIBE", make([]byte, 5000)) },
		"many topics":           func(c *rawzmtp.Conn) { manyTopics(c) },
		"a large message":       func(c *rawzmtp.Conn) { c.Message(make([]byte, 100_000)) },
		"an unexpected command": func(c *rawzmtp.Conn) { c.Command("ERROR", []byte("\x01x")) },
	} {
		c, err := rawzmtp.Dial(t.Context(), zmtp.SUB, strings.TrimPrefix(at.Bind, "tcp://"), patience)
		if err != nil {
			t.Fatal(err)
		}
		attack(c)
		_ = c.Flush()
		for err == nil { // until the connection is closed
			_, err = c.Receive(patience)
		}
		if e := net.Error(nil); errors.As(err, &e) && e.Timeout() {
			t.Errorf("%s: the connection stays open", name)
		}
		_ = c.Close()
	}
	for _, frames := range [][][]byte{{{}}, {{}, {}, {}}, {[]byte("x"), {0}}, {{}, make([]byte, 100)}, {{}, slices.Repeat([]byte{0xff}, 20)}} {
		c, err := rawzmtp.Dial(t.Context(), zmtp.DEALER, strings.TrimPrefix(at.Replay, "tcp://"), patience)
		if err != nil {
			t.Fatal(err)
		}
		c.Message(frames...)
		if err := c.Flush(); err != nil {
			t.Fatal(err)
		}
		_ = c.Close()
	}
	replay(t, at.Replay, 0).await("kv@a@m", 1)
	var many []*rawzmtp.Conn
	for range 30 { // 12 are allowed: an eighth of 100
		if c, err := rawzmtp.Dial(t.Context(), zmtp.SUB, strings.TrimPrefix(at.Bind, "tcp://"), patience); err == nil {
			many = append(many, c)
		}
	}
	if len(many) == 0 || len(many) > 12 {
		t.Errorf("%d connections, with a limit of 12", len(many))
	}
	other, err := rawzmtp.DialFrom(t.Context(), net.IPv4(127, 0, 0, 2), zmtp.SUB, strings.TrimPrefix(at.Bind, "tcp://"), patience)
	if err != nil {
		t.Fatalf("another address is refused: %v", err)
	}
	many = append(many, other)
	for _, c := range many {
		_ = c.Close()
	}
}

func manyTopics(c *rawzmtp.Conn) {
	for i := range 1100 {
		c.Message([]byte(fmt.Sprintf("\x01topic %d", i)))
	}
}

// TestOmittedBlocksAreCountedWithoutBatches stores only blocks that are not published.
func TestOmittedBlocksAreCountedWithoutBatches(t *testing.T) {
	t.Parallel()
	s := start(t, vllm.Config{Endpoints: []vllm.EndpointConfig{{Bind: "tcp://127.0.0.1:*"}}})
	c := subscribe(t, s.egress.Bound()[0].Bind, "")
	s.apply("a", added())
	c.await("kv@a@m")
	without := chain(1, 50)
	without.GetStored().TokenIds = nil
	s.apply("a", without)
	s.apply("b", added(), chain(1, 1)) // after a
	c.await("kv@b@m", 1)
	want := `
# HELP kvcast_egress_blocks_omitted_total Stored blocks that were not published, by reason.
# TYPE kvcast_egress_blocks_omitted_total counter
kvcast_egress_blocks_omitted_total{reason="no_token_ids"} 1
kvcast_egress_blocks_omitted_total{reason="other_content"} 0
kvcast_egress_blocks_omitted_total{reason="parent"} 49
`
	if err := testutil.GatherAndCompare(s.metrics, strings.NewReader(want), "kvcast_egress_blocks_omitted_total"); err != nil {
		t.Error(err)
	}
}

// TestConsumerThatHasLeftGetsNoState requests a replay, and disconnects while it waits for its state.
func TestConsumerThatHasLeftGetsNoState(t *testing.T) {
	t.Parallel()
	s := start(t, vllm.Config{HistoryBatches: 1, Endpoints: []vllm.EndpointConfig{{Worker: "a", Bind: "tcp://127.0.0.1:*", Replay: "tcp://127.0.0.1:*"}}})
	at := s.egress.Bound()[0]
	s.apply("a", added(), chain(1, 1))
	s.awaitSeq(at.Replay, 0)
	s.apply("a", chain(2, 2))
	s.awaitSeq(at.Replay, 1)
	s.egress.HoldStates(t)
	c, err := rawzmtp.Dial(t.Context(), zmtp.DEALER, strings.TrimPrefix(at.Replay, "tcp://"), patience)
	if err != nil {
		t.Fatal(err)
	}
	before := s.metric("kvcast_egress_replays_total")
	c.Message(nil, make([]byte, 8))
	if err := c.Flush(); err != nil {
		t.Fatal(err)
	}
	s.awaitMetric("kvcast_egress_replays_total", before+1)
	if err := c.Reset(); err != nil {
		t.Fatal(err)
	}
	s.awaitMetric("kvcast_egress_consumers", 0)
}

// metric returns the value of a metric without labels.
func (s *service) metric(name string) float64 {
	s.t.Helper()
	all, err := s.metrics.Gather()
	if err != nil {
		s.t.Fatal(err)
	}
	for _, f := range all {
		if m := f.GetMetric()[0]; f.GetName() == name {
			return m.GetCounter().GetValue() + m.GetGauge().GetValue()
		}
	}
	s.t.Fatalf("no metric %s", name)
	return 0
}

func (s *service) awaitMetric(name string, want float64) {
	s.t.Helper()
	for until := time.Now().Add(patience); s.metric(name) != want; runtime.Gosched() {
		if time.Now().After(until) {
			s.t.Fatalf("%s is %v, want %v", name, s.metric(name), want)
		}
	}
}

// logBuffer is a log that tests wait for.
type logBuffer struct {
	mu   sync.Mutex // guards text
	text strings.Builder
}

func (l *logBuffer) Write(b []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.text.Write(b)
}

func (l *logBuffer) String() string {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.text.String()
}

// await waits until the log has some text.
func (l *logBuffer) await(t *testing.T, text string) {
	t.Helper()
	for until := time.Now().Add(patience); !strings.Contains(l.String(), text); runtime.Gosched() {
		if time.Now().After(until) {
			t.Fatalf("the log has no %q:\n%s", text, l.String())
		}
	}
}

// TestUnreachableConsumersAreLogged connects to a port that nobody listens at, and to one that does not speak ZeroMQ.
func TestUnreachableConsumersAreLogged(t *testing.T) {
	t.Parallel()
	closed, err := net.Listen("tcp", "127.0.0.1:0") //nolint:noctx // it does not block
	if err != nil {
		t.Fatal(err)
	}
	_ = closed.Close()
	other, err := net.Listen("tcp", "127.0.0.1:0") //nolint:noctx // it does not block
	if err != nil {
		t.Fatal(err)
	}
	var accepting sync.WaitGroup
	accepting.Go(func() {
		for c, err := other.Accept(); err == nil; c, err = other.Accept() {
			_ = c.Close()
		}
	})
	t.Cleanup(func() {
		_ = other.Close()
		accepting.Wait()
	})
	for _, l := range []net.Listener{closed, other} {
		log := new(logBuffer)
		endpoint := "tcp://" + l.Addr().String()
		start(t, vllm.Config{Logger: slog.New(slog.NewTextHandler(log, nil)), Endpoints: []vllm.EndpointConfig{{Connect: endpoint}}})
		log.await(t, endpoint)
	}
}

// TestRanksThatConsumersCannotReadAreLogged has workers with two dp ranks, for a publisher of one rank, and with a topic that is the
// same for all ranks.
func TestRanksThatConsumersCannotReadAreLogged(t *testing.T) {
	t.Parallel()
	const size, topic = "set first_rank and dp_size", "put {rank} or {rank_endpoint} into egress.zmq.topic"
	publisher, all := vllm.EndpointConfig{Worker: "a", Bind: "tcp://127.0.0.1:*"}, vllm.EndpointConfig{Bind: "tcp://127.0.0.1:*"}
	for name, tt := range map[string]struct {
		cfg       vllm.Config
		want, not []string
	}{
		"publisher of one rank": {vllm.Config{Endpoints: []vllm.EndpointConfig{publisher}}, []string{size}, []string{topic}},
		"one topic":             {vllm.Config{Endpoints: []vllm.EndpointConfig{all}}, []string{topic}, []string{size}},
		"a topic of each rank":  {vllm.Config{Endpoints: []vllm.EndpointConfig{all}, Topic: "kv@{worker}@{rank}"}, nil, []string{size, topic}},
	} {
		t.Run(name, func(t *testing.T) {
			log := new(logBuffer)
			tt.cfg.Logger = slog.New(slog.NewTextHandler(log, nil))
			s := start(t, tt.cfg)
			for _, worker := range []string{"a", "b"} {
				s.apply(worker, &kvcastv1.RouterEvent{Event: &kvcastv1.RouterEvent_WorkerAdded{
					WorkerAdded: &kvcastv1.WorkerAdded{Model: "m", BlockSize: 2, Ranks: []uint32{0, 1}},
				}})
			}
			s.awaitMetric("kvcast_egress_batches_total", 4) // of two ranks each
			for _, text := range tt.want {
				if n := strings.Count(log.String(), text); n != 1 {
					t.Errorf("%q is logged %d times, want once:\n%s", text, n, log)
				}
			}
			for _, text := range tt.not {
				if strings.Contains(log.String(), text) {
					t.Errorf("%q is logged:\n%s", text, log)
				}
			}
		})
	}
}
