package hostile_test

import (
	"context"
	"crypto/tls"
	"encoding/binary"
	"fmt"
	"io"
	"maps"
	"math/rand/v2"
	"net"
	"net/http"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials/insecure"
	healthv1 "google.golang.org/grpc/health/grpc_health_v1"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/status"

	"github.com/kvcast/kvcast/ingest/config"
	"github.com/kvcast/kvcast/internal/core/testclass"
	"github.com/kvcast/kvcast/internal/simulator"
	"github.com/kvcast/kvcast/internal/wire"
	"github.com/kvcast/kvcast/internal/zmtp"
	kvcastv1 "github.com/kvcast/kvcast/proto/kvcast/v1"
	"github.com/kvcast/kvcast/test/harness"
	"github.com/kvcast/kvcast/test/rawzmtp"
)

// floodTimeout bounds one flood of messages.
const floodTimeout = 10 * time.Second

// attack connects to a bound port as a publisher.
func attack(t *testing.T, endpoint string) *rawzmtp.Conn {
	t.Helper()
	c, err := rawzmtp.Dial(t.Context(), zmtp.PUB, strings.TrimPrefix(endpoint, "tcp://"), harness.Timeout)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = c.Close() }) // the test may have reset it
	return c
}

// batchOf returns the payload of a batch that stores a block.
func batchOf(t *testing.T, hash uint64) []byte {
	t.Helper()
	var e wire.Encoder
	payload := e.AppendBatch(nil, &wire.Batch{Time: 1, HasTime: true, Events: []wire.Event{storedOf(hash)}})
	return payload
}

// flood sends messages as fast as the peer reads them, each followed by a PING, until the
// time is over or the peer stops reading.
func flood(t *testing.T, c *rawzmtp.Conn, topic string) {
	t.Helper()
	go c.Drain()
	end := time.Now().Add(floodTimeout)
	payload := batchOf(t, 1)
	for seq := uint64(0); seq < 400_000; seq++ {
		c.Message([]byte(topic), binary.BigEndian.AppendUint64(nil, seq), payload)
		c.Ping()
		if c.Buffered() < 64<<10 {
			continue
		}
		if err := c.SetWriteDeadline(time.Now().Add(time.Second)); err != nil {
			t.Fatal(err)
		}
		if err := c.Flush(); err != nil || time.Now().After(end) {
			return
		}
	}
}

// honestRouter reads what the server tells of one worker during an attack.
type honestRouter struct {
	t      *testing.T
	worker string
	stream grpc.ServerStreamingClient[kvcastv1.SubscribeResponse]
	end    context.CancelFunc // ends the stream
	took   []time.Duration    // from publishing to receiving
}

func newHonestRouter(t *testing.T, client kvcastv1.RouterEventServiceClient, worker string) *honestRouter {
	t.Helper()
	ctx, cancel := context.WithCancel(t.Context())
	t.Cleanup(cancel)
	stream, err := client.Subscribe(ctx, &kvcastv1.SubscribeRequest{
		Start:  &kvcastv1.SubscribeRequest_Earliest{Earliest: &kvcastv1.FromEarliest{}},
		Filter: &kvcastv1.Filter{Workers: []string{worker}},
	})
	if err != nil {
		t.Fatal(err)
	}
	return &honestRouter{t: t, worker: worker, stream: stream, end: cancel}
}

// wait waits until the router has a block, which was published at a time. No loss may be reported, whatever the attack.
func (r *honestRouter) wait(block uint64, published time.Time) {
	r.t.Helper()
	defer time.AfterFunc(harness.Timeout, r.end).Stop()
	for {
		m, err := r.stream.Recv()
		if err != nil {
			r.t.Fatalf("wait for block %d of worker %s: %v", block, r.worker, err)
		}
		for _, e := range m.GetEntries() {
			for _, ev := range e.GetEvents() {
				if gap := ev.GetGap(); gap != nil && gap.GetReason() != kvcastv1.Gap_REASON_JOINED_LATE {
					r.t.Errorf("reported of worker %s: %v", r.worker, gap)
				}
				if slices.Contains(ev.GetStored().GetBlockHashes(), block) {
					r.took = append(r.took, time.Since(published))
					return
				}
			}
		}
	}
}

// correctEngine is a correct engine during an attack, and a router that reads it.
type correctEngine struct {
	*honestRouter
	publisher *simulator.Publisher
	last      uint64
	more      []wire.Event // of each batch
	drops     bool         // whether a batch is lost before each
	adapts    bool         // whether each block has another LoRA adapter
}

