package smg_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"math"
	"net"
	"os"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/testutil"
	"go.uber.org/goleak"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/status"
	"google.golang.org/grpc/test/bufconn"
	"google.golang.org/protobuf/encoding/protowire"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/emptypb"

	"github.com/kvcast/kvcast/internal/adapter/smg"
	"github.com/kvcast/kvcast/internal/core/index"
	"github.com/kvcast/kvcast/internal/core/kvblock"
	"github.com/kvcast/kvcast/internal/follow"
	"github.com/kvcast/kvcast/internal/journal"
	kvcastv1 "github.com/kvcast/kvcast/proto/kvcast/v1"
	"github.com/kvcast/kvcast/test/harness"
)

func TestMain(m *testing.M) {
	code := m.Run()
	if err := goleak.Find(); code == 0 && err != nil {
		fmt.Fprintln(os.Stderr, err)
		code = 1
	}
	os.Exit(code)
}

// service is a service with its journal and index, at a gRPC port in memory.
type service struct {
	t        *testing.T
	journal  *journal.Memory
	port     *bufconn.Listener
	smg      *smg.Service
	begin    func() // starts publishing
	stop     func()
	registry *prometheus.Registry
}

func start(t *testing.T, cfg smg.Config) *service {
	t.Helper()
	s := &service{t: t, journal: journal.NewMemory(journal.Config{}), port: bufconn.Listen(1 << 16), registry: prometheus.NewRegistry()}
	x := index.New()
	x.RetainTokenIDs(1 << 30)
	follower := follow.New(s.journal, x, follow.Delays{})
	if cfg.HistoryBytes == 0 {
		cfg.HistoryBytes = 1 << 20
	}
	if cfg.StateBytes == 0 {
		cfg.StateBytes = 1 << 30
	}
	if cfg.MaxSubscribers == 0 {
		cfg.MaxSubscribers = 10
	}
	if cfg.Logger == nil {
		cfg.Logger = slog.New(slog.DiscardHandler)
	}
	if cfg.StallTimeout == 0 {
		cfg.StallTimeout = time.Hour // a slow machine must not end streams
	}
	cfg.Registerer = s.registry
	s.smg = smg.New(cfg, follower, x)
	server := grpc.NewServer()
	for _, d := range smg.Descriptions() {
		server.RegisterService(d, s.smg)
	}
	ctx, cancel := context.WithCancel(context.Background())
	var running sync.WaitGroup
	running.Go(func() { _ = server.Serve(s.port) })
	running.Go(func() { _ = follower.Run(ctx) })
	s.begin = sync.OnceFunc(func() {
		running.Go(func() {
			if err := s.smg.Run(ctx); err != nil {
				t.Error(err)
			}
		})
	})
	s.stop = sync.OnceFunc(func() {
		cancel()
		server.Stop()
		running.Wait()
		_ = s.journal.Close(context.Background())
	})
	t.Cleanup(s.stop)
	return s
}

// apply appends an entry of a worker.
func (s *service) apply(worker string, events ...*kvcastv1.RouterEvent) {
	s.t.Helper()
	s.applyAt(1_500_000_000, worker, events...)
}

