package sglang_test

import (
	"bytes"
	"context"
	"fmt"
	"log/slog"
	"math"
	"net"
	"strings"
	"sync"
	"testing"

	"github.com/google/go-cmp/cmp"
	"go.uber.org/goleak"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/status"
	"google.golang.org/grpc/test/bufconn"
	"google.golang.org/protobuf/encoding/protowire"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/reflect/protodesc"
	"google.golang.org/protobuf/reflect/protoreflect"
	"google.golang.org/protobuf/types/descriptorpb"
	"google.golang.org/protobuf/types/dynamicpb"
	"google.golang.org/protobuf/types/known/emptypb"
	"pgregory.net/rapid"

	"github.com/kvcast/kvcast/internal/adapter/sglang"
	"github.com/kvcast/kvcast/internal/core/index"
	kvindexerv1 "github.com/kvcast/kvcast/internal/peer/kv_indexer/v1"
	kvcastv1 "github.com/kvcast/kvcast/proto/kvcast/v1"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

const method = "/kv_indexer.v1.KVIndexer/MatchExternalKvPrefix"

// messages are the request and the response, as routers have them.
func messages(t *testing.T, packed bool) (request, response protoreflect.MessageDescriptor) {
	t.Helper()
	const (
		text     = descriptorpb.FieldDescriptorProto_TYPE_STRING
		number   = descriptorpb.FieldDescriptorProto_TYPE_UINT32
		hash     = descriptorpb.FieldDescriptorProto_TYPE_SFIXED64
		message  = descriptorpb.FieldDescriptorProto_TYPE_MESSAGE
		optional = descriptorpb.FieldDescriptorProto_LABEL_OPTIONAL
		repeated = descriptorpb.FieldDescriptorProto_LABEL_REPEATED
	)
	field := func(n int32, name string, kind descriptorpb.FieldDescriptorProto_Type, label descriptorpb.FieldDescriptorProto_Label) *descriptorpb.FieldDescriptorProto {
		return &descriptorpb.FieldDescriptorProto{Number: &n, Name: &name, Type: kind.Enum(), Label: label.Enum()}
	}
	hashes := field(1, "hashes", hash, repeated)
	hashes.Options = &descriptorpb.FieldOptions{Packed: &packed}
	matches := field(1, "matches", message, repeated)
	matches.TypeName = proto.String(".t.Match")
	file, err := protodesc.NewFile(&descriptorpb.FileDescriptorProto{
		Name: proto.String("t.proto"), Package: proto.String("t"), Syntax: proto.String("proto3"),
		MessageType: []*descriptorpb.DescriptorProto{
			{Name: proto.String("Request"), Field: []*descriptorpb.FieldDescriptorProto{hashes, field(2, "max_blocks", number, optional)}},
			{Name: proto.String("Match"), Field: []*descriptorpb.FieldDescriptorProto{
				field(1, "worker_address", text, optional), field(2, "matched_prefix_blocks", number, optional), field(3, "worker_id", text, optional),
			}},
			{Name: proto.String("Response"), Field: []*descriptorpb.FieldDescriptorProto{
				matches, field(2, "best_prefix_blocks", number, optional), field(3, "blocks_read", number, optional),
			}},
		},
	}, nil)
	if err != nil {
		t.Fatal(err)
	}
	return file.Messages().ByName("Request"), file.Messages().ByName("Response")
}

// match is an element of a response.
type match struct {
	Address string
	Blocks  uint64
	Worker  string
}

type answer struct {
	Matches    []match
	Best, Read uint64
}

// router calls a service as SGLang's routers do.
type router struct {
	t                 *testing.T
	conn              *grpc.ClientConn
	request, response protoreflect.MessageDescriptor
}

// serve serves a service at a gRPC port in memory.
func serve(t *testing.T, cfg sglang.Config, x *index.Index, packed bool) *router {
	t.Helper()
	if cfg.Ready == nil {
		cfg.Ready = func() string { return "" }
	}
	if cfg.Acquire == nil {
		cfg.Acquire = func(context.Context, int64) (func(), error) { return func() {}, nil }
	}
	if cfg.Logger == nil {
		cfg.Logger = slog.New(slog.DiscardHandler)
	}
	port := bufconn.Listen(1 << 16)
	server := grpc.NewServer()
	kvindexerv1.RegisterKVIndexerServer(server, sglang.New(cfg, x))
	var serving sync.WaitGroup
	serving.Go(func() { _ = server.Serve(port) })
	conn, err := grpc.NewClient("passthrough:kvcast", grpc.WithTransportCredentials(insecure.NewCredentials()),
		grpc.WithContextDialer(func(ctx context.Context, _ string) (net.Conn, error) { return port.DialContext(ctx) }))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		_ = conn.Close()
		server.Stop()
		serving.Wait()
	})
	r := &router{t: t, conn: conn}
	r.request, r.response = messages(t, packed)
	return r
}