const honestWorker = "127.0.0.1"

func newHonest(t *testing.T, s *harness.Server, router kvcastv1.RouterEventServiceClient) *correctEngine {
	t.Helper()
	return newHonestAt(t, s, router, harness.FreePort(t))
}

// newHonestAt has the port of the engine's replay socket.
func newHonestAt(t *testing.T, s *harness.Server, router kvcastv1.RouterEventServiceClient, port int) *correctEngine {
	t.Helper()
	publisher, err := simulator.NewPublisher(simulator.PublisherConfig{SocketConfig: simulator.SocketConfig{
		Endpoint: s.Endpoint(), Mode: simulator.ModeConnect, Topic: "kv@" + honestWorker + "@m", Replay: fmt.Sprintf("tcp://127.0.0.1:%d", port),
	}})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := publisher.Close(); err != nil {
			t.Errorf("close publisher: %v", err)
		}
	})
	ctx, cancel := context.WithTimeout(t.Context(), harness.Timeout)
	t.Cleanup(cancel)
	if err := publisher.WaitSubscribed(ctx, 1); err != nil {
		t.Fatal(err)
	}
	return &correctEngine{honestRouter: newHonestRouter(t, router, honestWorker), publisher: publisher}
}

// round publishes a batch, and waits until the router has it.
func (h *correctEngine) round() {
	h.t.Helper()
	h.last++
	began := time.Now()
	if h.drops {
		if _, err := h.publisher.Drop(storedOf(h.last << 32)); err != nil {
			h.t.Fatal(err)
		}
	}
	stored := storedOf(h.last)
	if h.adapts {
		stored.LoRAName = fmt.Sprint("adapter-", h.last)
	}
	if _, err := h.publisher.Publish(append([]wire.Event{stored}, h.more...)...); err != nil {
		h.t.Fatal(err)
	}
	h.wait(h.last, began)
}

// attacks run concurrently with a correct engine. Each runs until the context is done.
var attacks = map[string]func(t *testing.T, ctx context.Context, s *harness.Server){
	"PING floods that end in a reset": func(t *testing.T, ctx context.Context, s *harness.Server) {
		for ctx.Err() == nil {
			c, err := rawzmtp.Dial(t.Context(), zmtp.PUB, strings.TrimPrefix(s.Endpoint(), "tcp://"), harness.Timeout)
			if err != nil {
				t.Error(err)
				return
			}
			go c.Drain()
			payload := batchOf(t, 1)
			for seq := uint64(0); seq < 50_000 && ctx.Err() == nil; seq++ {
				c.Message([]byte("kv@flood@m"), binary.BigEndian.AppendUint64(nil, seq), payload)
				c.Ping()
				if c.Buffered() > 64<<10 {
					_ = c.SetWriteDeadline(time.Now().Add(time.Second))
					if c.Flush() != nil { // it is not read fast enough
						break
					}
				}
			}
			_ = c.Reset()
		}
	},
	"a flood of names": func(t *testing.T, ctx context.Context, s *harness.Server) {
		c := attack(t, s.Endpoint())
		go c.Drain()
		payload := batchOf(t, 1)
		for i := 0; ctx.Err() == nil; i++ {
			c.Message(fmt.Appendf(nil, "kv@192.0.2.%d-%d@%0900d", i%256, i, i), make([]byte, 8), payload)
			if c.Buffered() > 64<<10 {
				_ = c.SetWriteDeadline(time.Now().Add(time.Second))
				if c.Flush() != nil {
					return
				}
			}
		}
	},
	"health watches with large headers": func(t *testing.T, ctx context.Context, s *harness.Server) {
		conn, err := grpc.NewClient(s.Address(), grpc.WithTransportCredentials(insecure.NewCredentials()))
		if err != nil {
			t.Error(err)
			return
		}
		defer func() { _ = conn.Close() }()
		health := healthv1.NewHealthClient(conn)
		for i := 0; ctx.Err() == nil; i++ {
			watching := ctx
			if i%2 == 0 { // the other watches are small, to open as many as possible
				watching = metadata.AppendToOutgoingContext(ctx, "x-large", strings.Repeat("x", 8<<20))
			}
			if stream, err := health.Watch(watching, &healthv1.HealthCheckRequest{}); err == nil {
				_, _ = stream.Recv() // fails once the limit is reached
			}
		}
	},
	"garbage at the ports of clients": func(t *testing.T, ctx context.Context, s *harness.Server) {
		admin := s.Must(s.Admin())
		for ctx.Err() == nil {
			sendGarbage(ctx, t, admin)
			sendGarbage(ctx, t, s.Address())
		}
	},
	"streams that are reset": func(t *testing.T, ctx context.Context, s *harness.Server) {
		resetStreams(ctx, t, s.Client())
	},
	"silent connections": func(_ *testing.T, ctx context.Context, s *harness.Server) {
		var open []net.Conn
		defer func() {
			for _, c := range open {
				_ = c.Close()
			}
		}()
		for _, address := range []string{s.Address(), strings.TrimPrefix(s.Endpoint(), "tcp://")} {
			for range 500 {
				c, err := new(net.Dialer).DialContext(ctx, "tcp", address)
				if err != nil {
					break
				}
				open = append(open, c)
			}
		}
		<-ctx.Done()
	},
}

