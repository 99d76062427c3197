package hostile_test

import (
	"context"
	"encoding/binary"
	"fmt"
	"maps"
	"net"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/protobuf/encoding/protowire"
	"google.golang.org/protobuf/types/known/emptypb"

	"github.com/kvcast/kvcast/internal/core/testclass"
	"github.com/kvcast/kvcast/internal/wire"
	"github.com/kvcast/kvcast/internal/zmtp"
	"github.com/kvcast/kvcast/test/harness"
	"github.com/kvcast/kvcast/test/rawzmtp"
)

// egressWorld is a server with all ports for routers that do not use the API.
type egressWorld struct {
	*harness.Server
	pub, replay string // addresses
}

const (
	smgSubscribe = "/vllm.grpc.engine.VllmEngine/SubscribeKvEvents"
	sglangMatch  = "/kv_indexer.v1.KVIndexer/MatchExternalKvPrefix"
)

// smgStream subscribes to the honest worker as SMG does, and waits for so many messages.
func smgStream(ctx context.Context, conn *grpc.ClientConn, messages int) (grpc.ClientStream, error) {
	stream, err := conn.NewStream(ctx, &grpc.StreamDesc{ServerStreams: true}, smgSubscribe)
	if err == nil {
		err = stream.SendMsg(new(emptypb.Empty))
	}
	if err == nil {
		err = stream.CloseSend()
	}
	for i := 0; i < messages && err == nil; i++ {
		err = stream.RecvMsg(new(emptypb.Empty))
	}
	return stream, err
}

// sglangRequest asks for the block hashes from 1 on.
func sglangRequest(hashes int) *emptypb.Empty {
	var packed []byte
	for i := range hashes {
		packed = binary.LittleEndian.AppendUint64(packed, uint64(1+i))
	}
	m := new(emptypb.Empty)
	m.ProtoReflect().SetUnknown(protowire.AppendBytes(protowire.AppendTag(nil, 1, protowire.BytesType), packed))
	return m
}

// consumer subscribes to all that is published, from an address.
func (w *egressWorld) consumer(ctx context.Context, from net.IP) (*rawzmtp.Conn, error) {
	c, err := rawzmtp.DialFrom(ctx, from, zmtp.SUB, w.pub, harness.Timeout)
	if err == nil {
		c.Message([]byte{1})
		err = c.Flush()
	}
	return c, err
}

// egressAttack attacks until the context is done, and calls begun when it has its way.
type egressAttack func(ctx context.Context, t *testing.T, w *egressWorld, begun func())

// fromHostile calls a function again and again in so many goroutines until the context is done, and begun when each has returned once.
func fromHostile(ctx context.Context, n int, begun func(), call func()) {
	var group sync.WaitGroup
	defer group.Wait()
	var called atomic.Int64
	for range n {
		group.Go(func() {
			for ctx.Err() == nil {
				call()
				if called.Add(1) == int64(n) {
					begun()
				}
			}
		})
	}
}

var egressAttacks = map[string]egressAttack{
	"replay requests": func(ctx context.Context, _ *testing.T, w *egressWorld, begun func()) {
		fromHostile(ctx, 20, begun, func() {
			c, err := rawzmtp.DialFrom(ctx, hostileIP, zmtp.DEALER, w.replay, harness.Timeout)
			if err != nil {
				return
			}
			defer context.AfterFunc(ctx, func() { _ = c.Close() })()
			go c.Drain()
			for err == nil { // until it is disconnected, since too many requests wait
				c.Message(nil, make([]byte, 8))
				err = c.Flush()
			}
			_ = c.Close()
		})
	},
	"replay requests whose answers are not read": func(ctx context.Context, _ *testing.T, w *egressWorld, begun func()) {
		fromHostile(ctx, 100, func() {}, func() {
			c, err := rawzmtp.DialFrom(ctx, hostileIP, zmtp.DEALER, w.replay, harness.Timeout)
			if err != nil {
				return
			}
			for range 16 {
				c.Message(nil, make([]byte, 8))
			}
			_ = c.Flush()
			begun()
			<-ctx.Done()
			_ = c.Close()
		})
	},
	"consumers that do not read": func(ctx context.Context, _ *testing.T, w *egressWorld, begun func()) {
		fromHostile(ctx, 100, func() {}, func() {
			c, err := w.consumer(ctx, hostileIP)
			if err != nil {
				return
			}
			begun()
			<-ctx.Done()
			_ = c.Close()
		})
	},
	"gateways that do not read": func(ctx context.Context, t *testing.T, w *egressWorld, begun func()) {
		conns := []*grpc.ClientConn{}
		for range 4 {
			conns = append(conns, dialAs(t, w, hostileIP, grpc.WithInitialWindowSize(64<<10)))
		}
		var opened atomic.Int64
		var group sync.WaitGroup
		defer group.Wait()
		group.Go(func() { // until their states use most of the memory that an address has
			poll := time.NewTicker(50 * time.Millisecond)
			defer poll.Stop()
			for ; ctx.Err() == nil; <-poll.C {
				if m, err := w.Metrics(ctx); err == nil && m.Sum("kvcast_budget_used", "resource", "egress_smg_state_bytes") > 40<<20 { // of 48 MiB
					begun()
					return
				}
			}
		})
		fromHostile(ctx, 1100, func() {}, func() {
			if stream, err := smgStream(ctx, conns[opened.Add(1)%4], 0); err == nil {
				_, _ = stream.Header()
			}
			<-ctx.Done()
		})
	},
	"gateways that connect again and again": func(ctx context.Context, t *testing.T, w *egressWorld, begun func()) {
		fromHostile(ctx, 20, begun, func() {
			conn, err := grpc.NewClient("passthrough:///"+w.Address(), grpc.WithTransportCredentials(insecure.NewCredentials()), grpc.WithAuthority(honestWorker), grpc.WithContextDialer(from(hostileIP)))
			if err != nil {
				t.Error(err)
				return
			}
			_, _ = smgStream(ctx, conn, 1)
			_ = conn.Close()
		})
	},
	"largest queries of SGLang": func(ctx context.Context, t *testing.T, w *egressWorld, begun func()) {
		request := sglangRequest(1 << 16)
		conn := dialAs(t, w, hostileIP)
		fromHostile(ctx, 100, begun, func() { _ = conn.Invoke(ctx, sglangMatch, request, new(emptypb.Empty)) })
	},
	"malformed messages": func(ctx context.Context, t *testing.T, w *egressWorld, begun func()) {
		garbage := new(emptypb.Empty)
		garbage.ProtoReflect().SetUnknown([]byte("\x0a\xff\xff\xff\xff\x0f"))
		conn := dialAs(t, w, hostileIP)
		fromHostile(ctx, 20, begun, func() {
			_ = conn.Invoke(ctx, sglangMatch, garbage, new(emptypb.Empty))
			_ = conn.Invoke(ctx, smgSubscribe, garbage, new(emptypb.Empty))
			sendGarbage(ctx, t, w.pub)
			sendGarbage(ctx, t, w.replay)
		})
	},
}