// applyAt appends an entry with a time of the engine, in nanoseconds.
func (s *service) applyAt(at int64, worker string, events ...*kvcastv1.RouterEvent) {
	s.t.Helper()
	body, err := proto.Marshal(&kvcastv1.Entry{Worker: worker, Model: "m", EngineTimeUnixNano: at, Events: events})
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

func added(endpoint string, ranks ...uint32) *kvcastv1.RouterEvent {
	return &kvcastv1.RouterEvent{Event: &kvcastv1.RouterEvent_WorkerAdded{WorkerAdded: &kvcastv1.WorkerAdded{Model: "m", BlockSize: 2, Endpoint: endpoint, Ranks: ranks}}}
}

func removedWorker() *kvcastv1.RouterEvent {
	return &kvcastv1.RouterEvent{Event: &kvcastv1.RouterEvent_WorkerRemoved{WorkerRemoved: &kvcastv1.WorkerRemoved{}}}
}

// chain stores blocks with the hashes from first to last, as the start of a prompt.
func chain(tier kvcastv1.Tier, rank uint32, lora string, first, last uint64) *kvcastv1.RouterEvent {
	c := &kvcastv1.Stored{BlockSize: 2}
	if lora != "" {
		c.LoraName = &lora
	}
	for n := range last - first + 1 {
		hash := first + n
		c.BlockHashes, c.TokenIds = append(c.BlockHashes, hash), append(c.TokenIds, uint32(hash), 7)
	}
	c.TokensHashes = kvblock.AppendTokensHashes(nil, c.GetTokenIds(), 2, kvblock.Seed(lora, ""), false, nil)
	return &kvcastv1.RouterEvent{Tier: tier, DpRank: &rank, Event: &kvcastv1.RouterEvent_Stored{Stored: c}}
}

func removal(tier kvcastv1.Tier, hashes ...uint64) *kvcastv1.RouterEvent {
	return &kvcastv1.RouterEvent{Tier: tier, DpRank: proto.Uint32(0), Event: &kvcastv1.RouterEvent_Removed{Removed: &kvcastv1.Removed{BlockHashes: hashes}}}
}

// stream is a subscription.
type stream struct {
	t      *testing.T
	stream grpc.ClientStream
	cancel context.CancelFunc
}

// subscribe calls SubscribeKvEvents of an authority.
func (s *service) subscribe(authority string, from uint64) *stream {
	s.t.Helper()
	conn, err := grpc.NewClient("passthrough:"+authority, grpc.WithAuthority(authority), grpc.WithTransportCredentials(insecure.NewCredentials()),
		grpc.WithContextDialer(func(ctx context.Context, _ string) (net.Conn, error) { return s.port.DialContext(ctx) }))
	if err != nil {
		s.t.Fatal(err)
	}
	s.t.Cleanup(func() { _ = conn.Close() })
	ctx, cancel := context.WithCancel(s.t.Context())
	s.t.Cleanup(cancel)
	c, err := conn.NewStream(ctx, &grpc.StreamDesc{ServerStreams: true}, "/vllm.grpc.engine.VllmEngine/SubscribeKvEvents")
	request := new(emptypb.Empty)
	if from > 0 {
		request.ProtoReflect().SetUnknown(protowire.AppendVarint(protowire.AppendTag(nil, 1, protowire.VarintType), from))
	}
	if err == nil {
		err = c.SendMsg(request)
	}
	if err == nil {
		err = c.CloseSend()
	}
	if err != nil {
		s.t.Fatal(err)
	}
	return &stream{s.t, c, cancel}
}

// limit cancels the call after harness.Timeout, unless stop is called before.
func (s *stream) limit() (stop func() bool) { return time.AfterFunc(harness.Timeout, s.cancel).Stop }

// receive returns the next message.
func (s *stream) receive() (body []byte, err error) {
	defer s.limit()()
	m := new(emptypb.Empty)
	err = s.stream.RecvMsg(m)
	return m.ProtoReflect().GetUnknown(), err
}

// next returns the next batch.
func (s *stream) next() batch {
	s.t.Helper()
	body, err := s.receive()
	if err != nil {
		s.t.Fatal(err)
	}
	return decode(s.t, body)
}

// code reads until the stream ends, and returns the code.
func (s *stream) code() codes.Code {
	for {
		if _, err := s.receive(); errors.Is(err, io.EOF) {
			return codes.OK
		} else if err != nil {
			return status.Code(err)
		}
	}
}

// batch is a KvEventBatch. Seq is not compared.
type batch struct {
	seq      uint64
	Time     float64
	Rank     uint64
	Snapshot string
	Events   []string
}

// fields calls a function with each field of a message.
func fields(t *testing.T, b []byte, do func(number protowire.Number, n uint64, value []byte)) {
	t.Helper()
	for len(b) > 0 {
		number, kind, n := protowire.ConsumeTag(b)
		if n < 0 {
			t.Fatal(protowire.ParseError(n))
		}
		b = b[n:]
		var v uint64
		var value []byte
		switch kind {
		case protowire.VarintType:
			v, n = protowire.ConsumeVarint(b)
		case protowire.Fixed64Type:
			v, n = protowire.ConsumeFixed64(b)
		default:
			value, n = protowire.ConsumeBytes(b)
		}
		if n < 0 {
			t.Fatal(protowire.ParseError(n))
		}
		b = b[n:]
		do(number, v, value)
	}
}

// flat returns a message of numbers, texts and packed numbers as text.
func flat(t *testing.T, b []byte, packed protowire.Number) string {
	t.Helper()
	var text []byte // written without fmt, which takes most of the time of tests with many blocks
	fields(t, b, func(number protowire.Number, n uint64, value []byte) {
		if len(text) > 0 {
			text = append(text, ' ')
		}
		text = append(strconv.AppendInt(text, int64(number), 10), ':')
		switch {
		case number == packed:
			text = append(text, '[')
			for i := 0; len(value) > 0; i++ {
				v, n := protowire.ConsumeVarint(value)
				if i > 0 {
					text = append(text, ' ')
				}
				text, value = strconv.AppendUint(text, v, 10), value[n:]
			}
			text = append(text, ']')
		case value != nil:
			text = append(text, value...)
		default:
			text = strconv.AppendInt(text, int64(n), 10)
		}
	})
	return string(text)
}

func decode(t *testing.T, b []byte) (out batch) {
	t.Helper()
	fields(t, b, func(number protowire.Number, n uint64, value []byte) {
		switch number {
		case 1:
			out.seq = n
		case 2:
			out.Time = math.Float64frombits(n)
		case 3:
			fields(t, value, func(number protowire.Number, n uint64, value []byte) {
				switch number {
				case 1:
					out.Events = append(out.Events, fmt.Sprintf("id %d", n))
				case 2:
					fields(t, value, func(number protowire.Number, n uint64, value []byte) {
						if number == 1 {
							out.Events = append(out.Events, "block "+flat(t, value, 2))
						} else {
							out.Events = append(out.Events, fmt.Sprintf("stored %d: %d %s", number, int64(n), value))
						}
					})
				case 3:
					out.Events = append(out.Events, "removed "+flat(t, value, 1))
				default:
					out.Events = append(out.Events, "cleared")
				}
			})
		case 4:
			out.Rank = n
		case 7:
			out.Snapshot = flat(t, value, -1)
		default:
			t.Errorf("unexpected field %d", number)
		}
	})
	return out
}

// read reads batches, whose seqs must be contiguous for each rank, and returns them and the seq after those of rank 0.
func (s *stream) read(n int) (all []batch, next uint64) {
	s.t.Helper()
	nexts := make(map[uint64]uint64)
	for range n {
		b := s.next()
		if want, ok := nexts[b.Rank]; b.seq == 0 || ok && b.seq != want {
			s.t.Fatalf("rank %d: got seq %d, want %d", b.Rank, b.seq, want)
		}
		if b.Snapshot != "" {
			b.Time = 0
		}
		nexts[b.Rank], all = b.seq+1, append(all, b)
	}
	return all, nexts[0]
}

func (s *service) want(what string, want, got []batch) {
	s.t.Helper()
	if diff := cmp.Diff(want, got, cmp.FilterPath(func(p cmp.Path) bool { return p.Last().String() == ".seq" }, cmp.Ignore())); diff != "" {
		s.t.Fatalf("%s (-want +got):\n%s", what, diff)
	}
}

// negative is a block hash that is negative as an int64.
const negative = 1<<63 | 3

func TestBatches(t *testing.T) {
	t.Parallel()
	s := start(t, smg.Config{MaxSubscribers: 1000})
	s.begin()
	s.apply("w", added("http://10.0.0.1:8000", 0, 1))
	s.apply("w", chain(1, 0, "", negative, negative), chain(2, 1, "l", 5, 6))
	first := s.joined("10.0.0.1:8000", 8)
	state, next := first.read(8)
	s.want("state", []batch{
		{Snapshot: "1:0 2:8 3:3", Events: []string{"cleared"}},
		{Snapshot: "1:1 2:8 3:3", Events: []string{"cleared"}, Rank: 1},
		{Snapshot: "1:2 2:8 3:3", Events: []string{"block 1:-9223372036854775805 2:[3 7] 3:2 5:0", "stored 3: 1 ", "stored 4: 0 GPU"}},
		{Snapshot: "1:3 2:8 3:3", Rank: 1, Events: []string{"block 1:5 2:[5 7] 3:2 5:1", "block 1:6 2:[6 7] 3:2 5:1", "stored 3: 2 ", "stored 4: 0 CPU", "stored 11: 0 l"}},
		{Snapshot: "1:4 2:8 3:3"},
		{Snapshot: "1:5 2:8 3:3", Rank: 1},
		{Snapshot: "1:6 2:8 3:3"},
		{Snapshot: "1:7 2:8 3:3", Rank: 1},
	}, state)

	more := chain(1, 0, "", 8, 8)
	more.GetStored().ParentHash = proto.Uint64(negative)
	s.apply("w", more)
	s.apply("w", removal(1, 8, 9))
	s.apply("w", &kvcastv1.RouterEvent{DpRank: proto.Uint32(0), Event: &kvcastv1.RouterEvent_Cleared{Cleared: &kvcastv1.Cleared{}}})
	live, end := first.read(3)
	want := []batch{
		{Time: 1.5, Events: []string{"id 5", "block 1:8 2:[8 7] 3:2 5:0", "stored 2: -9223372036854775805 ", "stored 3: 1 ", "stored 4: 0 GPU"}},
		{Time: 1.5, Events: []string{"id 6", "removed 1:[8] 2:0 3:1 4:GPU"}},
		{Time: 1.5, Events: []string{"id 7", "cleared"}},
	}
	if live[0].seq != next {
		t.Errorf("seq %d follows a state that ends before %d", live[0].seq, next)
	}
	s.want("live", want, live)
	again, _ := s.subscribe("10.0.0.1:8000", next).read(3)
	s.want("resumed", want, again)
	again, _ = s.subscribe("10.0.0.1:8000", next+1).read(2)
	s.want("resumed later", want[1:], again)

	behind := s.subscribe("10.0.0.1:8000", end) // has everything
	s.apply("w", removal(1, 9), chain(1, 0, "", 20, 20))
	if got, _ := behind.read(1); got[0].seq != end {
		t.Errorf("got seq %d, want %d", got[0].seq, end)
	}
	for _, from := range []uint64{1, end + 2} {
		if code := s.subscribe("10.0.0.1:8000", from).code(); code != codes.OutOfRange {
			t.Errorf("a subscription from %d ends with %s, want OutOfRange", from, code)
		}
	}
}

// TestResumeByTheNumberOfAnyRank resumes where a batch of one rank was, for all ranks.
func TestResumeByTheNumberOfAnyRank(t *testing.T) {
	t.Parallel()
	s := start(t, smg.Config{MaxSubscribers: 1000})
	s.apply("w", added("", 0, 1))
	s.begin()
	c := s.joined("w", 6)
	c.read(6)
	var all []batch
	for i, rank := range []uint32{0, 1, 0, 1, 1} {
		s.apply("w", chain(1, rank, "", uint64(10*i+10), uint64(10*i+10)))
		got, _ := c.read(1)
		all = append(all, got...)
	}
	for _, tt := range []struct {
		name string
		from uint64
		want []batch
	}{
		{"a number of rank 1", all[1].seq, all[1:]},
		{"a number of rank 0", all[2].seq, all[2:]},
		{"the next number of rank 0", all[2].seq + 1, all[3:]},
	} {
		got, _ := s.subscribe("w", tt.from).read(len(tt.want))
		s.want(tt.name, tt.want, got)
		for i := range got {
			if got[i].seq != tt.want[i].seq {
				t.Errorf("%s: batch %d has seq %d, want %d", tt.name, i, got[i].seq, tt.want[i].seq)
			}
		}
	}
	if code := s.subscribe("w", 2<<52+all[0].seq).code(); code != codes.OutOfRange {
		t.Errorf("a number of a rank without batches: got %s, want OutOfRange", code)
	}
}

// TestOtherTiersAndAddedAgain stores a block in a further tier without token ids, which is not published, and adds the worker again,
// which clears all ranks.
func TestOtherTiersAndAddedAgain(t *testing.T) {
	t.Parallel()
	s := start(t, smg.Config{MaxSubscribers: 1000})
	s.apply("w", added("", 0, 1), chain(1, 0, "", 1, 2), chain(1, 1, "", 1, 1))
	s.begin()
	c := s.joined("w", 8)
	c.read(8)
	s.apply("w", &kvcastv1.RouterEvent{Tier: 2, DpRank: proto.Uint32(0), Event: &kvcastv1.RouterEvent_Stored{Stored: &kvcastv1.Stored{BlockHashes: []uint64{1}}}})
	s.apply("w", removal(1, 2))
	s.apply("w", added("", 0, 1), chain(1, 0, "", 3, 3))
	got, _ := c.read(3)
	s.want("batches", []batch{
		{Time: 1.5, Events: []string{"id 5", "removed 1:[2] 2:0 3:1 4:GPU"}},
		{Time: 1.5, Events: []string{"id 6", "cleared", "id 7", "block 1:3 2:[3 7] 3:2 5:0", "stored 3: 1 ", "stored 4: 0 GPU"}},
		{Time: 1.5, Rank: 1, Events: []string{"id 8", "cleared"}},
	}, got)
}

// TestBlocksThatMoveByHashAlone moves a block to host memory without its token ids. It is then no block of gateways, nor is its child:
// both are counted as omitted, and a gateway that joins later has the same blocks.
func TestBlocksThatMoveByHashAlone(t *testing.T) {
	t.Parallel()
	s := start(t, smg.Config{MaxSubscribers: 1000})
	s.apply("w", added("", 0), chain(1, 0, "", 1, 1))
	s.begin()
	live := s.joined("w", 4)
	live.read(4)
	s.apply("w", &kvcastv1.RouterEvent{Tier: 2, DpRank: proto.Uint32(0), Event: &kvcastv1.RouterEvent_Stored{Stored: &kvcastv1.Stored{BlockHashes: []uint64{1}}}})
	s.apply("w", removal(1, 1))
	child := chain(1, 0, "", 2, 2)
	child.GetStored().ParentHash = proto.Uint64(1)
	s.apply("w", child)
	s.apply("w", chain(1, 0, "", 5, 5))
	got, _ := live.read(2)
	s.want("live", []batch{
		{Time: 1.5, Events: []string{"id 3", "removed 1:[1] 2:0 3:1 4:GPU"}},
		{Time: 1.5, Events: []string{"id 4", "block 1:5 2:[5 7] 3:2 5:0", "stored 3: 1 ", "stored 4: 0 GPU"}},
	}, got)
	late, _ := s.joined("w", 4).read(4)
	if want := got[1].Events[1:]; !slices.Equal(late[1].Events, want) {
		t.Errorf("a late gateway gets %q, want %q", late[1].Events, want)
	}
	s.wantOmitted(1, 0, 1)
}

// TestPartOfAStateIsNotResumed ends the transfer of a state after each of its batches. A subscription from the last batch or the
// one after it continues only if all blocks were received.
func TestPartOfAStateIsNotResumed(t *testing.T) {
	t.Parallel()
	s := start(t, smg.Config{MaxSubscribers: 1000, HistoryBytes: 64 << 20})
	s.apply("w", added("", 0, 1))
	s.begin()
	live := s.joined("w", 6)
	live.read(6)
	const chains = 4
	for i := range uint64(chains) {
		s.apply("w", chain(1, 0, "", 2000*i, 2000*i+1999))
		s.apply("w", chain(1, 1, "", 2000*i, 2000*i+1999))
	}
	live.read(2 * chains)
	state := s.subscribe("w", 0)
	var blocks, refused, resumed int
	for ends := 0; ends < 4; { // batches at the end of the state
		b := state.next()
		blocks += countBlocks(b.Events)
		if len(b.Events) == 0 {
			ends++
		}
		for _, from := range []uint64{b.seq, b.seq + 1} {
			switch code := s.subscribe("w", from).ends(); {
			case code == codes.OutOfRange:
				refused++
			case code == codes.OK && blocks == 2*2000*chains:
				resumed++
			default:
				t.Errorf("a subscription from %d after chunk %q with %d of %d blocks ends with %s", from, b.Snapshot, blocks, 2*2000*chains, code)
			}
		}
	}
	if refused == 0 || resumed != 6 { // for each rank: after the first end by the next number, after the second by both
		t.Errorf("%d subscriptions were refused, and %d continued, want 6", refused, resumed)
	}
}

// ends returns the code of a stream that is refused, and OK if headers come.
func (s *stream) ends() codes.Code {
	defer s.limit()()
	if md, err := s.stream.Header(); err == nil && md != nil {
		return codes.OK
	}
	return s.code()
}

// joined returns a subscription that begins with a number of batches of a state.
func (s *service) joined(authority string, batches int) (c *stream) {
	s.t.Helper()
	harness.WaitFor(s.t, func() bool {
		probe := s.subscribe(authority, 0)
		return probe.ends() == codes.OK && strings.HasPrefix(probe.next().Snapshot, fmt.Sprintf("1:0 2:%d ", batches))
	})
	return s.subscribe(authority, 0)
}

func TestAuthorities(t *testing.T) {
	t.Parallel()
	s := start(t, smg.Config{Workers: map[string]string{"other.example:443": "a"}, MaxSubscribers: 1000})
	if code := s.subscribe("a", 0).ends(); code != codes.Unavailable {
		t.Errorf("before the engines are known, a call ends with %s, want Unavailable", code)
	}
	s.apply("a", added("http://10.0.0.1:8000/path", 0))
	s.apply("b", added("", 0))
	s.begin()
	s.joined("b", 3)
	s.joined("a", 3)
	for authority, want := range map[string]codes.Code{
		"10.0.0.1:8000": codes.OK, "a": codes.OK, "b:50051": codes.OK, "other.example:443": codes.OK,
		"10.0.0.1": codes.NotFound, "c": codes.NotFound, "other.example": codes.NotFound,
	} {
		if code := s.subscribe(authority, 0).ends(); code != want {
			t.Errorf("a call of %s ends with %s, want %s", authority, code, want)
		}
	}
}

// TestCallWithoutAuthority names no worker, also if there is one without an address.
func TestCallWithoutAuthority(t *testing.T) {
	t.Parallel()
	s := start(t, smg.Config{MaxSubscribers: 1000})
	s.apply("w", added("", 0))
	s.begin()
	s.joined("w", 3)
	c, end := s.call("", 0)
	end() // the call of a worker would end with Canceled
	if err := smg.Descriptions()[0].Streams[0].Handler(s.smg, c); status.Code(err) != codes.NotFound {
		t.Errorf("got %v, want NotFound", err)
	}
}

// TestSharedAddressIsLogged has two workers with one address, of which one is added again.
func TestSharedAddressIsLogged(t *testing.T) {
	t.Parallel()
	var log bytes.Buffer
	s := start(t, smg.Config{MaxSubscribers: 1000, Logger: slog.New(slog.NewTextHandler(&log, nil))})
	s.begin()
	for _, name := range []string{"b", "a", "a", "c", "d"} {
		s.apply(name, added(map[string]string{"a": "10.0.0.1:8000", "b": "http://10.0.0.1:8000", "c": "10.0.0.3:8000"}[name], 0))
		s.joined(name, 3)
	}
	s.stop()
	if n := strings.Count(log.String(), "two workers have one address"); n != 1 || !strings.Contains(log.String(), "address=10.0.0.1:8000 worker=a other=b") {
		t.Errorf("logged %d times:\n%s", n, log.String())
	}
}

// TestTimeOfTheEngineIsPositive replaces times that are none.
func TestTimeOfTheEngineIsPositive(t *testing.T) {
	t.Parallel()
	s := start(t, smg.Config{MaxSubscribers: 1000})
	s.apply("w", added("", 0))
	s.begin()
	c := s.joined("w", 3)
	c.read(3)
	for i, at := range []int64{0, -1, math.MinInt64} {
		s.applyAt(at, "w", chain(1, 0, "", uint64(i), uint64(i)))
		if got := c.next(); got.Time < 1e9 {
			t.Errorf("the time %d is published as %v", at, got.Time)
		}
	}
}

// TestShutdownWhileBeginningIsNoError stops a service before it has published the blocks of the index.
func TestShutdownWhileBeginningIsNoError(t *testing.T) {
	t.Parallel()
	var log bytes.Buffer
	x := index.New()
	x.ApplyEntry(&kvcastv1.Entry{Seq: 1, Worker: "w", Model: "m", Events: []*kvcastv1.RouterEvent{added("", 0), chain(1, 0, "", 1, 1)}})
	s := smg.New(smg.Config{HistoryBytes: 1 << 20, Logger: slog.New(slog.NewTextHandler(&log, nil)), Registerer: prometheus.NewRegistry()}, closedJournal{}, x)
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if err := s.Run(ctx); err != nil || log.Len() > 0 {
		t.Errorf("got error %v and log:\n%s", err, log.String())
	}
}

// TestOmittedBlocksAreCounted stores a block without token ids, and one after it.
func TestOmittedBlocksAreCounted(t *testing.T) {
	t.Parallel()
	s := start(t, smg.Config{})
	s.begin()
	bare := chain(kvcastv1.Tier_TIER_DEVICE, 0, "", 1, 2)
	bare.GetStored().TokenIds = nil
	s.apply("w", added("", 0))
	c := s.joined("w", 3)
	s.apply("w", bare)
	s.apply("w", chain(kvcastv1.Tier_TIER_DEVICE, 0, "", 3, 3))
	c.read(4) // both were published before
	s.wantOmitted(1, 0, 1)
}

// wantOmitted compares the counters of omitted blocks.
func (s *service) wantOmitted(noTokenIDs, otherContent, parent int) {
	s.t.Helper()
	want := fmt.Sprintf(`
# HELP kvcast_egress_smg_blocks_omitted_total Stored blocks that were not published, by reason.
# TYPE kvcast_egress_smg_blocks_omitted_total counter
kvcast_egress_smg_blocks_omitted_total{reason="no_token_ids"} %d
kvcast_egress_smg_blocks_omitted_total{reason="other_content"} %d
kvcast_egress_smg_blocks_omitted_total{reason="parent"} %d
`, noTokenIDs, otherContent, parent)
	if err := testutil.GatherAndCompare(s.registry, strings.NewReader(want), "kvcast_egress_smg_blocks_omitted_total"); err != nil {
		s.t.Error(err)
	}
}

// TestRemovedWorker removes a worker, which ends its streams, and adds it again with larger seqs.
func TestRemovedWorker(t *testing.T) {
	t.Parallel()
	s := start(t, smg.Config{MaxSubscribers: 1000})
	s.apply("w", added("", 0), chain(1, 0, "", 1, 1))
	s.begin()
	c := s.joined("w", 4)
	_, next := c.read(4)
	s.apply("w", removedWorker())
	if got, _ := c.read(1); got[0].seq != next || !slices.Equal(got[0].Events, []string{"id 3", "cleared"}) {
		t.Errorf("got %+v, want batch %d with a clear", got[0], next)
	}
	if code := c.code(); code != codes.Unavailable {
		t.Errorf("the stream of a removed worker ends with %s, want Unavailable", code)
	}
	if code := s.subscribe("w", 0).ends(); code != codes.NotFound {
		t.Errorf("a subscription to a removed worker ends with %s, want NotFound", code)
	}
	s.apply("w", added("", 0))
	s.joined("w", 3)
	if code := s.subscribe("w", next+1).code(); code != codes.OutOfRange {
		t.Errorf("a subscription from a batch of the removed worker ends with %s, want OutOfRange", code)
	}
}

// TestStatesOfOthersUseTheMemory has a subscriber that does not read its state while another one subscribes.
func TestStatesOfOthersUseTheMemory(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := start(t, smg.Config{StateBytes: 20_000})
		defer s.stop()
		s.apply("w", added("", 0), chain(1, 0, "", 1, 900))
		s.begin()
		synctest.Wait()
		subscribe := smg.Descriptions()[0].Streams[0].Handler
		slow, end := s.call("w", time.Second)
		go func() { _ = subscribe(s.smg, slow) }()
		synctest.Wait()
		c, endOther := s.call("w", 0)
		defer endOther()
		if err := subscribe(s.smg, c); status.Code(err) != codes.ResourceExhausted || !strings.Contains(err.Error(), "other subscribers") {
			t.Errorf("got %v, want ResourceExhausted because of others", err)
		}
		end()
	})
}