// seqAttacks are attacks that are reported as restarts and losses, again and again.
var seqAttacks = map[string]func(t *testing.T, ctx context.Context, s *harness.Server){
	"falling seqs of many topics": func(t *testing.T, ctx context.Context, s *harness.Server) {
		publishSeqs(ctx, t, s, func(i uint64) (topic string, seq uint64) { return fmt.Sprintf("kv@192.0.2.%d@m", i%200), 1<<40 - i })
	},
	"random seqs": func(t *testing.T, ctx context.Context, s *harness.Server) {
		random := rand.New(rand.NewPCG(1, 2))
		publishSeqs(ctx, t, s, func(uint64) (topic string, seq uint64) { return "kv@192.0.2.201@m", random.Uint64() >> 1 })
	},
}

// publishSeqs publishes batches of topics and seqs, each of another block.
func publishSeqs(ctx context.Context, t *testing.T, s *harness.Server, next func(i uint64) (topic string, seq uint64)) {
	publishAll(ctx, t, s, func(i uint64) (string, uint64, []byte) {
		topic, seq := next(i)
		return topic, seq, batchOf(t, i)
	})
}

// publishAll sends batches until the context is done or the peer stops reading. Its address is not that of the correct engine.
func publishAll(ctx context.Context, t *testing.T, s *harness.Server, next func(i uint64) (topic string, seq uint64, payload []byte)) {
	c, err := rawzmtp.DialFrom(t.Context(), net.IPv4(127, 0, 0, 2), zmtp.PUB, strings.TrimPrefix(s.Endpoint(), "tcp://"), harness.Timeout)
	if err != nil {
		t.Error(err)
		return
	}
	defer func() { _ = c.Close() }()
	go c.Drain()
	for i := uint64(0); ctx.Err() == nil; i++ {
		topic, seq, payload := next(i)
		c.Message([]byte(topic), binary.BigEndian.AppendUint64(nil, seq), payload)
		if c.Buffered() > 64<<10 {
			_ = c.SetWriteDeadline(time.Now().Add(time.Second))
			if c.Flush() != nil {
				return
			}
		}
	}
}

// resetStreams opens streams and resets them until the context is done.
func resetStreams(ctx context.Context, t *testing.T, client kvcastv1.RouterEventServiceClient) {
	var group sync.WaitGroup
	defer group.Wait()
	for range 8 {
		group.Go(func() {
			for ctx.Err() == nil {
				stream, cancel := context.WithTimeout(t.Context(), harness.Timeout)
				if subscription, err := client.Subscribe(stream, &kvcastv1.SubscribeRequest{
					Start: &kvcastv1.SubscribeRequest_Earliest{Earliest: &kvcastv1.FromEarliest{}},
				}); err == nil {
					_, _ = subscription.Recv() // it is refused, or reset below
				}
				cancel()
			}
		})
	}
}

// sendGarbage sends a port what is no protocol.
func sendGarbage(ctx context.Context, t *testing.T, address string) {
	c, err := new(net.Dialer).DialContext(t.Context(), "tcp", address)
	if err != nil {
		if ctx.Err() == nil {
			t.Error(err)
		}
		return
	}
	_, _ = c.Write([]byte("GET / HTTP/0.7\r\nHost: kvcast\r\n\r\n"))
	_ = c.Close()
}

