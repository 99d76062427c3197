package ingest_test

import (
	"bytes"
	"fmt"
	"log/slog"
	"path/filepath"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/prometheus/client_golang/prometheus"
	"github.com/tinylib/msgp/msgp"

	"github.com/kvcast/kvcast/ingest"
	"github.com/kvcast/kvcast/ingest/config"
	"github.com/kvcast/kvcast/internal/feed"
	"github.com/kvcast/kvcast/internal/loglimit"
	"github.com/kvcast/kvcast/test/harness"
	"github.com/kvcast/kvcast/test/harness/enginetest"
)

func TestConnectReadsEachRankOnItsPort(t *testing.T) {
	t.Parallel()
	engines, first := newEngines(t, 2)
	c := worker(config.Source{Connect: first, DPSize: 2})
	c.Workers[0].BlockSize = blockSize
	r := newRecorder(t)
	start(t, c, r)
	r.want("add w model m block_size 4 ranks [0 1]")
	for _, e := range engines {
		e.awaitSubscriber("")
	}
	engines[0].publish(0, stored(1))
	r.want("w 0/0: batch 0 +[1]")
	engines[1].publish(4, stored(2))
	r.want("w 0/1: joined late, after 0-3", "w 0/1: batch 4 +[2]")
	engines[0].publish(2, stored(3))
	r.want("w 0/0: gap 1-1, 1 missed", "w 0/0: batch 2 +[3]")
	engines[1].publish(5, cleared())
	r.want("w 0/1: batch 5 clear")
	engines[0].publish(0)
	r.want("w 0/0: restarted", "w 0/0: batch 0")
	r.wantNone()
}

// TestTwoPublishersOfARankAreAConflict has engines at two ports whose batches name one dp rank: what kvcast knows of it is
// mixed. Neither clears nor restarts of one of them end that.
func TestTwoPublishersOfARankAreAConflict(t *testing.T) {
	t.Parallel()
	engines, first := newEngines(t, 2)
	r := newRecorder(t)
	start(t, worker(config.Source{Connect: first, DPSize: 2}), r)
	r.want("add w model m block_size 0 ranks [0 1]")
	for _, e := range engines {
		e.awaitSubscriber("")
	}
	publish := func(e *engine, seq uint64, events ...[]byte) { e.send("", seqFrame(seq), payloadOf(0, seq, events...)) }
	publish(engines[0], 0, stored(1))
	r.want("w 0/0: batch 0 +[1]")
	publish(engines[1], 0, stored(2))
	r.want("w 0/0: gap ambiguous_publisher 0-0, 0 missed", "w 0/0: batch 0 +[2]")
	publish(engines[1], 1, stored(3))
	r.want("w 0/0: batch 1 +[3]")
	publish(engines[0], 1, cleared(), stored(4))
	r.want("w 0/0: batch 1 clear +[4]", "w 0/0: gap ambiguous_publisher 0-0, 0 missed")
	publish(engines[1], 0, stored(5))
	r.want("w 0/0: restarted", "w 0/0: gap ambiguous_publisher 0-0, 0 missed", "w 0/0: batch 0 +[5]")
	r.wantNone()
}

// TestConnectReadsRanksAtAnyPorts checks ranks that do not begin with 0, at ports that the system chose.
func TestConnectReadsRanksAtAnyPorts(t *testing.T) {
	t.Parallel()
	ranks := []config.RankEndpoints{{Rank: 6}, {Rank: 4}}
	engines := make([]*engine, len(ranks))
	for i := range ranks {
		engines[i] = newEngine(t)
		ranks[i].Connect = engines[i].mustBind("tcp://127.0.0.1:*")
	}
	r := newRecorder(t)
	in, _ := start(t, worker(config.Source{Connect: ranks[0].Connect, DPSize: 2, Ranks: ranks}), r)
	r.want("add w model m block_size 0 ranks [4 6]")
	for i, e := range engines {
		e.awaitSubscriber("")
		e.publish(0, stored(1))
		r.want(fmt.Sprintf("w 0/%d: batch 0 +[1]", ranks[i].Rank))
		if s := in.Sources()[i]; s.Rank != ranks[i].Rank || s.Endpoint != ranks[i].Connect {
			t.Errorf("source %+v, want %+v", s, ranks[i])
		}
	}
}