// slowStream is the server's side of a call whose client reads a message in some time.
type slowStream struct {
	grpc.ServerStream
	ctx      context.Context
	each     time.Duration
	messages [][]byte // that the client has read
}

// call returns the server's side of a call. End ends it, as gRPC does when the handler has returned.
func (s *service) call(authority string, each time.Duration) (c *slowStream, end func()) {
	ctx, end := context.WithCancel(metadata.NewIncomingContext(s.t.Context(), metadata.Pairs(":authority", authority)))
	return &slowStream{ctx: ctx, each: each}, end
}

func (s *slowStream) Context() context.Context       { return s.ctx }
func (s *slowStream) RecvMsg(any) error              { return nil }
func (s *slowStream) SendHeader(_ metadata.MD) error { return nil }

func (s *slowStream) SendMsg(m any) error {
	select {
	case <-time.After(s.each):
		s.messages = append(s.messages, m.(*emptypb.Empty).ProtoReflect().GetUnknown())
		return nil
	case <-s.ctx.Done():
		return s.ctx.Err()
	}
}

// TestWorkerAddedAgainInTheSameMillisecond compares the sequence numbers of a worker with those that it had before it was removed.
func TestWorkerAddedAgainInTheSameMillisecond(t *testing.T) {
	synctest.Test(t, func(t *testing.T) { // whose clock stands still
		s := start(t, smg.Config{})
		defer s.stop()
		s.begin()
		last := func() map[uint64]uint64 { // the number of each rank's last batch
			s.apply("w", added("", 0, 1), chain(1, 1, "", 1, 1))
			s.apply("w", chain(1, 1, "", 5, 5))
			synctest.Wait()
			c, end := s.call("w", 0)
			go func() { _ = smg.Descriptions()[0].Streams[0].Handler(s.smg, c) }()
			synctest.Wait()
			end()
			all := make(map[uint64]uint64)
			for _, m := range c.messages {
				b := decode(t, m)
				all[b.Rank] = b.seq
			}
			return all
		}
		before := last()
		s.apply("w", removedWorker())
		after := last()
		for rank, seq := range before {
			if min := seq + 2; after[rank] < min { // the removal is a batch
				t.Errorf("rank %d has number %d again, want at least %d", rank, after[rank], min)
			}
		}
		if len(before) != 2 {
			t.Errorf("got %d ranks", len(before))
		}
	})
}