// nativeAttacks are attacks that exceed libzmq's memory or end its process.
var nativeAttacks = map[string]func(t *testing.T, ctx context.Context, s *harness.Server){
	"messages of endless frames": func(t *testing.T, ctx context.Context, s *harness.Server) {
		for ctx.Err() == nil {
			c, err := rawzmtp.Dial(t.Context(), zmtp.PUB, strings.TrimPrefix(s.Endpoint(), "tcp://"), harness.Timeout)
			if err != nil {
				t.Error(err)
				return
			}
			for range 100_000 {
				c.More(nil)
			}
			_ = c.SetWriteDeadline(time.Now().Add(time.Second))
			_ = c.Flush() // it is disconnected
			_ = c.Close()
		}
	},
	"withheld messages": func(t *testing.T, ctx context.Context, s *harness.Server) {
		half := make([]byte, 1<<20)
		for ctx.Err() == nil {
			c := attack(t, s.Endpoint())
			c.More(half)
			_ = c.SetWriteDeadline(time.Now().Add(time.Second))
			_ = c.Flush()
		}
	},
	"peers of other protocols": func(t *testing.T, ctx context.Context, s *harness.Server) {
		for ctx.Err() == nil {
			sendGarbage(ctx, t, strings.TrimPrefix(s.Endpoint(), "tcp://"))
		}
	},
}

// maxLogBytes bounds the log of an attack: an address causes at most loglimit.Burst lines of a kind at once, and then one in 10 s. Attacks cause up to six kinds of lines, of
// 200 to 300 bytes. One kind has models of up to 1 KiB.
const maxLogBytes = 96 << 10

// TestHonestEngineBesideHostilePeers checks that hostile peers cannot end the process, exceed its memory bounds, fill its log, or cause
// loss for another engine.
func TestHonestEngineBesideHostilePeers(t *testing.T) {
	testclass.Process(t)
	harness.ForEachTransport(t, func(t *testing.T, zmq config.ZMQ) {
		// The race detector multiplies memory use.
		s := harness.Serve(t, harness.ProcessConfig{Args: []string{
			"--bind", "tcp://127.0.0.1:*", "--ingest-listen-transport", string(zmq), "--ingest-connect-transport", string(zmq), "--log-level", "debug",
		}})
		h := newHonest(t, s, s.Client())
		h.round()
		before := s.ResidentMiB()
		all, limit := maps.Clone(attacks), before+1024
		if zmq == config.ZMQNative {
			maps.Copy(all, nativeAttacks)
			limit = before + 128 // twice what it needs, for a collector that lags behind
		}
		for _, name := range slices.Sorted(maps.Keys(all)) {
			t.Run(name, func(t *testing.T) { h.during(t, s, all[name], limit) })
		}
		h.round()
		t.Logf("%d MiB resident before the attacks, %d after", before, s.ResidentMiB())
	})
}

// TestLoRANamesBesideManyLoRANames has a peer use up the LoRA names that its address may have. Those of another engine must be known.
func TestLoRANamesBesideManyLoRANames(t *testing.T) {
	testclass.Process(t)
	s := harness.Serve(t, harness.ProcessConfig{Args: []string{"--bind", "tcp://127.0.0.1:*", "--ingest-max-attribute-bytes", "16MiB"}})
	h := newHonest(t, s, s.Client())
	h.adapts = true
	h.round()
	h.duringRounds(t, s, func(t *testing.T, ctx context.Context, s *harness.Server) {
		var e wire.Encoder
		publishAll(ctx, t, s, func(i uint64) (topic string, seq uint64, payload []byte) {
			stored := storedOf(i)
			stored.LoRAName = fmt.Sprintf("%01000d", i)
			return "kv@192.0.2.1@m", i, e.AppendBatch(nil, &wire.Batch{Time: 1, HasTime: true, Events: []wire.Event{stored}})
		})
	}, s.ResidentMiB()+256, func(m harness.Metrics) bool {
		return m.Sum("kvcast_pipeline_blocks_refused_total", "reason", "attributes") > 0
	})
	h.round()
}