func TestConnectOverIPC(t *testing.T) {
	t.Parallel()
	path := filepath.Join(t.TempDir(), "kv")
	rank0, rank1 := newEngine(t), newEngine(t)
	rank0.mustBind("ipc://" + path)
	rank1.mustBind("ipc://" + path + "_dp1")
	r := newRecorder(t)
	start(t, worker(config.Source{Engine: feed.EngineTRTLLM, Connect: "ipc://" + path, DPSize: 2}), r)
	r.want("add w model m block_size 0 ranks [0 1]")
	rank0.awaitSubscriber("")
	rank1.awaitSubscriber("")
	rank1.publish(0, stored(1))
	r.want("w 0/1: batch 0 +[1]")
	rank0.publish(0, stored(2))
	r.want("w 0/0: batch 0 +[2]")
}

func TestConnectAgainAfterARestart(t *testing.T) {
	t.Parallel()
	e := newEngine(t)
	endpoint := e.mustBind("tcp://127.0.0.1:*")
	r := newRecorder(t)
	start(t, worker(config.Source{Connect: endpoint}), r)
	e.awaitSubscriber("")
	e.publish(0, stored(1))
	r.want("add w model m block_size 0 ranks [0]", "w 0/0: batch 0 +[1]")
	e.Close()

	e = newEngine(t)
	e.mustBind(endpoint)
	e.awaitSubscriber("")
	e.publish(0, stored(2))
	r.want("w 0/0: gap possible_restart 0-0, 0 missed", "w 0/0: restarted", "w 0/0: batch 0 +[2]")
}

// largest returns a batch of transport.MaxPayloadBytes plus extra bytes.
func largest(extra int) []byte {
	const most = 8 << 20
	b := payload(0)
	b[0] += 2 // two more elements: a nil rank, and an element that is ignored
	b = msgp.AppendNil(b)
	return msgp.AppendBytes(b, make([]byte, most+extra-len(b)-5))
}

// TestConnectRefusesTooLongMessages checks that libzmq refuses the message, and that the native transport
// disconnects, because a message may not use more memory.
func TestConnectRefusesTooLongMessages(t *testing.T) {
	t.Parallel()
	harness.ForEachTransport(t, func(t *testing.T, zmq config.ZMQ) {
		e := newEngine(t)
		c := worker(config.Source{Connect: e.mustBind("tcp://127.0.0.1:*")})
		registry := prometheus.NewRegistry()
		c.Metrics, c.ConnectZMQ = registry, zmq
		r := newRecorder(t)
		start(t, c, r)
		e.awaitSubscriber("")
		e.send("", seqFrame(0), largest(0))
		r.want("add w model m block_size 0 ranks [0]", "w 0/0: batch 0")
		e.send("", seqFrame(1), largest(1))
		refused := 1.0
		if zmq == config.ZMQNative {
			refused = 0
			r.want("w 0/0: gap possible_restart 0-0, 0 missed")
			e.awaitSubscriber("")
		}
		e.publish(2)
		r.want("w 0/0: gap 1-1, 1 missed", "w 0/0: batch 2")
		wantMetrics(t, registry, map[string]float64{
			`messages_refused_total{reason="message_too_long",worker="w"}`: refused,
		})
	})
}

func TestBindDisconnectsPeersWithTooLongMessages(t *testing.T) {
	t.Parallel()
	r := newRecorder(t)
	in, _ := start(t, config.Config{Listeners: []config.Listener{{Bind: "tcp://127.0.0.1:*"}}}, r)
	e := newEngine(t)
	e.connect(in.Endpoints()[0])
	e.awaitSubscriber("")
	e.send("kv@p@m", seqFrame(0), largest(0))
	r.want("add p model m block_size 0 ranks []", "p 0/0: batch 0")
	e.send("kv@p@m", seqFrame(1), largest(1))
	e.awaitSubscriber("")
	e.send("kv@p@m", seqFrame(2), payload(2))
	r.want("p 0/0: gap possible_restart 0-0, 0 missed", "p 0/0: gap 1-1, 1 missed", "p 0/0: batch 2")
}