// TestSlowSubscriber has a subscriber that does not read while many batches are published. Another gets all of them.
func TestSlowSubscriber(t *testing.T) {
	t.Parallel()
	s := start(t, smg.Config{MaxSubscribers: 2})
	s.apply("w", added("", 0))
	s.begin()
	var slow *stream
	harness.WaitFor(t, func() bool { slow = s.subscribe("w", 0); return slow.ends() == codes.OK && slow.next().Snapshot != "" })
	fast := s.subscribe("w", 0)
	_, next := fast.read(3)
	harness.WaitFor(t, func() bool { return s.subscribe("w", 0).ends() == codes.ResourceExhausted })
	const batches = 100
	for i := range uint64(batches) { // 2 MB, more than the history and the windows
		s.apply("w", chain(1, 0, "", 1000*i, 1000*i+999))
		if got, n := fast.read(1); got[0].seq != next {
			t.Fatalf("got seq %d, want %d", got[0].seq, next)
		} else {
			next = n
		}
	}
	if code := slow.code(); code != codes.OutOfRange {
		t.Errorf("the slow subscriber's stream ends with %s, want OutOfRange", code)
	}
	var all []batch
	harness.WaitFor(t, func() bool {
		again := s.subscribe("w", 0)
		if again.ends() != codes.OK {
			return false // the slow one's slot is in use
		}
		for ends := 0; ends < 2; { // batches at the end of the state
			b, _ := again.read(1)
			if all = append(all, b[0]); len(b[0].Events) == 0 {
				ends++
			}
		}
		return true
	})
	if want := fmt.Sprintf("1:%d 2:%d 3:%d", len(all)-1, len(all), 1000*batches); all[len(all)-1].Snapshot != want || all[len(all)-1].seq != next-1 {
		t.Errorf("the state ends with chunk %q and seq %d, want %q and %d", all[len(all)-1].Snapshot, all[len(all)-1].seq, want, next-1)
	}
}