// dialAs returns a connection from an address whose calls are for the honest worker. The caller may close it.
func dialAs(t *testing.T, w *egressWorld, ip net.IP, opts ...grpc.DialOption) *grpc.ClientConn {
	return dialFrom(t, ip, w.Address(), append(opts, grpc.WithAuthority(honestWorker))...)
}

// TestHonestConsumersBesideHostileConsumers has consumers of each port for routers that cannot be changed, which do what they like.
func TestHonestConsumersBesideHostileConsumers(t *testing.T) {
	testclass.Process(t)
	for _, name := range slices.Sorted(maps.Keys(egressAttacks)) {
		t.Run(name, func(t *testing.T) {
			file := fileOf(t, fmt.Sprintf(
				"egress: {smg: {enabled: true, state_bytes: 64MiB}, sglang: {enabled: true, address: 'http://{worker}'}, zmq: {publishers: [{worker: %q, bind: 'tcp://127.0.0.1:*', replay: 'tcp://127.0.0.1:*'}]}}\n", honestWorker))
			s := harness.Serve(t, harness.ProcessConfig{Args: []string{"--config", file, "--bind", "tcp://127.0.0.1:*", "--emit-token-ids", "--retain-token-ids"}})
			w := &egressWorld{Server: s}
			w.pub = strings.TrimPrefix(s.AwaitLog(`msg=publishing endpoint=(\S+)`), "tcp://")
			w.replay = strings.TrimPrefix(s.AwaitLog(`msg=publishing .*replay=(\S+)`), "tcp://")
			h := newHonest(t, s, s.Client())
			h.round()
			fillWorker(t, h, 20_000)
			conn := dialAs(t, w, net.IPv4(127, 0, 0, 1))
			sub, err := w.consumer(t.Context(), net.IPv4(127, 0, 0, 1))
			if err != nil {
				t.Fatal(err)
			}
			t.Cleanup(func() { _ = sub.Close() })
			// The subscription has no answer: batches are published until one arrives.
			received := make(chan error, 1)
			go func() {
				_, err := sub.Receive(harness.Timeout)
				received <- err
			}()
			for done := false; !done; {
				select {
				case err := <-received:
					if err != nil {
						t.Fatal(err)
					}
					done = true
				default:
					h.round()
				}
			}
			took := make(longest)
			trial{
				attack: func(ctx context.Context, begun func()) { egressAttacks[name](ctx, t, w, begun) },
				round: func() {
					h.round()
					took.call(t, "a batch", func(context.Context) error {
						_, err := sub.Receive(roundLimit)
						return err
					})
					took.call(t, "SMG", func(ctx context.Context) error {
						_, err := smgStream(ctx, conn, 3)
						return err
					})
					took.call(t, "SGLang", func(ctx context.Context) error {
						return conn.Invoke(ctx, sglangMatch, sglangRequest(1), new(emptypb.Empty))
					})
					took.call(t, "a replay", func(ctx context.Context) error {
						c, err := rawzmtp.DialFrom(ctx, net.IPv4(127, 0, 0, 1), zmtp.DEALER, w.replay, harness.Timeout)
						if err != nil {
							return err
						}
						defer func() { _ = c.Close() }()
						c.Message(nil, make([]byte, 8))
						if err := c.Flush(); err != nil {
							return err
						}
						_, err = c.Receive(roundLimit)
						return err
					})
				},
				rounds: patientRounds, mostMiB: s.ResidentMiB() + 384, mostLogged: maxLogBytes,
			}.run(t, s)
			t.Logf("most: %v", took)
		})
	}
}

// fillWorker publishes a worker's blocks, whose state is large.
func fillWorker(t *testing.T, h *correctEngine, blocks int) {
	t.Helper()
	for first := 0; first < blocks; first += 500 {
		e := wire.Event{Kind: wire.KindStored, BlockSize: 2}
		for i := range 500 {
			e.BlockHashes = append(e.BlockHashes, uint64(1<<40+first+i))
			e.Tokens = append(e.Tokens, uint32(first), uint32(i))
		}
		if _, err := h.publisher.Publish(e); err != nil {
			t.Fatal(err)
		}
	}
	h.round()
}
