package ingest_test

import (
	"strings"
	"testing"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/kvcast/kvcast/ingest/config"
	"github.com/kvcast/kvcast/internal/feed"
)

// worker returns the configuration of a worker w with one source.
func worker(s config.Source) config.Config {
	return config.Config{Workers: []config.Worker{{
		Name: "w", Model: "m", Sources: []config.Source{s},
	}}}
}

func TestConnect(t *testing.T) {
	t.Parallel()
	tests := []struct {
		name    string
		source  config.Source
		publish func(*engine)
		want    []string
		metrics map[string]float64
	}{
		{
			name: "in order",
			publish: func(e *engine) {
				e.publish(0, stored(1, 2))
				e.publish(1, stored(3), removed(1), cleared())
				e.publish(2)
			},
			want: []string{
				"w 0/0: batch 0 +[1 2]",
				"w 0/0: batch 1 +[3] -[1] clear",
				"w 0/0: batch 2",
			},
			metrics: map[string]float64{
				`batches_total{worker="w"}`:                   3,
				`events_total{kind="stored",worker="w"}`:      2,
				`events_total{kind="removed",worker="w"}`:     1,
				`events_total{kind="cleared",worker="w"}`:     1,
				`last_seq{dp_rank="0",source="0",worker="w"}`: 2,
				`publishers{state="live"}`:                    1,
				`publishers{state="connecting"}`:              0,
				`duplicates_total{worker="w"}`:                0,
				`gaps_total{worker="w"}`:                      0,
				`restarts_total{worker="w"}`:                  0,
			},
		},
		{
			name: "other attention groups",
			publish: func(e *engine) {
				e.publish(0, storedIn(0, "full_attention", 1))
				e.publish(1, storedIn(0, "full_attention", 2), storedIn(1, "mamba", 2))
				e.publish(2, removedIn(1, 2))
				e.publish(3, removedIn(0, 2))
			},
			want: []string{
				"w 0/0: batch 0 +[1]",
				"w 0/0: batch 1 groups omitted +[2] group 1 +[2]",
				"w 0/0: batch 2 groups omitted group 1 -[2]",
				"w 0/0: batch 3 -[2]",
			},
			metrics: map[string]float64{`events_skipped_total{reason="non_main_attention_group",worker="w"}`: 0},
		},
		{
			name: "late join, then a gap",
			publish: func(e *engine) {
				e.publish(5, stored(1))
				e.publish(6, stored(2))
				e.publish(9, stored(3))
				e.publish(10, stored(4))
			},
			want: []string{
				"w 0/0: joined late, after 0-4",
				"w 0/0: batch 5 +[1]",
				"w 0/0: batch 6 +[2]",
				"w 0/0: gap 7-8, 2 missed",
				"w 0/0: batch 9 +[3]",
				"w 0/0: batch 10 +[4]",
			},
			metrics: map[string]float64{
				`gaps_total{worker="w"}`:           1,
				`missed_batches_total{worker="w"}`: 2,
			},
		},
		{
			name:   "a simulator starts at 1",
			source: config.Source{Engine: feed.EngineLLMDSim},
			publish: func(e *engine) {
				e.publish(1, stored(1))
				e.publish(1, stored(2))
			},
			want: []string{
				"w 0/0: batch 1 +[1]",
				"w 0/0: restarted",
				"w 0/0: batch 1 +[2]",
			},
		},
		{
			name: "duplicates",
			publish: func(e *engine) {
				e.publish(0, stored(1))
				e.publish(1, stored(2))
				e.publish(0, stored(1))
				e.publish(1, stored(2))
				e.publish(2, stored(3))
			},
			want: []string{
				"w 0/0: batch 0 +[1]",
				"w 0/0: batch 1 +[2]",
				"w 0/0: batch 2 +[3]",
			},
			metrics: map[string]float64{`duplicates_total{worker="w"}`: 2},
		},
		{
			name: "restarts, from the start and later",
			publish: func(e *engine) {
				e.publish(0, stored(1))
				e.publish(1, stored(2))
				e.publish(0, stored(3))
				e.publish(1, stored(4))
				e.publish(1, stored(5))
				e.publish(2, stored(6))
			},
			want: []string{
				"w 0/0: batch 0 +[1]",
				"w 0/0: batch 1 +[2]",
				"w 0/0: restarted",
				"w 0/0: batch 0 +[3]",
				"w 0/0: batch 1 +[4]",
				"w 0/0: restarted",
				"w 0/0: gap 0-0, 1 missed",
				"w 0/0: batch 1 +[5]",
				"w 0/0: batch 2 +[6]",
			},
			metrics: map[string]float64{`restarts_total{worker="w"}`: 2},
		},
		{
			name: "a restart forgets the block size of a store",
			publish: func(e *engine) {
				e.publish(0, storedBlocks(4, 1))
				e.publish(1, storedBlocks(8, 2))
				e.publish(0, storedBlocks(8, 3))
			},
			want: []string{
				"w 0/0: batch 0 +[1]",
				"w 0/0: batch 1",
				"w 0/0: restarted",
				"w 0/0: batch 0 +[3]",
			},
			metrics: map[string]float64{
				`events_skipped_total{reason="block_size_mismatch",worker="w"}`: 1,
			},
		},
		{
			name: "a restart forgets the attention groups",
			publish: func(e *engine) {
				e.publish(0, storedIn(1, "full_attention", 1))
				e.publish(1, removedIn(1, 1))
				e.publish(0, removedIn(1, 2))
			},
			want: []string{
				"w 0/0: batch 0 +[1]",
				"w 0/0: batch 1 -[1]",
				"w 0/0: restarted",
				"w 0/0: batch 0 groups omitted group 1 -[2]",
			},
		},
		{
			name: "only the malformed batch is lost",
			publish: func(e *engine) {
				e.publish(0, stored(1))
				e.send("", seqFrame(1), garbage)
				e.send("", seqFrame(1), garbage)
				e.publish(2, stored(2))
				e.send("", seqFrame(5), garbage)
				e.publish(6, stored(3))
				e.send("", seqFrame(0), garbage)
				e.publish(1, stored(4))
			},
			want: []string{
				"w 0/0: batch 0 +[1]",
				"w 0/0: gap 1-1, 1 missed",
				"w 0/0: batch 2 +[2]",
				"w 0/0: gap 3-5, 3 missed",
				"w 0/0: batch 6 +[3]",
				"w 0/0: restarted",
				"w 0/0: gap 0-0, 1 missed",
				"w 0/0: batch 1 +[4]",
			},
			metrics: map[string]float64{
				`batches_rejected_total{error="bad_code",worker="w"}`: 3,
				`duplicates_total{worker="w"}`:                        1,
				`gaps_total{worker="w"}`:                              3,
				`missed_batches_total{worker="w"}`:                    5,
			},
		},
		{
			name: "the first batch is malformed",
			publish: func(e *engine) {
				e.send("", seqFrame(3), garbage)
				e.publish(4, stored(1))
			},
			want: []string{
				"w 0/0: joined late, after 0-2",
				"w 0/0: gap 3-3, 1 missed",
				"w 0/0: batch 4 +[1]",
			},
		},
		{
			name: "malformed messages",
			publish: func(e *engine) {
				e.publish(0, stored(1))
				e.send("")
				e.send("", seqFrame(1))
				e.send("", seqFrame(1), payload(1), "more")
				e.send("", "seq", payload(1))
				e.send("", "", "")
				e.send(strings.Repeat("x", 2049), seqFrame(1), payload(1))
				e.publish(2, stored(2))
				e.send(strings.Repeat("x", 2048), seqFrame(3), payload(3))
			},
			want: []string{
				"w 0/0: batch 0 +[1]",
				"w 0/0: gap 1-1, 1 missed",
				"w 0/0: batch 2 +[2]",
				"w 0/0: batch 3",
			},
			metrics: map[string]float64{
				`messages_refused_total{reason="topic_too_long",worker="w"}`: 1,
				`messages_refused_total{reason="wrong_frames",worker="w"}`:   3,
				`messages_refused_total{reason="bad_seq",worker="w"}`:        2,
			},
		},
		{
			name: "a batch may have another rank, and a loss is reported for all ranks",
			publish: func(e *engine) {
				e.send("", seqFrame(0), payloadOf(7, 0, stored(1)))
				e.send("", seqFrame(2), payloadOf(7, 2, stored(2)))
				e.send("", seqFrame(3), payloadOf(8, 3, stored(3)))
				e.send("", seqFrame(5), payloadOf(7, 5, stored(4)))
				e.send("", seqFrame(6), garbage)
				e.send("", seqFrame(7), payload(7))
				e.send("", seqFrame(0), payloadOf(8, 0, cleared()))
			},
			want: []string{
				"w 0/7: batch 0 +[1]",
				"w 0/7: gap 1-1, 1 missed",
				"w 0/7: batch 2 +[2]",
				"w 0/8: joined late, after 0-0",
				"w 0/8: batch 3 +[3]",
				"w 0/7: gap 4-4, 1 missed",
				"w 0/8: gap 4-4, 1 missed",
				"w 0/7: batch 5 +[4]",
				"w 0/7: gap 6-6, 1 missed",
				"w 0/8: gap 6-6, 1 missed",
				"w 0/0: joined late, after 0-0",
				"w 0/0: batch 7",
				"w 0/7: restarted",
				"w 0/8: restarted",
				"w 0/0: restarted",
				"w 0/8: batch 0 clear",
			},
			metrics: map[string]float64{
				`gaps_total{worker="w"}`:     3,
				`restarts_total{worker="w"}`: 1,
			},
		},
		{
			name:   "a new epoch in the topic is a restart",
			source: config.Source{Engine: feed.EngineSGLang, Topic: "kv"},
			publish: func(e *engine) {
				e.send("kv\x00sgl-kv-epoch=a1", seqFrame(0), payload(0, stored(1)))
				e.send("kv\x00sgl-kv-epoch=a1\x00sgl-kv-snapshot=5", seqFrame(1), payload(1))
				e.send("kv\x00sgl-kv-epoch=a1", seqFrame(2), payload(2, stored(2)))
				e.send("kv\x00sgl-kv-epoch=b2", seqFrame(3), payload(3, stored(3)))
				e.send("kv\x00sgl-kv-epoch=c3", seqFrame(0), payload(0, stored(4)))
			},
			want: []string{
				"w 0/0: batch 0 +[1]",
				"w 0/0: batch 1",
				"w 0/0: batch 2 +[2]",
				"w 0/0: restarted",
				"w 0/0: gap 0-2, 3 missed",
				"w 0/0: batch 3 +[3]",
				"w 0/0: restarted",
				"w 0/0: batch 0 +[4]",
			},
		},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			e := newEngine(t)
			tt.source.Connect = e.mustBind("tcp://127.0.0.1:*")
			c := worker(tt.source)
			registry := prometheus.NewRegistry()
			c.Metrics = registry
			r := newRecorder(t)
			start(t, c, r)
			e.awaitSubscriber(tt.source.Topic)
			tt.publish(e)
			r.want(append([]string{"add w model m block_size 0 ranks [0]"}, tt.want...)...)
			r.wantNone()
			wantMetrics(t, registry, tt.metrics)
		})
	}
}
