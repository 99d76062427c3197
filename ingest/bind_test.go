package ingest_test

import (
	"fmt"
	"strings"
	"testing"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/kvcast/kvcast/ingest/config"
	"github.com/kvcast/kvcast/internal/feed"
	"github.com/kvcast/kvcast/test/harness"
)

func TestBind(t *testing.T) {
	t.Parallel()
	tests := []struct {
		name     string
		config   config.Config // without the Bind of its only listener
		listener config.Listener
		publish  func(*engine)
		want     []string
		metrics  map[string]float64
	}{
		{
			name: "the topic has the worker and the model",
			publish: func(e *engine) {
				e.send("kv@10.0.0.1:8000@Qwen/Qwen3-0.6B", seqFrame(0), payload(0, stored(1)))
				e.send("kv@10.0.0.2:8000@m@v1", seqFrame(0), payload(0, stored(2)))
				e.send("kv@10.0.0.1:8000@Qwen/Qwen3-0.6B", seqFrame(1), payload(1, removed(1)))
			},
			want: []string{
				"add 10.0.0.1:8000 model Qwen/Qwen3-0.6B block_size 0 ranks []",
				"10.0.0.1:8000 0/0: batch 0 +[1]",
				"add 10.0.0.2:8000 model m@v1 block_size 0 ranks []",
				"10.0.0.2:8000 0/0: batch 0 +[2]",
				"10.0.0.1:8000 0/0: batch 1 -[1]",
			},
			metrics: map[string]float64{
				`batches_total{worker="10.0.0.1:8000"}`:                   2,
				`last_seq{dp_rank="0",source="0",worker="10.0.0.2:8000"}`: 0,
				`publishers{state="live"}`:                                2,
			},
		},
		{
			name: "each rank of a topic has its own seqs",
			publish: func(e *engine) {
				e.send("kv@p@m", seqFrame(0), payloadOf(0, 0, stored(1)))
				e.send("kv@p@m", seqFrame(0), payloadOf(1, 0, stored(2)))
				e.send("kv@p@m", seqFrame(1), payloadOf(1, 1, stored(3)))
				e.send("kv@p@m", seqFrame(2), payloadOf(0, 2, stored(4)))
				e.send("kv@p@m", seqFrame(0), payloadOf(1, 0, cleared()))
				e.send("kv@p@m", seqFrame(3), payloadOf(0, 3))
			},
			want: []string{
				"add p model m block_size 0 ranks []",
				"p 0/0: batch 0 +[1]",
				"p 0/1: batch 0 +[2]",
				"p 0/1: batch 1 +[3]",
				"p 0/0: gap 1-1, 1 missed",
				"p 0/0: batch 2 +[4]",
				"p 0/1: restarted",
				"p 0/1: batch 0 clear",
				"p 0/0: batch 3",
			},
		},
		{
			name: "refused messages are counted",
			config: config.Config{
				MaxWorkers: 3,
				Workers: []config.Worker{{
					Name: "taken", Sources: []config.Source{{Connect: "tcp://127.0.0.1:1"}},
				}},
			},
			publish: func(e *engine) {
				e.send("kv@p@m", seqFrame(0), payload(0))
				e.send("kv@p@other", seqFrame(0), payload(0))
				e.send("", seqFrame(0), payload(0))
				e.send("kv", seqFrame(0), payload(0))
				e.send("kv@p", seqFrame(0), payload(0))
				e.send("kv@@m", seqFrame(0), payload(0))
				e.send("kv@\xff@m", seqFrame(0), payload(0))
				e.send("kv@\x1b[2J@m", seqFrame(0), payload(0))
				e.send("kv@\u202eq@m", seqFrame(0), payload(0))
				e.send("kv@q@m\u200b", seqFrame(0), payload(0))
				e.send("kv@taken@m", seqFrame(0), payload(0))
				e.send("kv@q@m", seqFrame(0), garbage)
				e.send("kv@q@m", seqFrame(0))
				e.send("kv@q@m", seqFrame(1), payload(1))
				e.send("kv@one-too-many@m", seqFrame(0), payload(0))
				e.send("kv@p@m", seqFrame(1), payload(1))
			},
			want: []string{
				"add taken model  block_size 0 ranks [0]",
				"add p model m block_size 0 ranks []",
				"p 0/0: batch 0",
				"add q model m block_size 0 ranks []",
				"q 0/0: joined late, after 0-0",
				"q 0/0: batch 1",
				"p 0/0: batch 1",
			},
			metrics: map[string]float64{
				`messages_refused_total{reason="second_model",worker=""}`:     1,
				`messages_refused_total{reason="foreign_topic",worker=""}`:    5,
				`messages_refused_total{reason="bad_name",worker=""}`:         3,
				`messages_refused_total{reason="name_taken",worker=""}`:       1,
				`messages_refused_total{reason="wrong_frames",worker=""}`:     1,
				`messages_refused_total{reason="too_many_workers",worker=""}`: 1,
				`batches_rejected_total{error="bad_code",worker=""}`:          1,
			},
		},
		{
			name: "malformed batch",
			publish: func(e *engine) {
				e.send("kv@p@m", seqFrame(0), payload(0))
				e.send("kv@p@m", seqFrame(1), garbage)
				e.send("kv@p@m", seqFrame(2), payload(2))
				e.send("kv@p@m", seqFrame(0), payloadOf(1, 0))
				e.send("kv@p@m", seqFrame(1), garbage)
				e.send("kv@p@m", seqFrame(3), garbage)
				e.send("kv@p@m", seqFrame(4), payloadOf(0, 4))
				e.send("kv@p@m", seqFrame(2), payloadOf(1, 2))
			},
			want: []string{
				"add p model m block_size 0 ranks []",
				"p 0/0: batch 0",
				"p 0/0: gap 1-1, 1 missed", // shown by the next batch
				"p 0/0: batch 2",
				"p 0/1: batch 0",
				"p 0/0: gap 3-3, 1 missed",
				"p 0/0: batch 4",
				"p 0/1: gap 1-1, 1 missed",
				"p 0/1: batch 2",
			},
			metrics: map[string]float64{
				`batches_rejected_total{error="bad_code",worker="p"}`: 3,
			},
		},
		{
			name: "malformed batch of an unknown rank",
			publish: func(e *engine) {
				e.send("kv@p@m", seqFrame(5), payload(5))
				e.send("kv@p@m", seqFrame(6), garbage) // of rank 1
				e.send("kv@p@m", seqFrame(6), payload(6))
				e.send("kv@p@m", seqFrame(7), payloadOf(1, 7))
			},
			want: []string{
				"add p model m block_size 0 ranks []",
				"p 0/0: joined late, after 0-4",
				"p 0/0: batch 5",
				"p 0/0: batch 6",
				"p 0/1: joined late, after 0-6",
				"p 0/1: batch 7",
			},
			metrics: map[string]float64{`restarts_total{worker="p"}`: 0},
		},
		{
			name: "too long topics",
			publish: func(e *engine) {
				e.send("kv@p@m\x00"+strings.Repeat("x", 2041), seqFrame(0), payload(0))
				e.send("kv@p@m\x00"+strings.Repeat("x", 2042), seqFrame(1), payload(1))
				e.send("kv@p@m", seqFrame(2), payload(2))
			},
			want: []string{
				"add p model m block_size 0 ranks []",
				"p 0/0: batch 0",
				"p 0/0: gap 1-1, 1 missed",
				"p 0/0: batch 2",
			},
			metrics: map[string]float64{
				`messages_refused_total{reason="topic_too_long",worker=""}`: 1,
			},
		},
		{
			name:     "one worker for all, each topic a source",
			listener: config.Listener{Worker: "all"},
			publish: func(e *engine) {
				e.send("anything/at-all", seqFrame(0), payload(0, stored(1)))
				e.send("kv@p@m", seqFrame(0), payload(0, stored(2)))
				e.send("anything/at-all", seqFrame(1), payload(1, stored(3)))
				e.send("kv@p@n", seqFrame(0), payload(0, stored(4)))
			},
			want: []string{
				"add all model  block_size 0 ranks []",
				"all 0/0: batch 0 +[1]",
				"all 1/0: batch 0 +[2]",
				"all 0/0: batch 1 +[3]",
				"all 2/0: batch 0 +[4]",
			},
		},
		{
			name:     "patterns",
			listener: config.Listener{Topics: []string{"kv@10.*", "kv@*@Qwen/*"}},
			publish: func(e *engine) {
				e.send("kv@p@m", seqFrame(0), payload(0))
				e.send("kv@10.0.0.1@m/n", seqFrame(0), payload(0))
				e.send("kv@p@Qwen/Qwen3", seqFrame(0), payload(0))
			},
			want: []string{
				"add 10.0.0.1 model m/n block_size 0 ranks []",
				"10.0.0.1 0/0: batch 0",
				"add p model Qwen/Qwen3 block_size 0 ranks []",
				"p 0/0: batch 0",
			},
			metrics: map[string]float64{
				`messages_refused_total{reason="foreign_topic",worker=""}`: 1,
			},
		},
		{
			name: "by default an engine starts at 0",
			publish: func(e *engine) {
				e.send("kv@p@m", seqFrame(1), payload(1))
			},
			want: []string{"add p model m block_size 0 ranks []", "p 0/0: joined late, after 0-0", "p 0/0: batch 1"},
		},
		{
			name:     "a simulator starts at 1",
			listener: config.Listener{Engine: feed.EngineLLMDSim},
			publish: func(e *engine) {
				e.send("kv@p@m", seqFrame(1), payload(1))
				e.send("kv@q@m", seqFrame(2), payload(2))
			},
			want: []string{
				"add p model m block_size 0 ranks []", "p 0/0: batch 1",
				"add q model m block_size 0 ranks []", "q 0/0: joined late, after 1-1", "q 0/0: batch 2",
			},
		},
		{
			name:     "an epoch is no part of the topic",
			listener: config.Listener{Engine: feed.EngineSGLang},
			publish: func(e *engine) {
				e.send("kv@p@m\x00sgl-kv-epoch=1", seqFrame(0), payload(0))
				e.send("kv@p@m\x00sgl-kv-epoch=2", seqFrame(0), payload(0))
				e.send("kv@p@m\x00sgl-kv-epoch=2\x00sgl-kv-snapshot=1", seqFrame(1), payload(1))
			},
			want: []string{
				"add p model m block_size 0 ranks []",
				"p 0/0: batch 0",
				"p 0/0: restarted",
				"p 0/0: batch 0",
				"p 0/0: batch 1",
			},
		},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			tt.listener.Bind = "tcp://127.0.0.1:*"
			tt.config.Listeners = []config.Listener{tt.listener}
			registry := prometheus.NewRegistry()
			tt.config.Metrics = registry
			r := newRecorder(t)
			in, _ := start(t, tt.config, r)
			e := newEngine(t)
			e.connect(in.Endpoints()[0])
			e.awaitSubscriber("")
			tt.publish(e)
			r.want(tt.want...)
			r.wantNone()
			wantMetrics(t, registry, tt.metrics)
		})
	}
}