// TestLargeBatchesBesideStalledMessages has peers announce messages of 8 MiB, send some, and stall. They connect again as soon as they are
// disconnected. Large batches of another engine must arrive all the same, in order and without loss.
func TestLargeBatchesBesideStalledMessages(t *testing.T) {
	testclass.Process(t)
	s := harness.Serve(t, harness.ProcessConfig{Args: []string{"--bind", "tcp://127.0.0.1:*"}})
	h := newHonest(t, s, s.Client())
	h.more = []wire.Event{{Kind: wire.KindRemoved, BlockHashes: slices.Repeat([]uint64{1 << 63}, 23_000)}} // 210 kB, and no such block
	h.round()
	limit := s.ResidentMiB() + 256 // four times the ledger and the batches, for a collector that lags behind
	for _, tt := range []struct{ addresses, connections, sent int }{{2, 30, 40_000}, {12, 1, 7 << 20}, {40, 2, 400_000}} {
		t.Run(fmt.Sprintf("%d addresses with %d connections", tt.addresses, tt.connections), func(t *testing.T) {
			h.duringRounds(t, s, func(t *testing.T, ctx context.Context, s *harness.Server) {
				var group sync.WaitGroup
				for i := range tt.addresses * tt.connections {
					group.Go(func() { stall(ctx, t, s, net.IPv4(127, 0, 1, byte(i%tt.addresses)), tt.sent) })
				}
				group.Wait()
			}, limit, func(m harness.Metrics) bool {
				return m.Sum("kvcast_ingest_peers_rejected_total", "reason", "memory") > 0
			})
		})
	}
	h.round()
}

// TestRepairBesideSlowReplays has engines whose replay sockets send a batch now and then, for ever. The replays of another engine, which loses
// batches, must not wait for them.
func TestRepairBesideSlowReplays(t *testing.T) {
	testclass.Process(t)
	harness.ForEachTransport(t, func(t *testing.T, zmq config.ZMQ) {
		port := harness.FreePort(t)
		s := harness.Serve(t, harness.ProcessConfig{Args: []string{
			"--bind", fmt.Sprintf("tcp://127.0.0.1:*,replay_port=%d", port), "--ingest-connect-transport", string(zmq),
		}})
		h := newHonestAt(t, s, s.Client(), port)
		h.round()
		h.drops = true
		limit := s.ResidentMiB() + 128
		for _, addresses := range []int{1, 4} {
			t.Run(fmt.Sprintf("of %d addresses", addresses), func(t *testing.T) {
				h.duringRounds(t, s, func(t *testing.T, ctx context.Context, s *harness.Server) {
					var group sync.WaitGroup
					for i := range addresses {
						group.Go(func() {
							replay(ctx, t, s, net.IPv4(127, 0, 2, byte(i)), port, 60, batchOf(t, 1), 200*time.Millisecond)
						})
					}
					group.Wait()
				}, limit, func(m harness.Metrics) bool {
					return m.Sum("kvcast_ingest_replays_in_progress", "state", "transferring") >= 8
				})
			})
		}
		h.round()
	})
}

// replay publishes the batches of so many engines of an address, the first of which are missing, over one connection, and answers each request to their
// replay sockets with a batch again and again, each after a pause, until the context is done.
func replay(ctx context.Context, t *testing.T, s *harness.Server, ip net.IP, port, engines int, batch []byte, pause time.Duration) {
	l, err := net.ListenTCP("tcp", &net.TCPAddr{IP: ip, Port: port})
	if err != nil {
		t.Error(err)
		return
	}
	defer context.AfterFunc(ctx, func() { _ = l.Close() })()
	var group sync.WaitGroup
	defer group.Wait()
	group.Go(func() {
		for ctx.Err() == nil {
			c, err := rawzmtp.Accept(l, zmtp.ROUTER, harness.Timeout)
			if err != nil {
				continue
			}
			group.Go(func() {
				defer func() { _ = c.Close() }()
				defer context.AfterFunc(ctx, func() { _ = c.Close() })()
				for seq := range uint64(1000) {
					c.Message(nil, binary.BigEndian.AppendUint64(nil, seq), batch)
					select {
					case <-time.After(pause):
					case <-ctx.Done():
						return
					}
					if c.Flush() != nil {
						return
					}
				}
			})
		}
	})
	payload := batchOf(t, 1)
	for seq := uint64(1000); ctx.Err() == nil; seq += 2 { // again if it is disconnected, as a busy server does
		c, err := rawzmtp.DialFrom(ctx, ip, zmtp.PUB, strings.TrimPrefix(s.Endpoint(), "tcp://"), harness.Timeout)
		if err != nil {
			if ctx.Err() == nil {
				t.Error(err)
			}
			return
		}
		stop := context.AfterFunc(ctx, func() { _ = c.Close() })
		for i := range engines {
			c.Message(fmt.Appendf(nil, "kv@%v:%d@m", ip, 1+i), binary.BigEndian.AppendUint64(nil, seq), payload)
		}
		_ = c.Flush()
		c.Drain()
		stop()
		_ = c.Close()
	}
}

