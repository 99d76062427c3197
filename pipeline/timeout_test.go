package pipeline_test

import (
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"

	"github.com/kvcast/kvcast/pipeline"
)

func pass(d time.Duration) call { return call{Pass: d} }

// TestTimeout uses a timeout of 10 s, in time that advances only on request.
func TestTimeout(t *testing.T) {
	const just = time.Nanosecond
	type step struct {
		call  call
		want  [][]string
		times [][2]int64
	}
	tests := map[string][]step{
		"a run waits as long as the timeout, and no longer": {
			{call: timedBatch(10, 0, store(1))},
			{call: pass(10*time.Second - just)},
			{call: pass(just), want: [][]string{{"store [1]"}}, times: [][2]int64{{10, 11}}},
			{call: pass(time.Hour)},
		},
		"a batch that contributes gives its times, but no more time": {
			{call: timedBatch(10, 0, store(1))},
			{call: pass(6 * time.Second)},
			{call: timedBatch(20, 0, after(1, store(2)))},
			{call: pass(4*time.Second - just)},
			{call: pass(just), want: [][]string{{"store [1 2]"}}, times: [][2]int64{{20, 21}}},
			{call: pass(time.Hour)},
		},
		"a batch that contributes nothing does not give its times": {
			{call: timedBatch(10, 0, store(1))},
			{call: timedBatch(20, 0)},
			{call: timedBatch(30, 0, store())},
			{call: pass(10 * time.Second), want: [][]string{{"store [1]"}}, times: [][2]int64{{10, 11}}},
		},
		"what a later batch flushes is part of its entry": {
			{call: timedBatch(10, 0, store(1))},
			{call: pass(time.Second)},
			{call: timedBatch(20, 0, remove(7), cleared(), store(2)),
				want: [][]string{{"store [1]", "remove [7]", textCleared}}, times: [][2]int64{{20, 21}}},
			{call: pass(10 * time.Second), want: [][]string{{"store [2]"}}, times: [][2]int64{{20, 21}}},
		},
		"a new run has all the time": {
			{call: timedBatch(10, 0, store(1))},
			{call: pass(6 * time.Second)},
			{call: timedBatch(20, 0, store(2)), want: [][]string{{"store [1]"}}, times: [][2]int64{{20, 21}}},
			{call: pass(10*time.Second - just)},
			{call: pass(just), want: [][]string{{"store [2]"}}, times: [][2]int64{{20, 21}}},
		},
		"a clear leaves no old timeout behind": {
			{call: timedBatch(10, 0, store(1))},
			{call: pass(6 * time.Second)},
			{call: timedBatch(20, 0, cleared()), want: [][]string{{"store [1]", textCleared}}, times: [][2]int64{{20, 21}}},
			{call: timedBatch(30, 0, store(2))},
			{call: pass(10*time.Second - just)},
			{call: pass(just), want: [][]string{{"store [2]"}}, times: [][2]int64{{30, 31}}},
		},
		"what is left before a gap has its own times": {
			{call: timedBatch(10, 0, store(1))},
			{call: gap(0), want: [][]string{{"store [1]"}, {textGap}}, times: [][2]int64{{10, 11}, {0, 99}}},
			{call: pass(time.Hour)},
		},
		"what is left before a restart has its own times": {
			{call: timedBatch(10, 0, store(1))},
			{call: restarted(0), want: [][]string{{"store [1]"}, {textRestarted}}, times: [][2]int64{{10, 11}, {0, 98}}},
			{call: pass(time.Hour)},
		},
		"what is left before the worker goes has its own times": {
			{call: timedBatch(10, 0, store(1))},
			{call: removed(), want: [][]string{{"store [1]"}, {"removed DISCOVERY"}}, times: [][2]int64{{10, 11}, {0, 0}}},
			{call: pass(time.Hour)},
			{call: added(), want: [][]string{{"added"}}, times: [][2]int64{{0, 0}}},
			{call: pass(time.Hour)},
		},
		"what is left at the end has its own times": {
			{call: timedBatch(10, 0, store(1))},
			{call: call{Close: true}, want: [][]string{{"store [1]"}}, times: [][2]int64{{10, 11}}},
			{call: pass(time.Hour)},
			{call: call{Close: true}},
		},
		"a run that is suppressed completely makes no entry": {
			{call: timedBatch(10, 0, store(1), store(1)), want: [][]string{{"store [1]"}}, times: [][2]int64{{10, 11}}},
			{call: timedBatch(20, 0, remove(1)), want: [][]string{{"store [1]"}}, times: [][2]int64{{20, 21}}},
			{call: pass(10 * time.Second)},
			{call: timedBatch(30, 0, remove(1))},
			{call: pass(10 * time.Second), want: [][]string{{"remove [1]"}}, times: [][2]int64{{30, 31}}},
		},
	}
	for name, steps := range tests {
		t.Run(name, func(t *testing.T) {
			withWorker(t, pipeline.Config{Timeout: 10 * time.Second}, func(t *testing.T, s *subject) {
				for i, step := range steps {
					got := s.play(t, step.call)
					if diff := cmp.Diff(step.want, describe(got), cmpopts.EquateEmpty()); diff != "" {
						t.Errorf("entries of step %d (-want +got):\n%s", i, diff)
					}
					if diff := cmp.Diff(step.times, times(got), cmpopts.EquateEmpty()); diff != "" {
						t.Errorf("times of step %d (-want +got):\n%s", i, diff)
					}
				}
			})
		})
	}
}

// TestTimeoutAppliesToItsRunOnly sends a batch at the moment a timeout expires: whichever is
// first, the batch's own run gets its full timeout.
func TestTimeoutAppliesToItsRunOnly(t *testing.T) {
	for range 200 {
		withWorker(t, pipeline.Config{Timeout: 10 * time.Second}, func(t *testing.T, s *subject) {
			s.play(t, batch(store(1)))
			<-time.After(10 * time.Second)
			s.play(t, batch(store(2)))
			if got := describe(s.play(t, pass(10*time.Second-1))); len(got) > 1 || len(got) == 1 && got[0][0] != "store [1]" {
				t.Fatalf("entries before the second timeout: got %v, want none of the second run", got)
			}
			if diff := cmp.Diff([][]string{{"store [2]"}}, describe(s.play(t, pass(1)))); diff != "" {
				t.Fatalf("entries at the second timeout (-want +got):\n%s", diff)
			}
		})
	}
}

func TestTimeoutFlushesAreCounted(t *testing.T) {
	withWorker(t, pipeline.Config{Timeout: time.Second}, func(t *testing.T, s *subject) {
		s.play(t, batch(store(1)), pass(time.Second), batch(store(2)), call{Close: true})
		got := s.metrics(t).By("kvcast_pipeline_flushes_total", "reason")
		if diff := cmp.Diff(map[string]float64{"timeout": 1, "shutdown": 1}, got); diff != "" {
			t.Errorf("reasons (-want +got):\n%s", diff)
		}
	})
}
