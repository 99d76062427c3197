package pipeline_test

import (
	"fmt"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"google.golang.org/protobuf/testing/protocmp"

	"github.com/kvcast/kvcast/internal/feed"
	"github.com/kvcast/kvcast/pipeline"
)

func TestConfig(t *testing.T) {
	tests := map[string]struct {
		cfg  pipeline.Config
		want string // prefix of the error; "" for none
	}{
		"zero":                   {},
		"smallest cap":           {cfg: pipeline.Config{MaxBlocks: 1}},
		"largest cap":            {cfg: pipeline.Config{MaxBlocks: 16_384}},
		"negative cap":           {cfg: pipeline.Config{MaxBlocks: -1}, want: "batch.max_blocks: -1 "},
		"too large a cap":        {cfg: pipeline.Config{MaxBlocks: 16_385}, want: "batch.max_blocks: 16385 "},
		"longest timeout":        {cfg: pipeline.Config{Timeout: 15 * time.Second}},
		"negative timeout":       {cfg: pipeline.Config{Timeout: -1}, want: "batch.timeout: -1ns "},
		"too long a timeout":     {cfg: pipeline.Config{Timeout: 15*time.Second + 1}, want: "batch.timeout: 15.000000001s "},
		"report gaps":            {cfg: pipeline.Config{OnGap: pipeline.OnGapReport}},
		"clear on gaps":          {cfg: pipeline.Config{OnGap: pipeline.OnGapClear}},
		"something else on gaps": {cfg: pipeline.Config{OnGap: "drop"}, want: `ingest.on_gap: "drop" is not allowed: want report or clear`},
		"smallest bound":         {cfg: pipeline.Config{MaxBlocksPerRank: 1}},
		"largest bound":          {cfg: pipeline.Config{MaxBlocksPerRank: 1<<31 - 1}},
		"negative bound":         {cfg: pipeline.Config{MaxBlocksPerRank: -1}, want: "ingest.max_blocks_per_rank: -1 is not allowed: want 1 to 2147483647"},
		"too large a bound":      {cfg: pipeline.Config{MaxBlocksPerRank: 1 << 31}, want: "ingest.max_blocks_per_rank: 2147483648 "},
		"the first of two errs":  {cfg: pipeline.Config{Timeout: -1, MaxBlocks: -1}, want: "batch.timeout: "},
	}
	for name, test := range tests {
		t.Run(name, func(t *testing.T) {
			for by, err := range map[string]error{"Validate": test.cfg.Validate(), "New": newError(test.cfg)} {
				switch {
				case test.want == "" && err != nil:
					t.Errorf("%s: got error %v, want none", by, err)
				case test.want != "" && (err == nil || !strings.HasPrefix(err.Error(), test.want)):
					t.Errorf("%s: got error %v, want %s...", by, err, test.want)
				case err != nil && !strings.Contains(err.Error(), " is not allowed: want "):
					t.Errorf("%s: got error %v, want one that names the allowed values", by, err)
				}
			}
		})
	}
}

func newError(cfg pipeline.Config) error {
	_, err := pipeline.New(cfg, newRecorder())
	return err
}

func TestDefaultCapIs128(t *testing.T) {
	hashes := make([]uint64, 129)
	for i := range hashes {
		hashes[i] = uint64(i)
	}
	withWorker(t, pipeline.Config{}, func(t *testing.T, s *subject) {
		events := s.play(t, batch(store(hashes...)))[0].GetEvents()
		if got, want := len(events), 2; got != want {
			t.Fatalf("events: got %d, want %d", got, want)
		}
		if got, want := len(events[0].GetStored().GetBlockHashes()), 128; got != want {
			t.Errorf("blocks of the first event: got %d, want %d", got, want)
		}
	})
}

func TestEventIDsContinueWhenAWorkerReturns(t *testing.T) {
	other := call{Worker: "other", Add: &feed.Worker{Name: "other"}}
	withWorker(t, pipeline.Config{}, func(t *testing.T, s *subject) {
		got := s.play(t, batch(store(1)), other, removed(), added(), batch(store(1), store(2)), removed(), added())
		if diff := cmp.Diff([]uint64{2, 3, 4, 5, 6, 7, 8}, eventIDs(got)); diff != "" {
			t.Errorf("event ids (-want +got):\n%s", diff)
		}
		if diff := cmp.Diff([]uint64{1}, eventIDs(s.journal.all()["other"])); diff != "" {
			t.Errorf("event ids of another worker (-want +got):\n%s", diff)
		}
	})
}

func TestRemoveOfAnUnknownWorkerDoesNothing(t *testing.T) {
	withWorker(t, pipeline.Config{}, func(t *testing.T, s *subject) {
		s.remove("nobody", feed.RemovedDiscovery)
		if got := s.journal.all()["nobody"]; got != nil {
			t.Errorf("entries: got %v, want none", got)
		}
	})
}

