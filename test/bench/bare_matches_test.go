//go:build cgo

package bench_test

import (
	"context"
	"errors"
	"fmt"
	"net"
	"testing"

	"google.golang.org/grpc"
	"google.golang.org/grpc/encoding"
	grpcproto "google.golang.org/grpc/encoding/proto"
	"google.golang.org/grpc/mem"
	"google.golang.org/protobuf/encoding/protowire"
	"google.golang.org/protobuf/proto"

	kvcastv1 "github.com/kvcast/kvcast/proto/kvcast/v1"
)

func init() { roles["matches"] = newBareMatches }

// The field numbers of MatchPrefixesRequest and MatchPrefixesResponse.
const (
	matchIDField  = 1
	responseField = 2
)

// bareMatches is a gRPC server that answers each request of MatchPrefix and MatchPrefixes with the same matches, and decodes no more of it than its id: what
// gRPC and the network cost a server of matches. Its operation is a request.
type bareMatches struct {
	answer   []byte // an encoded MatchPrefixResponse
	grpc     *grpc.Server
	listener net.Listener
	served   chan error
	answered chan struct{}
}

func newBareMatches(s childSetup) (work, error) {
	l, err := net.Listen("tcp", "127.0.0.1:0") //nolint:noctx // returns at once
	if err != nil {
		return nil, err
	}
	m := &bareMatches{answer: s.Answer, listener: l, served: make(chan error, 1), answered: make(chan struct{}, 1<<20)}
	m.grpc = grpc.NewServer(grpc.ForceServerCodecV2(bytesCodec{encoding.GetCodecV2(grpcproto.Name)}))
	m.grpc.RegisterService(&grpc.ServiceDesc{
		ServiceName: kvcastv1.RouterEventService_ServiceDesc.ServiceName, HandlerType: (*any)(nil),
		Methods: []grpc.MethodDesc{{MethodName: "MatchPrefix", Handler: m.match}},
		Streams: []grpc.StreamDesc{{StreamName: "MatchPrefixes", Handler: m.matches, ServerStreams: true, ClientStreams: true}},
	}, m)
	go func() { m.served <- m.grpc.Serve(l) }()
	return m, nil
}

func (m *bareMatches) address() string { return m.listener.Addr().String() }

//nolint:revive // the order of grpc.MethodHandler
func (m *bareMatches) match(_ any, _ context.Context, decode func(any) error, _ grpc.UnaryServerInterceptor) (any, error) {
	var request mem.BufferSlice
	if err := decode(&request); err != nil {
		return nil, err
	}
	request.Free()
	m.answered <- struct{}{}
	return m.answer, nil
}

func (m *bareMatches) matches(_ any, stream grpc.ServerStream) error {
	var request mem.BufferSlice
	for stream.RecvMsg(&request) == nil { // until the client ends the stream
		id := uint64(0)
		if b := request[0].ReadOnlyData(); len(b) > 0 && b[0] == matchIDField<<3 {
			id, _ = protowire.ConsumeVarint(b[1:])
		}
		request.Free()
		response := make([]byte, 0, len(m.answer)+24)
		if id != 0 {
			response = protowire.AppendVarint(protowire.AppendTag(response, matchIDField, protowire.VarintType), id)
		}
		response = protowire.AppendBytes(protowire.AppendTag(response, responseField, protowire.BytesType), m.answer)
		if err := stream.SendMsg(response); err != nil {
			return err
		}
		m.answered <- struct{}{}
	}
	return nil
}

// do implements work: it waits for n requests.
func (m *bareMatches) do(n int) (uint64, error) {
	for range n {
		<-m.answered
	}
	return uint64(n), nil
}

// Close implements work.
func (m *bareMatches) Close() error {
	m.grpc.Stop()
	return <-m.served
}

// bytesCodec leaves messages encoded.
type bytesCodec struct{ encoding.CodecV2 }

func (c bytesCodec) Marshal(v any) (mem.BufferSlice, error) {
	if b, ok := v.([]byte); ok {
		return mem.BufferSlice{mem.SliceBuffer(b)}, nil
	}
	return c.CodecV2.Marshal(v)
}

func (c bytesCodec) Unmarshal(data mem.BufferSlice, v any) error {
	if b, ok := v.(*mem.BufferSlice); ok {
		data.Ref()
		*b = data
		return nil
	}
	return c.CodecV2.Unmarshal(data, v)
}

// bareMatching is a bareMatches on one core, with the requests of a load.
type bareMatching struct {
	child    *child
	conn     *grpc.ClientConn
	requests []*kvcastv1.MatchPrefixesRequest
}

// openBareMatching starts a server whose answer is one of kvcast's.
func openBareMatching(l matchLoad) (*bareMatching, error) {
	m, err := openMatching(nil)
	if err != nil {
		return nil, err
	}
	answer, err := kvcastv1.NewRouterEventServiceClient(m.conn).MatchPrefix(context.Background(), m.request(0, l))
	f := &bareMatching{requests: m.requests(l)}
	if err = errors.Join(err, m.Close()); err != nil {
		return nil, err
	}
	encoded, err := proto.Marshal(answer)
	if err != nil {
		return nil, fmt.Errorf("encode an answer: %w", err)
	}
	if f.child, err = startWrappedChild(oneCore, "matches", childSetup{Answer: encoded}); err != nil {
		return nil, err
	}
	if f.conn, err = dial(f.child.address); err != nil {
		return nil, errors.Join(err, f.child.Close())
	}
	return f, nil
}

// Close ends the server.
func (f *bareMatching) Close() error { return errors.Join(f.conn.Close(), f.child.Close()) }

// BenchmarkFloorMatchPrefixes is the floor of BenchmarkMatchPrefixes and BenchmarkMatchPrefixCost: a gRPC server that answers the same requests with the same bytes, without
// decoding requests and without an index.
func BenchmarkFloorMatchPrefixes(b *testing.B) {
	requireOneCore(b)
	for _, l := range matchLoads[:2] {
		benchmarkWith(b, l.name, func() (*bareMatching, error) { return openBareMatching(l) }, func(b *testing.B, f *bareMatching) {
			f.measure(b, func() error { return l.exchange(f.conn, b.N, f.requests) })
		})
	}
	one := matchLoad{prompts: 1, limit: 8}
	benchmarkWith(b, "1PromptBest8ACall", func() (*bareMatching, error) { return openBareMatching(one) }, func(b *testing.B, f *bareMatching) {
		f.measure(b, func() error {
			for i := range b.N {
				r, err := kvcastv1.NewRouterEventServiceClient(f.conn).MatchPrefix(context.Background(), f.requests[i%len(f.requests)].GetRequest())
				if err == nil {
					err = one.check(r)
				}
				if err != nil {
					return err
				}
			}
			return nil
		})
	})
}

// measure reports the cost of b.N requests.
func (f *bareMatching) measure(b *testing.B, send func() error) {
	b.Helper()
	b.ResetTimer()
	report, err := f.child.measure(b.N, send)
	b.StopTimer()
	if err != nil {
		b.Fatal(err)
	}
	b.ReportMetric(float64(b.N)/report.CPU.Seconds(), "prompts/s/core")
	b.ReportMetric(float64(report.CPU.Nanoseconds())/float64(b.N), "server-cpu-ns/prompt")
}
