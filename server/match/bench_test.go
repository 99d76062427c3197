package match_test

import (
	"fmt"
	"testing"

	"google.golang.org/grpc"
	"google.golang.org/grpc/encoding"
	"google.golang.org/grpc/mem"
	"google.golang.org/protobuf/proto"

	"github.com/kvcast/kvcast/client"
	"github.com/kvcast/kvcast/feed"
	"github.com/kvcast/kvcast/ingest/wire"
	kvcastv1 "github.com/kvcast/kvcast/proto/kvcast/v1"
	"github.com/kvcast/kvcast/test/harness"
)

// rawCodec passes encoded messages, so that the client of a benchmark costs little.
type rawCodec struct{}

func (rawCodec) Marshal(v any) (mem.BufferSlice, error) {
	return mem.BufferSlice{mem.SliceBuffer(v.([]byte))}, nil
}

func (rawCodec) Unmarshal(b mem.BufferSlice, v any) error {
	*v.(*int) = b.Len()
	return nil
}

func (rawCodec) Name() string { return "proto" }

var _ encoding.CodecV2 = rawCodec{}

// BenchmarkMatchPrefixes matches prompts of 32 blocks of 16 tokens over 64 ranks, which hold prefixes of different
// lengths. The client is in the same process.
func BenchmarkMatchPrefixes(b *testing.B) {
	h := harness.StartInstance(b, harness.InstanceConfig{})
	conn := h.Dial(b)
	const blocks, size = 32, 16
	tokens := make([]uint32, blocks*size)
	for i := range tokens {
		tokens[i] = uint32(i * 211 % 150_000)
	}
	hashes := client.TokensHashes(tokens, size, "", "")
	for w := range 64 {
		lane := h.Pipeline.AddWorker(feed.Worker{Name: fmt.Sprintf("vllm-%d", w), Model: "m", Endpoint: fmt.Sprintf("10.0.0.%d:8000", w), BlockSize: size})
		n := blocks * (w + 1) / 64
		if n == 0 {
			n = 1
		}
		lane.Batch(&feed.Batch{EngineTime: 1, IngestTime: 1, Events: []wire.Event{wire.Event{Kind: wire.KindStored, Tier: wire.TierDevice, BlockHashes: hashes[:n], TokensHashes: hashes[:n], BlockSize: size}}})
	}
	for _, prompts := range []int{1, 8} {
		req := &kvcastv1.MatchPrefixRequest{Model: "m"}
		for range prompts {
			req.Prompts = append(req.Prompts, &kvcastv1.Prompt{TokenIds: tokens})
		}
		for _, limit := range []uint32{0, 4} {
			b.Run(fmt.Sprintf("prompts=%d/limit=%d", prompts, limit), func(b *testing.B) {
				req.Limit = limit
				encoded, err := proto.Marshal(&kvcastv1.MatchPrefixesRequest{Id: 1, Request: req})
				if err != nil {
					b.Fatal(err)
				}
				stream, err := conn.NewStream(b.Context(), &kvcastv1.RouterEventService_ServiceDesc.Streams[len(kvcastv1.RouterEventService_ServiceDesc.Streams)-1],
					kvcastv1.RouterEventService_MatchPrefixes_FullMethodName, grpc.ForceCodecV2(rawCodec{}))
				if err != nil {
					b.Fatal(err)
				}
				b.ReportAllocs()
				b.ResetTimer()
				const inFlight = 64
				slots, received := make(chan struct{}, inFlight), make(chan error, 1)
				go func() {
					var bytes int
					for range b.N {
						if err := stream.RecvMsg(&bytes); err != nil {
							received <- err
							return
						}
						<-slots
					}
					received <- nil
				}()
				for range b.N {
					slots <- struct{}{}
					if err := stream.SendMsg(encoded); err != nil {
						b.Fatal(err)
					}
				}
				if err := <-received; err != nil {
					b.Fatal(err)
				}
				b.StopTimer()
				b.ReportMetric(float64(prompts*b.N)/b.Elapsed().Seconds(), "prompts/s")
				_ = stream.CloseSend()
			})
		}
	}
}
