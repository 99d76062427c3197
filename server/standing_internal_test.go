package server

import (
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	kvcastv1 "github.com/kvcast/kvcast/proto/kvcast/v1"
	"github.com/kvcast/kvcast/server/match"
)

func TestStanding(t *testing.T) {
	now := time.Now()
	ago := func(d time.Duration) time.Time { return now.Add(-d) }
	const second = uint64(time.Second)
	of := func(k Knowledge) match.Standing {
		r := standing{knowledge: func() Knowledge { return k }}
		lookup := r.lookup(now)
		if lookup == nil {
			return match.Standing{}
		}
		return lookup("w", 1)
	}
	const limit = 3 * time.Second
	for name, tt := range map[string]struct {
		knowledge Knowledge
		want      match.Standing
	}{
		"no limit":                 {Knowledge{}, match.Standing{}},
		"up to date":               {Knowledge{Limit: limit, Others: now}, match.Standing{}},
		"at the limit":             {Knowledge{Limit: limit, Others: ago(limit)}, match.Standing{Age: 3 * second}},
		"beyond the limit":         {Knowledge{Limit: limit, Others: ago(limit + 1)}, match.Standing{Age: 3*second + 1, Stale: true}},
		"a worker of its own time": {Knowledge{Limit: limit, Others: ago(limit + 1), Confirmed: map[string]time.Time{"w": ago(time.Second)}}, match.Standing{Age: second}},
		"another worker":           {Knowledge{Limit: limit, Others: now, Confirmed: map[string]time.Time{"v": ago(time.Hour)}}, match.Standing{}},
		"never known":              {Knowledge{Limit: limit}, match.Standing{Age: unknownAge, Stale: true}},
		"a worker that nobody owns": {Knowledge{Limit: limit, Others: ago(time.Second), Unowned: map[string]bool{"w": true}},
			match.Standing{Age: second, Stale: true}},
		"a replay":                  {Knowledge{Limit: limit, Others: ago(time.Second), Behind: []RankSince{{"w", 1, 5 * time.Second}}}, match.Standing{Age: 5 * second, Stale: true}},
		"a replay of another rank":  {Knowledge{Limit: limit, Others: ago(time.Second), Behind: []RankSince{{"w", 2, 5 * time.Second}}}, match.Standing{Age: second}},
		"the longest of two":        {Knowledge{Limit: limit, Others: now, Behind: []RankSince{{"w", 1, time.Second}, {"w", 1, 2 * time.Second}}}, match.Standing{Age: 2 * second}},
		"a replay that began later": {Knowledge{Limit: limit, Others: ago(2 * time.Second), Behind: []RankSince{{"w", 1, time.Second}}}, match.Standing{Age: 2 * second}},
	} {
		if d := cmp.Diff(tt.want, of(tt.knowledge)); d != "" {
			t.Errorf("%s (-want +got):\n%s", name, d)
		}
	}
	trust, reasons := kvcastv1.Trust_TRUST_UPPER_BOUND, []kvcastv1.DegradedReason{kvcastv1.DegradedReason_DEGRADED_REASON_RELAYED}
	(match.Standing{Down: 1, Stale: true, Overpredicted: true}).Degrade(&trust, &reasons)
	want := []kvcastv1.DegradedReason{
		kvcastv1.DegradedReason_DEGRADED_REASON_SOURCE_DOWN, kvcastv1.DegradedReason_DEGRADED_REASON_RELAYED, kvcastv1.DegradedReason_DEGRADED_REASON_STALE,
		kvcastv1.DegradedReason_DEGRADED_REASON_OVERPREDICTED,
	}
	if d := cmp.Diff(want, reasons); d != "" || trust != kvcastv1.Trust_TRUST_DEGRADED {
		t.Errorf("trust %v, reasons (-want +got):\n%s", trust, d)
	}
}

// TestStandingIsReadAgain answers from what was read for a while, in which knowledge grows older.
func TestStandingIsReadAgain(t *testing.T) {
	now, reads := time.Now(), 0
	r := standing{knowledge: func() Knowledge {
		reads++
		return Knowledge{Limit: 3 * time.Second, Others: now}
	}}
	for _, after := range []time.Duration{0, standingInterval, standingInterval + 1} {
		if got := r.lookup(now.Add(after))("w", 0); got.Age != uint64(after) {
			t.Errorf("after %v: got %v", after, got)
		}
	}
	if reads != 2 {
		t.Errorf("knowledge was read %d times, want twice", reads)
	}
}