// call matches hashes.
func (r *router) call(maxBlocks uint32, hashes ...int64) answer {
	request, response := dynamicpb.NewMessage(r.request), dynamicpb.NewMessage(r.response)
	list := request.Mutable(r.request.Fields().ByName("hashes")).List()
	for _, h := range hashes {
		list.Append(protoreflect.ValueOfInt64(h))
	}
	request.Set(r.request.Fields().ByName("max_blocks"), protoreflect.ValueOfUint32(maxBlocks))
	if err := r.conn.Invoke(r.t.Context(), method, request, response); err != nil {
		r.t.Fatal(err)
	}
	number := func(name protoreflect.Name) uint64 { return response.Get(r.response.Fields().ByName(name)).Uint() }
	a := answer{Best: number("best_prefix_blocks"), Read: number("blocks_read")}
	matches := response.Get(r.response.Fields().ByName("matches")).List()
	for i := range matches.Len() {
		m := matches.Get(i).Message()
		fields := m.Descriptor().Fields()
		a.Matches = append(a.Matches, match{
			m.Get(fields.ByName("worker_address")).String(), m.Get(fields.ByName("matched_prefix_blocks")).Uint(), m.Get(fields.ByName("worker_id")).String(),
		})
	}
	return a
}

// world is an index with workers.
type world struct {
	*index.Index
	seq uint64
}

func (w *world) apply(worker string, events ...*kvcastv1.RouterEvent) {
	w.seq++
	w.ApplyEntry(&kvcastv1.Entry{Seq: w.seq, Worker: worker, Model: "m", Events: events})
}

func (w *world) add(worker, endpoint string) {
	w.apply(worker, &kvcastv1.RouterEvent{Event: &kvcastv1.RouterEvent_WorkerAdded{WorkerAdded: &kvcastv1.WorkerAdded{
		Model: "m", BlockSize: 2, Ranks: []uint32{0, 1}, Endpoint: endpoint,
	}}})
}

// store stores a chain of blocks.
func (w *world) store(worker string, rank uint32, hashes ...int64) {
	s := &kvcastv1.Stored{BlockSize: 2}
	for _, h := range hashes {
		s.BlockHashes, s.TokensHashes = append(s.BlockHashes, uint64(h)), append(s.TokensHashes, uint64(h)+1)
	}
	w.apply(worker, &kvcastv1.RouterEvent{DpRank: &rank, Tier: kvcastv1.Tier_TIER_DEVICE, Event: &kvcastv1.RouterEvent_Stored{Stored: s}})
}

func (w *world) remove(worker string, rank uint32, hash int64) {
	w.apply(worker, &kvcastv1.RouterEvent{DpRank: &rank, Tier: kvcastv1.Tier_TIER_DEVICE, Event: &kvcastv1.RouterEvent_Removed{Removed: &kvcastv1.Removed{BlockHashes: []uint64{uint64(hash)}}}})
}

const pattern = "http://{endpoint}"