// stall connects from an address again and again until the context is done, and sends a part of a message of 8 MiB on each connection.
func stall(ctx context.Context, t *testing.T, s *harness.Server, from net.IP, sent int) {
	part := append([]byte{2, 0, 0, 0, 0, 0, 0x80, 0, 0}, make([]byte, sent)...)
	for ctx.Err() == nil {
		c, err := rawzmtp.DialFrom(ctx, from, zmtp.PUB, strings.TrimPrefix(s.Endpoint(), "tcp://"), harness.Timeout)
		if err != nil {
			if ctx.Err() == nil {
				t.Error(err)
			}
			return
		}
		stop := context.AfterFunc(ctx, func() { _ = c.Close() })
		c.Append(part)
		_ = c.Flush()
		c.Drain() // until it is disconnected
		stop()
		_ = c.Close()
	}
}

// TestHonestEngineBesideFloodsOfSeqs sends what is logged with many names and numbers.
func TestHonestEngineBesideFloodsOfSeqs(t *testing.T) {
	testclass.Process(t)
	harness.ForEachTransport(t, func(t *testing.T, zmq config.ZMQ) {
		for _, name := range slices.Sorted(maps.Keys(seqAttacks)) {
			t.Run(name, func(t *testing.T) {
				s := serve(t, "--bind", "tcp://127.0.0.1:*", "--ingest-listen-transport", string(zmq), "--ingest-connect-transport", string(zmq), "--log-level", "debug")
				h := newHonest(t, s, s.Client())
				h.round()
				h.during(t, s, seqAttacks[name], s.ResidentMiB()+1024)
				s.AwaitLog(`msg="engine restarted" worker=192\.0\.2\.\d+ peer\.address=127\.0\.0\.2 `) // the attack has reached what it attacks
			})
		}
	})
}

// during runs an attack for a second, and checks that the engine loses nothing, that the process has at most so many MiB of memory, and that it
// logs at most maxLogBytes.
func (h *correctEngine) during(t *testing.T, s *harness.Server, attack func(*testing.T, context.Context, *harness.Server), limit int) {
	t.Helper()
	h.beside(t, s, limit, trial{attack: func(ctx context.Context, begun func()) {
		defer time.AfterFunc(time.Second, begun).Stop()
		attack(t, ctx, s)
	}})
}

// patientRounds is how many batches duringRounds sends, and roundLimit how long each may take: ten times what a busy machine needs.
const (
	patientRounds = 10
	roundLimit    = 8 * time.Second
)

// duringRounds runs an attack until a condition has become true, and the engine has sent some batches since, each of which must reach the router in a
// time in which it would not while the attack has its way.
func (h *correctEngine) duringRounds(t *testing.T, s *harness.Server, attack func(*testing.T, context.Context, *harness.Server), limit int, begun func(harness.Metrics) bool) {
	t.Helper()
	h.beside(t, s, limit, trial{
		attack: func(ctx context.Context, _ func()) { attack(t, ctx, s) }, begun: begun,
		rounds: patientRounds, forget: func() { h.took = nil },
	})
	if most := slices.Max(h.took); most > roundLimit {
		t.Errorf("a batch took %v, want at most %v", most, roundLimit)
	}
}

// beside runs a trial whose rounds are those of the engine. limit bounds the memory at the end, in MiB.
func (h *correctEngine) beside(t *testing.T, s *harness.Server, limit int, a trial) {
	t.Helper()
	h.took = nil
	a.round, a.mostLogged = h.round, maxLogBytes
	a.run(t, s)
	slices.Sort(h.took)
	n := len(h.took)
	t.Logf("%d batches during the attack: p50 %v, p99 %v, most %v", n, h.took[n/2], h.took[n*99/100], h.took[n-1])
	if rss := s.ResidentMiB(); rss > limit {
		t.Errorf("%d MiB resident, want at most %d", rss, limit)
	}
}