// historyBytes returns the metric.
func (s *service) historyBytes() int {
	s.t.Helper()
	all, err := s.registry.Gather()
	if err != nil {
		s.t.Fatal(err)
	}
	for _, m := range all {
		if m.GetName() == "kvcast_egress_smg_history_bytes" {
			return int(m.GetMetric()[0].GetGauge().GetValue())
		}
	}
	s.t.Fatal("no metric")
	return 0
}

// TestHistoryIsBounded fills the history of one worker, and then adds others, of which each gets a share.
func TestHistoryIsBounded(t *testing.T) {
	t.Parallel()
	const limit = 2 << 20
	s := start(t, smg.Config{MaxSubscribers: 1000, HistoryBytes: limit})
	s.begin()
	for _, name := range []string{"a", "b"} {
		s.apply(name, added("", 0))
		c := s.joined(name, 3)
		c.read(3)
		for i := range uint64(60) { // 3 MB
			s.apply(name, chain(1, 0, "", 3000*i, 3000*i+2999))
			if _, err := c.receive(); err != nil {
				t.Fatal(err)
			}
		}
		if n := s.historyBytes(); n > limit || n < limit*8/10 {
			t.Errorf("with worker %s, the history has %d bytes, and the limit is %d", name, n, limit)
		}
	}
}