func TestMatch(t *testing.T) {
	t.Parallel()
	w := &world{Index: index.New()}
	w.add("a", "10.0.0.1:30000")
	w.store("a", 0, -1, -2, -3)
	w.add("b", "https://b:30000")
	w.store("b", 0, -1, -2)
	w.store("b", 1, -1, -2, -3, math.MaxInt64)
	w.add("c", "")
	w.store("c", 0, -1)
	w.add("d", "10.0.0.4:30000") // configured
	w.store("d", 0, -1, -2)
	w.remove("d", 0, -1)
	w.store("d", 1, -1)
	w.add("e", "10.0.0.5:30000")
	w.store("e", 0, 5)
	var log bytes.Buffer
	cfg := sglang.Config{Address: pattern, Addresses: map[string]string{"d": "grpc://d"}, Logger: slog.New(slog.NewTextHandler(&log, nil))}
	a, b, d := match{"http://10.0.0.1:30000", 3, "a"}, match{"https://b:30000", 4, "b"}, match{"grpc://d", 1, "d"}
	for _, packed := range []bool{true, false} {
		r := serve(t, cfg, w.Index, packed)
		for _, tt := range []struct {
			name   string
			max    uint32
			hashes []int64
			want   answer
		}{
			{"the longest of a worker's ranks, best first", 0, []int64{-1, -2, -3, math.MaxInt64}, answer{[]match{b, a, d}, 4, 4}},
			{"at most max_blocks", 2, []int64{-1, -2, -3, math.MaxInt64}, answer{[]match{{a.Address, 2, "a"}, {b.Address, 2, "b"}, d}, 2, 2}},
			{"max_blocks above the length", math.MaxUint32, []int64{5, 6}, answer{[]match{{"http://10.0.0.5:30000", 1, "e"}}, 1, 2}},
			{"an unknown first block", 0, []int64{7, -1}, answer{nil, 0, 2}},
			{"no hash", 0, nil, answer{}},
		} {
			if diff := cmp.Diff(tt.want, r.call(tt.max, tt.hashes...)); diff != "" {
				t.Errorf("packed %t: %s (-want +got):\n%s", packed, tt.name, diff)
			}
		}
	}
	if got := strings.Count(log.String(), "worker=c"); got != 2 { // once for each service
		t.Errorf("worker c without an address was logged %d times:\n%s", got, log.String())
	}
}

func TestAddresses(t *testing.T) {
	t.Parallel()
	w := &world{Index: index.New()}
	w.add("a", "https://a:1")
	w.store("a", 0, 1)
	for pattern, want := range map[string]string{
		"http://{endpoint}": "https://a:1", "{endpoint}/v1": "https://a:1/v1", "http://{worker}.svc:30000": "http://a.svc:30000", "": "",
	} {
		r := serve(t, sglang.Config{Address: pattern}, w.Index, true)
		var got string
		for _, m := range r.call(0, 1).Matches {
			got = m.Address
		}
		if got != want {
			t.Errorf("pattern %q: got %q, want %q", pattern, got, want)
		}
	}
}

// TestMatchEqualsPlainLookups compares matches of random chains with lookups of each block.
func TestMatchEqualsPlainLookups(t *testing.T) {
	t.Parallel()
	rapid.Check(t, func(rt *rapid.T) {
		w := &world{Index: index.New()}
		held := make(map[string]map[int64]bool)
		workers := rapid.IntRange(1, 4).Draw(rt, "workers")
		for n := range workers {
			name := fmt.Sprint("w", n)
			held[name] = make(map[int64]bool)
			w.add(name, name)
			for i := range rapid.IntRange(0, 6).Draw(rt, "blocks") {
				w.store(name, 0, chainTo(int64(i))...)
				held[name][int64(i)] = true
			}
			for range rapid.IntRange(0, 2).Draw(rt, "removes") {
				hash := rapid.Int64Range(0, 6).Draw(rt, "removed")
				w.remove(name, 0, hash)
				delete(held[name], hash)
			}
		}
		got := make(map[string]uint64)
		for _, m := range serve(t, sglang.Config{Address: "{endpoint}"}, w.Index, true).call(0, chainTo(6)...).Matches {
			got[m.Worker] = m.Blocks
		}
		for name, blocks := range held {
			var want uint64
			for blocks[int64(want)] {
				want++
			}
			if got[name] != want {
				rt.Fatalf("%s: got %d blocks, want %d of %v", name, got[name], want, blocks)
			}
		}
	})
}

func chainTo(last int64) (hashes []int64) {
	for h := range last + 1 {
		hashes = append(hashes, h)
	}
	return hashes
}