// TestHonestEngineBesideClientsWithoutCredentials has ports with TLS and tokens, which hostile clients do not have.
func TestHonestEngineBesideClientsWithoutCredentials(t *testing.T) {
	testclass.Process(t)
	ca := harness.NewAuthority(t)
	cert, key := ca.Issue("server")
	stolen, err := tls.LoadX509KeyPair(harness.NewAuthority(t).Issue("gateway"))
	if err != nil {
		t.Fatal(err)
	}
	s := serve(t, "--bind", "tcp://127.0.0.1:*", "--log-level", "debug", "--egress-dynamo-listen", "127.0.0.1:0",
		"--tls-cert", cert, "--tls-key", key, "--tls-client-ca", ca.File, "--admin-tls", "--auth-tokens", fileOf(t, "router "+routersToken))
	dynamo, admin := s.AwaitLog(`msg=serving dynamo=(\S+)`), s.Must(s.Admin())
	h := newHonest(t, s, kvcastv1.NewRouterEventServiceClient(dial(t, s, ca, grpc.WithPerRPCCredentials(bearer(routersToken)))))
	h.round()
	stranger := kvcastv1.NewRouterEventServiceClient(dial(t, s, ca))
	limit := s.ResidentMiB() + 1024
	for name, attack := range map[string]func(t *testing.T, ctx context.Context, s *harness.Server){
		"streams": func(t *testing.T, ctx context.Context, _ *harness.Server) { resetStreams(ctx, t, stranger) },
		"garbage in place of TLS": func(t *testing.T, ctx context.Context, s *harness.Server) {
			for i := 0; ctx.Err() == nil; i++ {
				sendGarbage(ctx, t, []string{s.Address(), admin, dynamo}[i%3])
			}
		},
		"handshakes that never end": func(_ *testing.T, ctx context.Context, s *harness.Server) {
			var group sync.WaitGroup
			defer group.Wait()
			for i := range 500 { // of 50 addresses
				group.Go(func() {
					dialer := net.Dialer{LocalAddr: &net.TCPAddr{IP: net.IPv4(127, 0, 3, byte(i%50))}}
					for ctx.Err() == nil {
						c, err := dialer.DialContext(ctx, "tcp", []string{s.Address(), admin, dynamo}[i%3])
						if err != nil {
							continue
						}
						stop := context.AfterFunc(ctx, func() { _ = c.Close() })
						_, _ = c.Write([]byte{22, 3, 1, 2, 0, 1, 0, 1}) // the beginning of a ClientHello
						_, _ = c.Read(make([]byte, 1))                  // until it is disconnected
						stop()
						_ = c.Close()
					}
				})
			}
		},
		"certificates of another CA": func(_ *testing.T, ctx context.Context, s *harness.Server) {
			for ctx.Err() == nil {
				c, err := new(net.Dialer).DialContext(ctx, "tcp", s.Address())
				if err != nil {
					continue
				}
				foreign := tls.Client(c, &tls.Config{InsecureSkipVerify: true, NextProtos: []string{"h2"}, Certificates: []tls.Certificate{stolen}}) // it is a stranger
				if foreign.HandshakeContext(ctx) == nil {
					_, _ = foreign.Read(make([]byte, 1)) // until it is disconnected
				}
				_ = c.Close()
			}
		},
		"requests with long paths": func(t *testing.T, ctx context.Context, _ *harness.Server) {
			client := &http.Client{Transport: &http.Transport{TLSClientConfig: &tls.Config{InsecureSkipVerify: true}}} // it is a stranger
			defer client.CloseIdleConnections()
			for ctx.Err() == nil {
				req, err := http.NewRequestWithContext(t.Context(), http.MethodPost, "https://"+dynamo+"/"+strings.Repeat("x", 10_000), nil)
				if err != nil {
					t.Error(err)
					return
				}
				if answer, err := client.Do(req); err == nil {
					_, _ = io.Copy(io.Discard, answer.Body)
					_ = answer.Body.Close()
				}
			}
		},
	} {
		t.Run(name, func(t *testing.T) { h.during(t, s, attack, limit) })
	}
	h.round()
	for _, kind := range []string{`msg="refused call"`, `msg="HTTP server"`, `msg="refused request"`} {
		s.AwaitLog(kind) // the attacks have reached what they attack
	}
}

// bearer is the credentials of calls with a token.
type bearer string

func (b bearer) GetRequestMetadata(context.Context, ...string) (map[string]string, error) {
	return map[string]string{"authorization": "Bearer " + string(b)}, nil
}

func (bearer) RequireTransportSecurity() bool { return true }