// TestHistoryCountsSmallBatches counts the memory of batches beyond their encoding.
func TestHistoryCountsSmallBatches(t *testing.T) {
	t.Parallel()
	s := start(t, smg.Config{MaxSubscribers: 1000})
	s.begin()
	s.apply("w", added("", 0))
	c := s.joined("w", 3)
	c.read(3)
	const batches = 100
	want := 0
	for i := range uint64(batches) {
		s.apply("w", chain(1, 0, "", i, i))
		body, err := c.receive()
		if err != nil {
			t.Fatal(err)
		}
		want += 64 + len(body)
	}
	if got := s.historyBytes(); got < want {
		t.Errorf("%d batches take %d bytes, want at least %d", batches, got, want)
	}
}

// TestResumeAfterEviction resumes from each of many batches of two ranks, of which the first ones are not kept any more.
func TestResumeAfterEviction(t *testing.T) {
	t.Parallel()
	s := start(t, smg.Config{MaxSubscribers: 1000})
	s.begin()
	s.apply("w", added("", 0, 1))
	c := s.joined("w", 6)
	c.read(6)
	var all []batch
	for i := range uint64(26) { // 1.3 MB
		s.apply("w", chain(1, uint32(i%3/2), "", 3000*i, 3000*i+2999))
		got, _ := c.read(1)
		all = append(all, got...)
	}
	kept := 0
	for i := range all {
		again := s.subscribe("w", all[i].seq)
		if code := again.ends(); code != codes.OK {
			if code != codes.OutOfRange || kept > 0 {
				t.Fatalf("a subscription from batch %d ends with %s", i, code)
			}
			continue
		}
		kept++
		if got := again.next(); got.seq != all[i].seq {
			t.Errorf("a subscription from batch %d begins with %d, want %d", i, got.seq, all[i].seq)
		}
	}
	if kept == 0 || kept == len(all) {
		t.Errorf("%d batches are kept", kept)
	}
}