func TestBadRequests(t *testing.T) {
	t.Parallel()
	r := serve(t, sglang.Config{Address: pattern}, index.New(), true)
	for name, body := range map[string][]byte{
		"a hash as text":         protowire.AppendString(protowire.AppendTag(nil, 1, protowire.BytesType), "-123"),
		"a hash as varint":       protowire.AppendVarint(protowire.AppendTag(nil, 1, protowire.VarintType), 1),
		"max_blocks as text":     protowire.AppendString(protowire.AppendTag(nil, 2, protowire.BytesType), "1"),
		"a wrong type elsewhere": protowire.AppendTag(nil, 9, protowire.EndGroupType),
	} {
		request := new(emptypb.Empty)
		request.ProtoReflect().SetUnknown(body)
		err := r.conn.Invoke(t.Context(), method, request, new(emptypb.Empty))
		if code := status.Code(err); code != codes.InvalidArgument && code != codes.Internal { // gRPC refuses what is no message
			t.Errorf("%s: got %v", name, err)
		}
	}
	if err := r.conn.Invoke(t.Context(), "/kv_indexer.v1.KVIndexer/ApplyExternalKvBatch", new(emptypb.Empty), new(emptypb.Empty)); status.Code(err) != codes.Unimplemented {
		t.Errorf("a method that changes an indexer: got %v", err)
	}
}

func TestNotReady(t *testing.T) {
	t.Parallel()
	r := serve(t, sglang.Config{Address: pattern, Ready: func() string { return "recovering" }}, index.New(), true)
	err := r.conn.Invoke(t.Context(), method, new(emptypb.Empty), new(emptypb.Empty))
	if status.Code(err) != codes.Unavailable || !strings.Contains(err.Error(), "recovering") {
		t.Errorf("got %v", err)
	}
}

// request returns a request with a number of hashes.
func request(hashes int, maxBlocks uint64) *emptypb.Empty {
	packed := make([]byte, 8*hashes)
	b := protowire.AppendBytes(protowire.AppendTag(nil, 1, protowire.BytesType), packed)
	b = protowire.AppendVarint(protowire.AppendTag(b, 2, protowire.VarintType), maxBlocks)
	m := new(emptypb.Empty)
	m.ProtoReflect().SetUnknown(b)
	return m
}

func TestBlocksOfARequestAreLimited(t *testing.T) {
	t.Parallel()
	r := serve(t, sglang.Config{Address: pattern}, index.New(), true)
	for _, tt := range []struct {
		hashes    int
		maxBlocks uint64
		want      codes.Code
	}{
		{1 << 16, 0, codes.OK}, {1<<16 + 1, 0, codes.InvalidArgument}, {1<<16 + 1, 1 << 16, codes.OK}, {1<<16 + 1, 1 << 20, codes.InvalidArgument},
	} {
		if err := r.conn.Invoke(t.Context(), method, request(tt.hashes, tt.maxBlocks), new(emptypb.Empty)); status.Code(err) != tt.want {
			t.Errorf("%d hashes with max_blocks %d: got %v, want %s", tt.hashes, tt.maxBlocks, err, tt.want)
		}
	}
}

// TestRequestsAreAdmitted has a limit that admits a request with its memory, and refuses another.
func TestRequestsAreAdmitted(t *testing.T) {
	t.Parallel()
	admitted := 0
	r := serve(t, sglang.Config{Address: pattern, Acquire: func(_ context.Context, bytes int64) (func(), error) {
		if bytes < 2*8000 || admitted > 0 {
			return nil, status.Error(codes.ResourceExhausted, "too many")
		}
		admitted++
		return func() { admitted-- }, nil
	}}, index.New(), true)
	for range 2 { // the first one is released
		if err := r.conn.Invoke(t.Context(), method, request(1000, 0), new(emptypb.Empty)); err != nil {
			t.Error(err)
		}
	}
	admitted++
	if err := r.conn.Invoke(t.Context(), method, request(1000, 0), new(emptypb.Empty)); status.Code(err) != codes.ResourceExhausted {
		t.Errorf("got %v, want ResourceExhausted", err)
	}
}