// TestFloodingPeerCannotEndTheProcess sends PINGs between messages and then resets the connection. libzmq aborts the
// process if it stopped the input at a high-water mark and resumes it after an error.
func TestFloodingPeerCannotEndTheProcess(t *testing.T) {
	testclass.Process(t)
	harness.ForEachTransport(t, func(t *testing.T, zmq config.ZMQ) {
		transports := []string{"--ingest-listen-transport", string(zmq), "--ingest-connect-transport", string(zmq)}
		t.Run("bound", func(t *testing.T) {
			s := serve(t, append(transports, "--bind", "tcp://127.0.0.1:*")...)
			endpoint := s.Endpoint()
			for range 2 {
				c := attack(t, endpoint)
				flood(t, c, "kv@127.0.0.9@m")
				if err := c.Reset(); err != nil {
					t.Fatal(err)
				}
			}
			s.Client() // addr waits for the server
			if rss := s.ResidentMiB(); rss > 1024 {
				t.Errorf("%d MiB resident after the flood", rss)
			}
		})
		t.Run("connected", func(t *testing.T) {
			l, err := net.ListenTCP("tcp", &net.TCPAddr{IP: net.IPv4(127, 0, 0, 1)})
			if err != nil {
				t.Fatal(err)
			}
			defer func() { _ = l.Close() }()
			s := serve(t, append(transports, "--worker", fmt.Sprintf("name=w,connect=tcp://%v", l.Addr()))...)
			for range 2 {
				c, err := rawzmtp.Accept(l, zmtp.PUB, harness.Timeout)
				if err != nil {
					t.Fatal(err)
				}
				flood(t, c, "")
				if err := c.Reset(); err != nil {
					t.Fatal(err)
				}
			}
			s.Address()
			if rss := s.ResidentMiB(); rss > 1024 {
				t.Errorf("%d MiB resident after the flood", rss)
			}
		})
	})
}

// TestProbesBesideConnectionsOfManyAddresses opens all connections that the admin port has, from addresses that each open as many as they may, and
// checks that probes of another address are answered all the same.
func TestProbesBesideConnectionsOfManyAddresses(t *testing.T) {
	testclass.Process(t)
	t.Parallel()
	s := serve(t, "--bind", "tcp://127.0.0.1:*")
	admin, err := s.Admin()
	if err != nil {
		t.Fatal(err)
	}
	full := false
	for address := byte(2); !full; address++ {
		dialer := net.Dialer{LocalAddr: &net.TCPAddr{IP: net.IPv4(127, 0, 0, address)}}
		for range 70 {
			c, err := dialer.DialContext(t.Context(), "tcp", admin)
			if err != nil {
				t.Fatal(err)
			}
			t.Cleanup(func() { _ = c.Close() })
		}
		m, err := s.Metrics(t.Context())
		if err != nil {
			t.Fatalf("%d addresses: %v", address-1, err)
		}
		full = m.Sum("kvcast_budget_used", "resource", "admin_connections") == m.Sum("kvcast_budget_limit", "resource", "admin_connections")
	}
	for range 10 {
		if _, err := s.Get(t.Context(), "/healthz"); err != nil {
			t.Error(err)
		}
	}
}

// TestNamesThatDeceiveReachNoMetric sends names with characters that are not shown, or that change the direction of text, beside an
// honest engine.
func TestNamesThatDeceiveReachNoMetric(t *testing.T) {
	testclass.Process(t)
	t.Parallel()
	s := serve(t, "--bind", "tcp://127.0.0.1:*")
	h := newHonest(t, s, s.Client())
	h.round()
	c := attack(t, s.Endpoint())
	topics := []string{"kv@a\u200b@m", "kv@a\u202eb@m", "kv@a@m\u2028", "kv@\U000e0041@m"}
	for _, topic := range topics {
		c.Message([]byte(topic), binary.BigEndian.AppendUint64(nil, 0), batchOf(t, 1))
	}
	if err := c.Flush(); err != nil {
		t.Fatal(err)
	}
	s.AwaitSample(fmt.Sprintf(`kvcast_ingest_messages_refused_total{reason="bad_name",worker=""} %d`, len(topics)))
	spec := &kvcastv1.WorkerSpec{Name: "a\u200bb", Sources: []*kvcastv1.SourceSpec{{Connect: "tcp://127.0.0.1:1"}}}
	if _, err := s.Operator().RegisterWorker(t.Context(), &kvcastv1.RegisterWorkerRequest{Worker: spec}); status.Code(err) != codes.InvalidArgument {
		t.Errorf("register: got %v, want INVALID_ARGUMENT", err)
	}
	h.round()
	metrics, err := s.Get(t.Context(), "/metrics")
	if err != nil {
		t.Fatal(err)
	}
	if i := strings.IndexFunc(metrics, func(r rune) bool { return r != '\n' && !config.Printable(string(r)) }); i >= 0 {
		t.Errorf("the metrics have %q", metrics[i:min(i+20, len(metrics))])
	}
}