func TestSourcesOfAWorkerAreDistinguished(t *testing.T) {
	t.Parallel()
	vllm, kvbm := newEngine(t), newEngine(t)
	c := worker(config.Source{Connect: vllm.mustBind("tcp://127.0.0.1:*"), Topic: "kv-"})
	c.Workers[0].Sources = append(c.Workers[0].Sources,
		config.Source{Engine: feed.EngineKVBM, Connect: kvbm.mustBind("tcp://127.0.0.1:*")})
	r := newRecorder(t)
	start(t, c, r)
	r.want("add w model m block_size 0 ranks [0]")
	vllm.awaitSubscriber("kv-")
	kvbm.awaitSubscriber("")
	vllm.send("other", seqFrame(0), payload(0)) // not subscribed to
	vllm.send("kv-events", seqFrame(0), payload(0, stored(1)))
	r.want("w 0/0: batch 0 +[1]")
	kvbm.publish(0, stored(2))
	r.want("w 1/0: batch 0 +[2]")
	kvbm.publish(0, cleared())
	r.want("w 1/0: restarted", "w 1/0: batch 0 clear")
	r.wantNone()
}

// A node of a larger deployment has the ranks from its first one on, and no rank 0 that would go down in place of one of them.
func TestRanksCountFromTheFirst(t *testing.T) {
	t.Parallel()
	engines, first := newEngines(t, 2)
	r := newRecorder(t)
	in, _ := start(t, worker(config.Source{Connect: first, FirstRank: 4, DPSize: 2}), r)
	r.want("add w model m block_size 0 ranks [4 5]")
	for _, e := range engines {
		e.awaitSubscriber("")
	}
	engines[1].send("", seqFrame(0), payloadOf(5, 0, stored(1)))
	r.want("w 0/5: batch 0 +[1]")
	engines[0].publish(0, stored(2)) // without a rank, as an engine that does not say its own
	r.want("w 0/4: batch 0 +[2]")
	engines[0].Close()
	awaitState(t, in, 0, ingest.SourceConnecting)
	var ranks []uint32
	for _, s := range in.Sources() {
		ranks = append(ranks, s.Rank)
		if isDown := !s.DownSince.IsZero(); isDown != (s.Rank == 4) {
			t.Errorf("rank %d is down: %v", s.Rank, isDown)
		}
	}
	if d := cmp.Diff([]uint32{4, 5}, ranks); d != "" {
		t.Errorf("ranks (-want +got):\n%s", d)
	}
	r.wantNone()
}

// A source follows the ranks that its batches name: their blocks are known by its connection, whatever rank is configured.
func TestSourceHasTheRanksOfItsBatches(t *testing.T) {
	t.Parallel()
	e := newEngine(t)
	r := newRecorder(t)
	in, _ := start(t, worker(config.Source{Connect: e.mustBind("tcp://127.0.0.1:*")}), r)
	r.want("add w model m block_size 0 ranks [0]")
	ranks := func() []uint32 {
		of := in.Sources()[0]
		return of.Ranks()
	}
	if d := cmp.Diff([]uint32{0}, ranks()); d != "" {
		t.Errorf("before a batch (-want +got):\n%s", d)
	}
	e.awaitSubscriber("")
	e.send("", seqFrame(0), payloadOf(4, 0, stored(1)))
	r.want("w 0/4: batch 0 +[1]")
	if d := cmp.Diff([]uint32{4}, ranks()); d != "" {
		t.Errorf("after a batch of rank 4 (-want +got):\n%s", d)
	}
	e.send("", seqFrame(1), payloadOf(6, 1, stored(2)))
	r.want("w 0/6: batch 1 +[2]")
	if d := cmp.Diff([]uint32{4, 6}, ranks()); d != "" {
		t.Errorf("after one of rank 6 (-want +got):\n%s", d)
	}
}