func TestBindBoundsRanks(t *testing.T) {
	t.Parallel()
	registry := prometheus.NewRegistry()
	r := newRecorder(t)
	in, _ := start(t, config.Config{
		Listeners: []config.Listener{{Bind: "tcp://127.0.0.1:*"}},
		Metrics:   registry,
	}, r)
	e := newEngine(t)
	e.connect(in.Endpoints()[0])
	e.awaitSubscriber("")
	want := []string{"add p model m block_size 0 ranks []"}
	for i := range uint32(feed.MaxRanks + 3) {
		rank := i * 1000
		e.send("kv@p@m", seqFrame(0), payloadOf(rank, 0))
		if i < feed.MaxRanks {
			want = append(want, fmt.Sprintf("p 0/%d: batch 0", rank))
		}
		if i%100 == 0 { // otherwise ZeroMQ drops messages of a slow reader
			r.want(want...)
			want = nil
		}
	}
	e.send("kv@p@m", seqFrame(1), payloadOf(0, 1))
	r.want(append(want, "p 0/0: batch 1")...)
	r.wantNone()
	wantMetrics(t, registry, map[string]float64{
		`messages_refused_total{reason="too_many_ranks",worker="p"}`: 3,
	})
}

func TestWorkerBelongsToOneListener(t *testing.T) {
	t.Parallel()
	registry := prometheus.NewRegistry()
	r := newRecorder(t)
	in, _ := start(t, config.Config{
		Listeners: []config.Listener{{Bind: "tcp://127.0.0.1:0"}, {Bind: "tcp://*:*"}},
		Metrics:   registry,
	}, r)
	var engines []*engine
	for _, endpoint := range in.Endpoints() {
		e := newEngine(t)
		e.connect(endpoint)
		e.awaitSubscriber("")
		engines = append(engines, e)
	}
	engines[0].send("kv@p@m", seqFrame(0), payload(0))
	r.want("add p model m block_size 0 ranks []", "p 0/0: batch 0")
	engines[1].send("kv@p@m", seqFrame(5), payload(5))
	engines[1].send("kv@q@m", seqFrame(0), payload(0))
	r.want("add q model m block_size 0 ranks []", "q 0/0: batch 0")
	r.wantNone()
	wantMetrics(t, registry, map[string]float64{
		`messages_refused_total{reason="name_taken",worker=""}`: 1,
	})
}

