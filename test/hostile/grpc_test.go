package hostile_test

import (
	"context"
	"fmt"
	"maps"
	"math/rand/v2"
	"net"
	"slices"
	"sync"
	"testing"
	"time"

	"golang.org/x/net/http2"
	"google.golang.org/grpc"
	"google.golang.org/protobuf/encoding/protowire"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/emptypb"

	"github.com/kvcast/kvcast/internal/core/testclass"
	smgv1 "github.com/kvcast/kvcast/internal/peer/smg/v1"
	"github.com/kvcast/kvcast/internal/transport"
	"github.com/kvcast/kvcast/test/harness"
)

// hostileServers is how many servers of engines by gRPC are hostile.
const hostileServers = 8

// smgBatch is a batch of SMG's protocol that stores a block.
func smgBatch(seq, hash uint64) []byte {
	b, err := proto.Marshal(&smgv1.KvEventBatch{SequenceNumber: seq, Events: []*smgv1.KvCacheEvent{{EventId: seq, Data: &smgv1.KvCacheEvent_Stored{
		Stored: &smgv1.KvBlocksStored{Blocks: []*smgv1.KvBlock{{BlockHash: hash, TokenIds: []uint32{1, 2}, BlockSize: 2}}},
	}}}})
	if err != nil {
		panic(err)
	}
	return b
}

// serveCalls serves each call of a server by sending messages until the stream ends or the function, which is given its context, returns false.
func serveCalls(send func(ctx context.Context, i uint64) (message []byte, ok bool)) func(t *testing.T, l net.Listener) (stop func()) {
	return func(_ *testing.T, l net.Listener) func() {
		s := grpc.NewServer(grpc.MaxSendMsgSize(1<<30), grpc.UnknownServiceHandler(func(_ any, stream grpc.ServerStream) error {
			if err := stream.RecvMsg(new(emptypb.Empty)); err != nil {
				return err
			}
			for i := uint64(0); stream.Context().Err() == nil; i++ {
				message, ok := send(stream.Context(), i)
				if !ok {
					break
				}
				m := new(emptypb.Empty)
				m.ProtoReflect().SetUnknown(message)
				if err := stream.SendMsg(m); err != nil {
					return err
				}
			}
			return nil
		}))
		var serving sync.WaitGroup
		serving.Go(func() { _ = s.Serve(l) })
		return func() {
			s.Stop()
			serving.Wait()
		}
	}
}

// grpcAttack is what a hostile server of engines does.
type grpcAttack struct {
	serve func(t *testing.T, l net.Listener) (stop func())
	begun func(harness.Metrics) bool
}

func hasReceived(messages float64) func(harness.Metrics) bool {
	return func(m harness.Metrics) bool { return m.Sum("kvcast_ingest_messages_total") > messages }
}

var grpcAttacks = map[string]grpcAttack{
	"tiny messages": {
		serveCalls(func(_ context.Context, i uint64) ([]byte, bool) { return smgBatch(i+1, i), true }), hasReceived(10_000),
	},
	"messages without a batch": {
		serveCalls(func(context.Context, uint64) ([]byte, bool) { return []byte{}, true }), hasReceived(10_000),
	},
	"falling seqs": {
		serveCalls(func(_ context.Context, i uint64) ([]byte, bool) { return smgBatch(1<<40-i, i), true }), hasReceived(1000),
	},
	"random seqs": {
		serveCalls(func(_ context.Context, i uint64) ([]byte, bool) { return smgBatch(rand.Uint64()>>1, i), true }), hasReceived(1000),
	},
	"giant messages": {
		serveCalls(func(_ context.Context, i uint64) ([]byte, bool) {
			return protowire.AppendBytes(protowire.AppendTag(smgBatch(i+1, i), 3, protowire.BytesType), make([]byte, 4<<20)), true
		}), hasReceived(20),
	},
	"messages that are too long": {
		serveCalls(func(_ context.Context, i uint64) ([]byte, bool) {
			return protowire.AppendBytes(protowire.AppendTag(smgBatch(i+1, i), 3, protowire.BytesType), make([]byte, transport.MaxPayloadBytes)), true
		}), func(m harness.Metrics) bool { return m.Sum("kvcast_ingest_disconnections_total") > 0 },
	},
	"garbage": {
		serveCalls(func(context.Context, uint64) ([]byte, bool) { return []byte("\x0a\xff garbage"), true }),
		func(m harness.Metrics) bool { return m.Sum("kvcast_ingest_disconnections_total") > 0 },
	},
	"a snapshot without an end": {
		serveCalls(func(_ context.Context, i uint64) ([]byte, bool) {
			b, err := proto.Marshal(&smgv1.KvEventBatch{Snapshot: &smgv1.KvSnapshot{Index: proto.Uint64(i), Count: proto.Uint64(1 << 62)}})
			return append(smgBatch(i+1, i), b...), err == nil
		}), hasReceived(10_000),
	},
	"GOAWAYs": {
		sendAway, func(m harness.Metrics) bool { return m.Sum("kvcast_ingest_connect_failures_total") > 0 },
	},
}