// A source whose first rank is configured is that rank: a batch that says another one is a mistake in the configuration.
func TestRankMismatchOfAConfiguredFirstRankIsLogged(t *testing.T) {
	t.Parallel()
	var log harness.Log
	e := newEngine(t)
	c := worker(config.Source{Connect: e.mustBind("tcp://127.0.0.1:*"), FirstRank: 4})
	c.Logger = log.Logger()
	r := newRecorder(t)
	_, stop := start(t, c, r)
	e.awaitSubscriber("")
	e.send("", seqFrame(0), payloadOf(5, 0, stored(1)))
	r.want("add w model m block_size 0 ranks [4]", "w 0/5: batch 0 +[1]")
	stop()
	if !strings.Contains(log.String(), "batch names another dp rank than its endpoint") {
		t.Errorf("no warning of the rank in:\n%s", log.String())
	}
}

func TestManyWorkers(t *testing.T) {
	t.Parallel()
	const workers, batches = 20, 50
	var c config.Config
	var engines []*engine
	for i := range workers {
		e := newEngine(t)
		engines = append(engines, e)
		c.Workers = append(c.Workers, config.Worker{
			Name:    fmt.Sprint(i),
			Sources: []config.Source{{Connect: e.mustBind("tcp://127.0.0.1:*")}},
		})
	}
	r := newRecorder(t)
	start(t, c, r)
	for i := range workers {
		r.want(fmt.Sprintf("add %d model  block_size 0 ranks [0]", i))
	}
	for _, e := range engines {
		e.awaitSubscriber("")
	}
	for seq := range uint64(batches) {
		for _, e := range engines {
			e.publish(seq, stored(seq))
		}
	}
	next := make(map[string]int)
	for range workers * batches {
		var name string
		var source, rank, seq int
		line := r.next()
		if _, err := fmt.Sscanf(line, "%s %d/%d: batch %d", &name, &source, &rank, &seq); err != nil {
			t.Fatalf("call %q: %v", line, err)
		}
		if seq != next[name] {
			t.Fatalf("worker %s: batch %d, want %d", name, seq, next[name])
		}
		next[name]++
	}
	r.wantNone()
}

func TestMoreSourcesThanAContextHasSocketsByDefault(t *testing.T) {
	t.Parallel()
	const workers = 1100
	e := newEngineOf(t, enginetest.Config{HighWaterMark: -1})
	bound := e.mustBind("tcp://*:*")
	port := bound[strings.LastIndexByte(bound, ':')+1:]
	var c config.Config
	for i := range workers { // each at another address of the loopback interface
		endpoint := fmt.Sprintf("tcp://127.0.%d.%d:%s", i/250, i%250+1, port)
		c.Workers = append(c.Workers, config.Worker{
			Name: fmt.Sprint(i), Sources: []config.Source{{Connect: endpoint}},
		})
	}
	r := newRecorder(t)
	start(t, c, r)
	for range workers {
		e.awaitSubscriber("")
	}
	e.publish(0)
	for i := range workers {
		r.want(fmt.Sprintf("add %d model  block_size 0 ranks [0]", i))
	}
	for range workers {
		if line := r.next(); !strings.HasSuffix(line, " 0/0: batch 0") {
			t.Fatalf("call %q, want a batch 0", line)
		}
	}
}

func TestLogHasNoLineForEachBatch(t *testing.T) {
	t.Parallel()
	var log bytes.Buffer
	e := newEngine(t)
	c := worker(config.Source{Connect: e.mustBind("tcp://127.0.0.1:*")})
	c.Logger = slog.New(loglimit.NewHandler(slog.NewTextHandler(&log, &slog.HandlerOptions{Level: slog.LevelDebug})))
	r := newRecorder(t)
	_, stop := start(t, c, r)
	e.awaitSubscriber("")
	const batches = 200
	for seq := range uint64(batches) {
		e.publish(2 * seq)
	}
	for range 1 + 2*batches - 1 { // AddWorker, then batches with a gap between each two
		r.next()
	}
	stop()
	if n := strings.Count(log.String(), "\n"); n == 0 || n > 5+loglimit.Burst {
		t.Errorf("%d lines logged:\n%s", n, log.String())
	}
}
