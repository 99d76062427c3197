package match_test

import (
	"fmt"
	"testing"

	"google.golang.org/grpc"
	"google.golang.org/grpc/mem"
	"google.golang.org/protobuf/proto"

	"github.com/kvcast/kvcast/client"
	"github.com/kvcast/kvcast/feed"
	"github.com/kvcast/kvcast/ingest/wire"
	kvcastv1 "github.com/kvcast/kvcast/proto/kvcast/v1"
	"github.com/kvcast/kvcast/test/harness"
)

// rawCodec sends encoded messages and discards the answers, so that the client of a benchmark costs little.
type rawCodec struct{}

func (rawCodec) Marshal(v any) (mem.BufferSlice, error) {
	return mem.BufferSlice{mem.SliceBuffer(v.([]byte))}, nil
}

func (rawCodec) Unmarshal(mem.BufferSlice, any) error { return nil }

func (rawCodec) Name() string { return "proto" }

// BenchmarkMatchPrefixes sends prompts of 32 blocks of 16 tokens over one stream. 64 workers hold prefixes of different
// lengths. The client is in the same process, and has up to 64 requests in flight.
func BenchmarkMatchPrefixes(b *testing.B) {
	h := harness.StartInstance(b, harness.InstanceConfig{})
	conn := h.Dial(b)
	const blocks, size, workers = 32, 16, 64
	tokens := make([]uint32, blocks*size)
	for i := range tokens {
		tokens[i] = uint32(i * 211 % 150_000)
	}
	hashes := client.TokensHashes(tokens, size, "", "")
	for w := range workers {
		name, n := fmt.Sprintf("vllm-%d", w), max(1, blocks*(w+1)/workers)
		h.AddWorker(feed.Worker{Name: name, Model: "m", Endpoint: fmt.Sprintf("10.0.0.%d:8000", w), BlockSize: size})
		h.Batch(name, wire.Event{Kind: wire.KindStored, Tier: wire.TierDevice, BlockHashes: hashes[:n], TokensHashes: hashes[:n], BlockSize: size})
	}
	for _, prompts := range []int{1, 8} {
		for _, limit := range []uint32{0, 4} {
			b.Run(fmt.Sprintf("prompts=%d/limit=%d", prompts, limit), func(b *testing.B) {
				req := &kvcastv1.MatchPrefixRequest{Model: "m", Limit: limit}
				for range prompts {
					req.Prompts = append(req.Prompts, &kvcastv1.Prompt{TokenIds: tokens})
				}
				encoded, err := proto.Marshal(&kvcastv1.MatchPrefixesRequest{Id: 1, Request: req})
				if err != nil {
					b.Fatal(err)
				}
				stream, err := conn.NewStream(b.Context(), &grpc.StreamDesc{ServerStreams: true, ClientStreams: true},
					kvcastv1.RouterEventService_MatchPrefixes_FullMethodName, grpc.ForceCodecV2(rawCodec{}))
				if err != nil {
					b.Fatal(err)
				}
				b.ReportAllocs()
				b.ResetTimer()
				inFlight, received := make(chan struct{}, 64), make(chan error, 1)
				go func() {
					var err error
					for n := 0; n < b.N && err == nil; n++ {
						err = stream.RecvMsg(nil)
						<-inFlight
					}
					received <- err
				}()
				for range b.N {
					inFlight <- struct{}{}
					if err := stream.SendMsg(encoded); err != nil {
						b.Fatal(err)
					}
				}
				if err := <-received; err != nil {
					b.Fatal(err)
				}
				b.ReportMetric(float64(prompts*b.N)/b.Elapsed().Seconds(), "prompts/s")
			})
		}
	}
}