// sendAway ends each connection with a GOAWAY.
func sendAway(_ *testing.T, l net.Listener) (stop func()) {
	var serving sync.WaitGroup
	serving.Go(func() {
		for {
			c, err := l.Accept()
			if err != nil {
				return
			}
			serving.Go(func() {
				f := http2.NewFramer(c, c)
				_ = f.WriteSettings()
				_ = f.WriteGoAway(0, http2.ErrCodeNo, nil)
				_ = c.SetReadDeadline(time.Now().Add(time.Second))
				_, _ = c.Read(make([]byte, 1<<10))
				_ = c.Close()
			})
		}
	})
	return func() {
		_ = l.Close()
		serving.Wait()
	}
}

// grpcEngine is a correct engine that is read by gRPC, and a router that reads it.
type grpcEngine struct {
	*honestRouter

	mu    sync.Mutex    // guards all below
	last  uint64        // seq of the last batch
	added chan struct{} // closed when there is another
}

const grpcWorker = "grpc"

// batch returns the i-th batch once it is there; false if the context is done before. Each call receives all of them: one whose client has given it up
// takes none from the next.
func (e *grpcEngine) batch(ctx context.Context, i uint64) ([]byte, bool) {
	for {
		e.mu.Lock()
		last, added := e.last, e.added
		e.mu.Unlock()
		if i < last {
			return smgBatch(i+1, i+1), true
		}
		select {
		case <-added:
		case <-ctx.Done():
			return nil, false
		}
	}
}

// round sends a batch, and waits until the router has it.
func (e *grpcEngine) round() {
	e.t.Helper()
	began := time.Now()
	e.mu.Lock()
	e.last++
	close(e.added)
	e.added = make(chan struct{})
	e.mu.Unlock()
	e.wait(e.last, began)
}

// TestHonestEnginesBesideHostileServers has servers of engines that send what they like as fast as they are read, beside an engine that is read by gRPC and
// one that is read by ZeroMQ.
func TestHonestEnginesBesideHostileServers(t *testing.T) {
	testclass.Process(t)
	for _, name := range slices.Sorted(maps.Keys(grpcAttacks)) {
		t.Run(name, func(t *testing.T) {
			listen := func(ip net.IP) net.Listener {
				l, err := net.ListenTCP("tcp", &net.TCPAddr{IP: ip})
				if err != nil {
					t.Fatal(err)
				}
				return l
			}
			e := &grpcEngine{added: make(chan struct{})}
			l := listen(net.IPv4(127, 0, 0, 1))
			t.Cleanup(serveCalls(e.batch)(t, l))
			args := []string{"--bind", "tcp://127.0.0.1:*", "--worker", fmt.Sprintf("name=%s,model=m,connect=smg://%v", grpcWorker, l.Addr())}
			var hostile []net.Listener
			for i := range hostileServers {
				l := listen(net.IPv4(127, 0, 0, byte(10+i)))
				hostile = append(hostile, l)
				args = append(args, "--worker", fmt.Sprintf("name=hostile-%d,model=m,connect=smg://%v", i, l.Addr()))
			}
			s := harness.Serve(t, harness.ProcessConfig{Args: append(args, "--ingest-start-wait", "1ms")})
			h := newHonest(t, s, s.Client())
			e.honestRouter = newHonestRouter(t, s.Client(), grpcWorker)
			h.round()
			e.round()
			attack := grpcAttacks[name]
			trial{
				attack: func(ctx context.Context, _ func()) {
					for _, l := range hostile {
						defer attack.serve(t, l)()
					}
					<-ctx.Done()
				},
				begun: attack.begun,
				round: func() {
					h.round()
					e.round()
				},
				rounds: patientRounds, forget: func() { h.took, e.took = nil, nil },
				mostMiB: s.ResidentMiB() + 512, mostLogged: hostileServers * maxLogBytes / 3, // lines of configured workers are limited by worker
			}.run(t, s)
			for _, took := range [][]time.Duration{h.took, e.took} {
				slices.Sort(took)
				if most := took[len(took)-1]; most > roundLimit {
					t.Errorf("a batch took %v", most)
				}
			}
			t.Logf("by ZeroMQ: p50 %v, most %v; by gRPC: p50 %v, most %v", h.took[len(h.took)/2], h.took[len(h.took)-1], e.took[len(e.took)/2], e.took[len(e.took)-1])
		})
	}
}
