package pipeline_test

import (
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/kvcast/kvcast/internal/core/kvblock"
	"github.com/kvcast/kvcast/internal/feed"
	"github.com/kvcast/kvcast/internal/wire"
	"github.com/kvcast/kvcast/pipeline"
	"github.com/kvcast/kvcast/test/harness"
)

// metrics gathers the pipeline's metrics, and checks that it is a valid collector.
func (s *subject) metrics(t harness.Fataler) harness.Metrics {
	t.Helper()
	return harness.GatherFrom(t, s.pipeline)
}

func TestMetricsCountWhatIsEmitted(t *testing.T) {
	var got harness.Metrics
	withWorker(t, pipeline.Config{MaxBlocks: 4}, func(t *testing.T, s *subject) {
		s.play(t,
			batch(store(1, 2, 3, 4, 5), store(1)),
			batch(remove(1, 2, 9), cleared()),
			rankBatch(1, store(7)),
			gap(1), gap(1), groupsOmitted(1), groupsOmitted(1), groupsOmitted(0),
		)
		got = s.metrics(t)
	})
	tests := map[string]struct {
		metric, label string
		want          map[string]float64
	}{
		"events": {"events_total", "event", map[string]float64{
			"worker_added": 1, "stored": 4, "removed": 1, "cleared": 1, "gap": 2, "groups_omitted": 2,
		}},
		"blocks stored":      {"blocks_stored_total", "worker", map[string]float64{testWorker: 7}},
		"blocks removed":     {"blocks_removed_total", "worker", map[string]float64{testWorker: 2}},
		"removes suppressed": {"removes_suppressed_total", "worker", map[string]float64{testWorker: 1}},
		"gaps":               {"gaps_total", "worker", map[string]float64{testWorker: 2}},
		"missed batches":     {"missed_batches_total", "worker", map[string]float64{testWorker: 6}},
	}
	for name, test := range tests {
		t.Run(name, func(t *testing.T) {
			if diff := cmp.Diff(test.want, got.By("kvcast_pipeline_"+test.metric, test.label)); diff != "" {
				t.Errorf("samples (-want +got):\n%s", diff)
			}
		})
	}
}

func TestRawEventHolesAreCountedPerSource(t *testing.T) {
	raw := func(source int, ids ...uint64) call {
		b := &feed.Batch{Source: source}
		for _, id := range ids {
			// An event without effect still counts as received.
			b.Events = append(b.Events, wire.Event{Kind: wire.KindRemoved, Tier: kvblock.TierDevice, RawID: id})
		}
		return call{Worker: testWorker, Batch: b}
	}
	reaching := func(last uint64, c call) call {
		c.Batch.LastRawID = last
		return c
	}
	lost := func(last uint64) call {
		c := gap(0)
		c.Gap.LastRawID = last
		return c
	}
	tests := map[string]struct {
		calls []call
		want  map[string]float64
	}{
		"no hole":                           {[]call{raw(0, 1, 2), raw(0, 3)}, nil},
		"a hole at the beginning":           {[]call{raw(0, 3)}, map[string]float64{testWorker: 2}},
		"a hole in a batch":                 {[]call{raw(0, 1, 4)}, map[string]float64{testWorker: 2}},
		"a hole between batches":            {[]call{raw(0, 1), raw(0), raw(0, 3)}, map[string]float64{testWorker: 1}},
		"sources have numbers of their own": {[]call{raw(1, 1), raw(0, 1), raw(1, 2), raw(0, 2)}, nil},
		"holes of all sources add up": {
			[]call{raw(2, 2), raw(0, 1, 3), raw(2, 3)}, map[string]float64{testWorker: 2},
		},
		"a hole at the end of a batch":           {[]call{reaching(3, raw(0, 1))}, map[string]float64{testWorker: 2}},
		"a hole at the end is not counted again": {[]call{reaching(3, raw(0, 1)), reaching(4, raw(0, 4))}, map[string]float64{testWorker: 2}},
		"a batch of invalid events alone":        {[]call{reaching(2, raw(0))}, map[string]float64{testWorker: 2}},
		"batches that are lost":                  {[]call{raw(0, 1), lost(4)}, map[string]float64{testWorker: 3}},
		"batches that are lost, and a later one": {[]call{raw(0, 1), lost(4), raw(0, 5)}, map[string]float64{testWorker: 3}},
		"a gap is no hole by itself":             {[]call{raw(0, 1), gap(0), raw(0, 2)}, nil},
	}
	for name, test := range tests {
		t.Run(name, func(t *testing.T) {
			withWorker(t, pipeline.Config{}, func(t *testing.T, s *subject) {
				s.play(t, test.calls...)
				got := s.metrics(t).By("kvcast_pipeline_raw_event_holes_total", "worker")
				if diff := cmp.Diff(test.want, got); diff != "" {
					t.Errorf("holes (-want +got):\n%s", diff)
				}
			})
		})
	}
}

func TestRawEventHolesDoNotAffectBatching(t *testing.T) {
	withWorker(t, pipeline.Config{}, func(t *testing.T, s *subject) {
		first, second := store(1), after(1, store(2))
		first.RawID, second.RawID = 1, 5
		if diff := cmp.Diff([][]string{{"store [1 2]"}}, describe(s.play(t, batch(first, second)))); diff != "" {
			t.Errorf("entries (-want +got):\n%s", diff)
		}
	})
}

func TestRankIsIncompleteUntilItIsCleared(t *testing.T) {
	tests := map[string]struct {
		calls []call
		want  []uint32
	}{
		"not before a gap":     {[]call{batch(store(1))}, nil},
		"after a late join":    {[]call{joinedLate(2)}, []uint32{2}},
		"after a gap":          {[]call{gap(2)}, []uint32{2}},
		"after stores still":   {[]call{gap(0), batch(store(1))}, []uint32{0}},
		"not after a clear":    {[]call{gap(0), batch(cleared())}, nil},
		"not after a restart":  {[]call{joinedLate(0), restarted(0)}, nil},
		"ranks on their own":   {[]call{gap(0), gap(1), restarted(0)}, []uint32{1}},
		"not of a new worker":  {[]call{gap(0), removed(), added()}, nil},
		"again after one more": {[]call{gap(0), restarted(0), gap(0)}, []uint32{0}},
	}
	for name, test := range tests {
		t.Run(name, func(t *testing.T) {
			withWorker(t, pipeline.Config{}, func(t *testing.T, s *subject) {
				s.play(t, test.calls...)
				if diff := cmp.Diff(test.want, s.incompleteRanks(testWorker)); diff != "" {
					t.Errorf("incomplete ranks (-want +got):\n%s", diff)
				}
			})
		})
	}
}

func TestMetricsAreRemovedWithTheirWorker(t *testing.T) {
	withWorker(t, pipeline.Config{}, func(t *testing.T, s *subject) {
		s.play(t, batch(store(1)), call{Worker: "other", Add: &feed.Worker{Name: "other"}}, removed())
		for _, sample := range s.metrics(t) {
			if got, want := sample.Labels["worker"], "other"; got != want {
				t.Errorf("worker of %s: got %s, want %s", sample.Name, got, want)
			}
		}
		s.play(t, call{Worker: "other", Remove: feed.RemovedDisconnected})
		if got := s.metrics(t); len(got) > 0 {
			t.Errorf("metrics without a worker: got %v, want none", got)
		}
	})
}
