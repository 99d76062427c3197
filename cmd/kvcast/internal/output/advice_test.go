package output_test

import (
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/kvcast/kvcast/cmd/kvcast/internal/output"
	kvcastv1 "github.com/kvcast/kvcast/proto/kvcast/v1"
)

// TestEachReasonHasAdvice checks that a degraded rank has a line for each reason, with what to do.
func TestEachReasonHasAdvice(t *testing.T) {
	for number, name := range kvcastv1.DegradedReason_name {
		if number == 0 {
			continue
		}
		notes := output.Notes([]*kvcastv1.WorkerStatus{{Name: "w", Ranks: []*kvcastv1.RankStatus{{DpRank: 3, Reasons: []kvcastv1.DegradedReason{kvcastv1.DegradedReason(number)}}}}})
		want := "w rank 3: " + strings.ToLower(strings.TrimPrefix(name, "DEGRADED_REASON_"))
		if len(notes) != 1 || !strings.HasPrefix(notes[0], want) || strings.Count(notes[0], "; ") == 0 {
			t.Errorf("%s: got %q, want one that begins with %q and says what to do after a semicolon", name, notes, want)
		}
	}
}

func TestNotes(t *testing.T) {
	const (
		lost = kvcastv1.DegradedReason_DEGRADED_REASON_GAP
		size = kvcastv1.DegradedReason_DEGRADED_REASON_BLOCK_SIZE_MISMATCH
		down = kvcastv1.DegradedReason_DEGRADED_REASON_SOURCE_DOWN
		kept = kvcastv1.DegradedReason_DEGRADED_REASON_TIER_NOT_CLEARED
	)
	source := func(state kvcastv1.SourceState, replay kvcastv1.ReplayState) *kvcastv1.SourceStatus {
		return &kvcastv1.SourceStatus{
			Endpoint: "tcp://e:1", ReplayEndpoint: "tcp://e:2", State: state, ReplayState: replay, Started: state == kvcastv1.SourceState_SOURCE_STATE_LIVE,
		}
	}
	const (
		live, connecting = kvcastv1.SourceState_SOURCE_STATE_LIVE, kvcastv1.SourceState_SOURCE_STATE_CONNECTING
		answers, never   = kvcastv1.ReplayState_REPLAY_STATE_ANSWERS, kvcastv1.ReplayState_REPLAY_STATE_NEVER_ANSWERED
	)
	for name, c := range map[string]struct {
		rank    *kvcastv1.RankStatus
		sources []*kvcastv1.SourceStatus
		want    []string // parts of each line
	}{
		"exact":                          {&kvcastv1.RankStatus{}, []*kvcastv1.SourceStatus{source(live, answers)}, nil},
		"without a replay socket":        {&kvcastv1.RankStatus{}, []*kvcastv1.SourceStatus{source(live, kvcastv1.ReplayState_REPLAY_STATE_NONE)}, nil},
		"two reasons":                    {&kvcastv1.RankStatus{Reasons: []kvcastv1.DegradedReason{lost, size}}, nil, []string{"w rank 0: gap: ", "w rank 0: block_size_mismatch: "}},
		"a detail":                       {&kvcastv1.RankStatus{Reasons: []kvcastv1.DegradedReason{lost, size}, Detail: "16, not 32\n"}, nil, []string{"w rank 0: gap: ", "w rank 0: block_size_mismatch: 16, not 32\uFFFD: "}},
		"a detail of one of two reasons": {&kvcastv1.RankStatus{Reasons: []kvcastv1.DegradedReason{kvcastv1.DegradedReason_DEGRADED_REASON_EVENTS_SKIPPED, size}, Detail: "16, not 32"}, nil, []string{"w rank 0: events_skipped: events", "w rank 0: block_size_mismatch: blocks", "w rank 0: the last detail: 16, not 32"}},
		"a tier":                         {&kvcastv1.RankStatus{Reasons: []kvcastv1.DegradedReason{lost, kept}, TierReasons: []*kvcastv1.TierReasons{{Tier: 1, Reasons: []kvcastv1.DegradedReason{lost}}, {Tier: 2, Reasons: []kvcastv1.DegradedReason{lost, kept}}, {Tier: 3, Reasons: []kvcastv1.DegradedReason{lost, kept}}, {Tier: 4, Reasons: []kvcastv1.DegradedReason{lost}}}}, nil, []string{"w rank 0: gap: ", "w rank 0: tier_not_cleared in host_pinned, disk: "}},
		"no connection":                  {&kvcastv1.RankStatus{Reasons: []kvcastv1.DegradedReason{down}, DownNano: uint64(12 * time.Second)}, []*kvcastv1.SourceStatus{source(connecting, never)}, []string{"w rank 0: source_down 12s: no connection to tcp://e:1: "}},
		"no connection yet":              {&kvcastv1.RankStatus{}, []*kvcastv1.SourceStatus{source(connecting, never)}, []string{"w rank 0: connecting: no connection to tcp://e:1; "}},
		"silent":                         {&kvcastv1.RankStatus{}, []*kvcastv1.SourceStatus{source(kvcastv1.SourceState_SOURCE_STATE_SUSPECT, answers)}, []string{"w rank 0: suspect: "}},
		"a repair":                       {&kvcastv1.RankStatus{}, []*kvcastv1.SourceStatus{source(kvcastv1.SourceState_SOURCE_STATE_REPAIRING, answers)}, []string{"w rank 0: repairing: "}},
		"a replay socket never answers":  {&kvcastv1.RankStatus{}, []*kvcastv1.SourceStatus{source(live, never)}, []string{"w rank 0: replay never answered: tcp://e:2; "}},
		"a replay socket stops":          {&kvcastv1.RankStatus{}, []*kvcastv1.SourceStatus{source(live, kvcastv1.ReplayState_REPLAY_STATE_UNANSWERED)}, []string{"w rank 0: replay does not answer: tcp://e:2; "}},
		"a reason of a later version":    {&kvcastv1.RankStatus{Reasons: []kvcastv1.DegradedReason{29}}, nil, []string{"w rank 0: 29: "}},
	} {
		notes := output.Notes([]*kvcastv1.WorkerStatus{{Name: "w", Ranks: []*kvcastv1.RankStatus{c.rank}, Sources: c.sources}})
		if len(notes) != len(c.want) {
			t.Errorf("%s: got %q, want %q", name, notes, c.want)
			continue
		}
		for i := range notes {
			if !strings.HasPrefix(notes[i], c.want[i]) {
				t.Errorf("%s: got %q, want %q", name, notes, c.want)
			}
		}
	}
}

func TestReplayStatesHaveWords(t *testing.T) {
	var got []string
	for state := range kvcastv1.ReplayState(len(kvcastv1.ReplayState_name)) {
		got = append(got, output.ReplayState(&kvcastv1.SourceStatus{ReplayState: state}))
	}
	if diff := cmp.Diff([]string{"-", "none", "never answered", "answers", "does not answer", "another engine's"}, got); diff != "" {
		t.Errorf("(-want +got):\n%s", diff)
	}
}