func TestClosedLaneIgnoresEvents(t *testing.T) {
	tests := map[string]call{
		"close":  {Close: true},
		"remove": removed(),
	}
	for name, end := range tests {
		t.Run(name, func(t *testing.T) {
			withWorker(t, pipeline.Config{Timeout: time.Second}, func(t *testing.T, s *subject) {
				lane := s.lanes[testWorker]
				s.play(t, end)
				s.lanes[testWorker] = lane
				got := s.play(t,
					batch(store(1), cleared()), gap(0), restarted(0), joinedLate(0), pass(time.Minute), call{Close: true},
				)
				if len(got) > 0 {
					t.Errorf("entries: got %v, want none", describe(got))
				}
			})
		})
	}
}

// busyWorker adds and removes a worker repeatedly, and sends batches whose runs continue one
// another.
func busyWorker(p *pipeline.Pipeline, name string, rounds int) {
	for range rounds {
		lane := p.AddWorker(feed.Worker{Name: name})
		for i := range uint64(20) {
			lane.Batch(&feed.Batch{Events: batch(after(i, store(i+1)), after(i+1, store(i+2))).Batch.Events})
			if i%7 == 0 {
				lane.Batch(batch(remove(i), cleared()).Batch)
				lane.Gap(feed.Gap{Reason: feed.GapReplayForgotten})
				lane.Restarted(feed.Restart{})
				lane.Gap(feed.Gap{Reason: feed.GapJoinedLate})
			}
		}
		p.RemoveWorker(name, feed.RemovedDiscovery)
	}
}

func TestLanesAreIndependent(t *testing.T) {
	tests := map[string]time.Duration{
		"without timeout":     0,
		"with a timer's help": 50 * time.Microsecond,
	}
	for name, timeout := range tests {
		t.Run(name, func(t *testing.T) {
			s, err := newSubject(pipeline.Config{Timeout: timeout})
			if err != nil {
				t.Fatal(err)
			}
			const rounds = 20
			var workers sync.WaitGroup
			for i := range 4 {
				workers.Go(func() { busyWorker(s.pipeline, fmt.Sprint("worker-", i), rounds) })
			}
			for range 20 {
				s.metrics(t)
			}
			workers.Wait()
			s.close()
			if err := s.journal.err(); err != nil {
				t.Fatal(err)
			}
			if got, want := len(s.journal.all()), 4; got != want {
				t.Errorf("workers: got %d, want %d", got, want)
			}
			for worker, entries := range s.journal.all() {
				for i, id := range eventIDs(entries) {
					if want := uint64(i + 1); id != want {
						t.Fatalf("event id of %s: got %d, want %d", worker, id, want)
					}
				}
				all := describe(entries)
				if got, want := all[len(all)-1][0], "removed DISCOVERY"; got != want {
					t.Errorf("last event of %s: got %s, want %s", worker, got, want)
				}
			}
		})
	}
}

// TestCloseDuringBatches closes a pipeline while batches arrive. A batch is emitted or
// dropped, but no call blocks, and nothing is emitted after Close.
func TestCloseDuringBatches(t *testing.T) {
	for range 20 {
		s, err := newSubject(pipeline.Config{Timeout: 50 * time.Microsecond})
		if err != nil {
			t.Fatal(err)
		}
		var workers sync.WaitGroup
		working := make(chan struct{}, 4)
		for i := range 4 {
			lane := s.pipeline.AddWorker(feed.Worker{Name: fmt.Sprint("worker-", i)})
			workers.Go(func() {
				for n := range uint64(200) {
					lane.Batch(batch(after(n, store(n+1))).Batch)
					if n == 10 {
						working <- struct{}{}
					}
				}
			})
		}
		<-working
		s.close()
		atClose := s.journal.all()
		workers.Wait()
		if diff := cmp.Diff(atClose, s.journal.all(), protocmp.Transform()); diff != "" {
			t.Fatalf("entries after Close (-at Close +when all was done):\n%s", diff)
		}
		if err := s.journal.err(); err != nil {
			t.Fatal(err)
		}
		r := newRouter()
		r.apply(s.journal.all())
		if diff := cmp.Diff(s.tables(), r.blocks); diff != "" {
			t.Fatalf("router's blocks (-tables +got):\n%s", diff)
		}
	}
}

func TestClosedPipelineEmitsNothing(t *testing.T) {
	j := &nowhere{}
	p, err := pipeline.New(pipeline.Config{}, j)
	if err != nil {
		t.Fatal(err)
	}
	p.AddWorker(feed.Worker{Name: "known"})
	closePipeline(t, p)
	before := j.bytes
	lane := p.AddWorker(feed.Worker{Name: "late"})
	lane.Batch(batch(store(1)).Batch)
	p.RemoveWorker("late", feed.RemovedDiscovery)
	p.RemoveWorker("known", feed.RemovedDiscovery)
	closePipeline(t, p)
	if j.bytes != before {
		t.Errorf("%d bytes were appended after Close", j.bytes-before)
	}
}