func countBlocks(events []string) (n int) {
	for _, e := range events {
		if strings.HasPrefix(e, "block ") {
			n++
		}
	}
	return n
}

// TestStateBeyondTheMemory refuses a subscriber whose state does not fit, and another one gets a smaller state.
func TestStateBeyondTheMemory(t *testing.T) {
	t.Parallel()
	s := start(t, smg.Config{StateBytes: 20_000, MaxSubscribers: 1000})
	s.apply("w", added("", 0), chain(1, 0, "", 1, 3000))
	s.apply("v", added("", 0), chain(1, 0, "", 1, 10))
	s.begin()
	var c *stream
	harness.WaitFor(t, func() bool { c = s.subscribe("w", 0); return c.ends() == codes.OK })
	if _, err := c.receive(); status.Code(err) != codes.ResourceExhausted || !strings.Contains(err.Error(), "worker w alone") {
		t.Errorf("the stream ends with %v, want ResourceExhausted because of worker w alone", err)
	}
	s.joined("v", 4)
	for range 100 { // memory is released
		if got, _ := s.subscribe("v", 0).read(2); countBlocks(got[1].Events) != 10 {
			t.Errorf("got %+v, want 10 blocks", got)
		}
	}
}

// TestSubscriberThatReadsNothingIsEnded has subscribers that read a state of about 300 KiB too slowly, or not at all.
func TestSubscriberThatReadsNothingIsEnded(t *testing.T) {
	const stall = 10 * time.Second
	for _, tt := range []struct {
		name        string
		each        time.Duration // to read a message
		stop        bool
		want        codes.Code
		least, most time.Duration
		read        int
	}{
		{"reads nothing", time.Hour, false, codes.ResourceExhausted, stall, stall, 0},
		{"reads a little", stall / 2, false, codes.ResourceExhausted, stall, stall * 3 / 2, 2},
		{"reads nothing at a shutdown", time.Hour, true, codes.Unavailable, 0, 0, 0},
	} {
		t.Run(tt.name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				s := start(t, smg.Config{StallTimeout: stall})
				defer s.stop() // within the bubble
				s.apply("w", added("", 0))
				for i := range uint64(20) {
					s.apply("w", chain(1, 0, "", 1000*i, 1000*i+999))
				}
				s.begin()
				synctest.Wait()
				c, end := s.call("w", tt.each)
				if tt.stop {
					go func() { synctest.Wait(); s.smg.Stop() }()
				}
				begin := time.Now()
				err := smg.Descriptions()[0].Streams[0].Handler(s.smg, c)
				if took := time.Since(begin); status.Code(err) != tt.want || took < tt.least || took > tt.most || len(c.messages) != tt.read {
					t.Errorf("got %v after %v and %d messages, want %s", err, took, len(c.messages), tt.want)
				}
				end()
				want := `
# HELP kvcast_budget_used Amount of a bounded resource in use, by resource. Resources whose name ends in bytes are in bytes.
# TYPE kvcast_budget_used gauge
kvcast_budget_used{resource="egress_smg_state_bytes"} 0
`
				if err := testutil.GatherAndCompare(s.registry, strings.NewReader(want), "kvcast_budget_used"); err != nil {
					t.Error(err)
				}
			})
		})
	}
}

// closedJournal is a journal that was closed.
type closedJournal struct{}

func (closedJournal) Bounds() journal.Bounds { return journal.Bounds{} }
func (closedJournal) Read(context.Context, journal.Query) (journal.Chunk, error) {
	return journal.Chunk{}, journal.ErrClosed
}
func (closedJournal) Changed() <-chan struct{} { return nil }

func TestRunEndsWithTheJournal(t *testing.T) {
	t.Parallel()
	s := smg.New(smg.Config{Logger: slog.New(slog.DiscardHandler), Registerer: prometheus.NewRegistry()}, closedJournal{}, index.New())
	if err := s.Run(t.Context()); err != nil {
		t.Error(err)
	}
}

func TestStop(t *testing.T) {
	t.Parallel()
	s := start(t, smg.Config{})
	s.apply("w", added("", 0))
	s.begin()
	var c *stream
	harness.WaitFor(t, func() bool { c = s.subscribe("w", 0); return c.ends() == codes.OK })
	s.smg.Stop()
	if code := c.code(); code != codes.Unavailable {
		t.Errorf("the stream ends with %s, want Unavailable", code)
	}
}