// A peer can make kvcast connect only to the peer's own host, or to a host in ReplayHosts.
func TestReplaysAreRequestedOnlyFromAllowedHosts(t *testing.T) {
	t.Parallel()
	tests := []struct {
		host    string
		allowed []string
		want    string // host of the replay socket; empty if none is asked
	}{
		{host: "127.0.0.1", want: "127.0.0.1"},
		{host: "engine-0.invalid", want: "127.0.0.1"},
		{host: "192.0.2.1"},
		{host: "192.0.2.1", allowed: []string{"192.0.3.0/24", "*.invalid"}},
		{host: "localhost", allowed: []string{"localhost"}, want: "localhost"},
	}
	for _, tt := range tests {
		t.Run(fmt.Sprint(tt.host, tt.allowed), func(t *testing.T) {
			var log harness.Log
			port := harness.FreePort(t)
			r := newRecorder(t)
			in, stop := start(t, config.Config{
				Logger:    log.Logger(),
				Listeners: []config.Listener{{Bind: "tcp://127.0.0.1:*", ReplayPort: port, ReplayHosts: tt.allowed}},
			}, r)
			e := newEngine(t)
			e.connect(in.Endpoints()[0])
			e.awaitSubscriber("")
			e.send("kv@"+tt.host+"@m", seqFrame(0), payload(0))
			r.want("add "+tt.host+" model m block_size 0 ranks []", tt.host+" 0/0: batch 0")
			want := ""
			if tt.want != "" {
				want = fmt.Sprintf("tcp://%s:%d", tt.want, port)
			}
			if got := in.Sources()[0].Replay; got != want {
				t.Errorf("replay socket %q, want %q", got, want)
			}
			stop()
			refused := `no replay is requested: the topic names a host that is neither the peer's address nor allowed" worker=` + tt.host
			if got := strings.Contains(log.String(), refused); got != (want == "") {
				t.Errorf("log says so: %v\n%s", got, log.String())
			}
		})
	}
}
