package accuracy_test

import (
	"strings"
	"testing"

	"pgregory.net/rapid"

	"github.com/kvcast/kvcast/internal/accuracy"
)

// An outcome of each sort, with a prediction of three blocks.
var (
	exact     = accuracy.Outcome{Predicted: 48, Reused: 48, Judged: true}
	under     = accuracy.Outcome{Predicted: 32, Reused: 48, Judged: true}
	over      = accuracy.Outcome{Predicted: 48, Reused: 32, Judged: true}
	overMore  = accuracy.Outcome{Predicted: 48, Judged: true}
	explained = accuracy.Outcome{Predicted: 48, Reused: 32, Judged: true, Explained: true}
	doubted   = accuracy.Outcome{Predicted: 48, Reused: 32}
)

// add adds an outcome n times, and returns the number of changes.
func add(r *accuracy.Rank, o accuracy.Outcome, n int) (changes int) {
	for range n {
		if r.Add(o) {
			changes++
		}
	}
	return changes
}

func TestRankIsOverpredicted(t *testing.T) {
	for name, tt := range map[string]struct {
		outcomes func(*accuracy.Rank)
		want     bool
	}{
		"no outcomes":                       {func(*accuracy.Rank) {}, false},
		"exact":                             {func(r *accuracy.Rank) { add(r, exact, 1000) }, false},
		"too short":                         {func(r *accuracy.Rank) { add(r, under, 1000) }, false},
		"too long, of predictions in doubt": {func(r *accuracy.Rank) { add(r, doubted, 1000) }, false},
		"7 too long":                        {func(r *accuracy.Rank) { add(r, exact, 10); add(r, over, 7) }, false},
		"8 too long":                        {func(r *accuracy.Rank) { add(r, exact, 10); add(r, over, 8) }, true},
		"8 too long, over 65":               {func(r *accuracy.Rank) { add(r, over, 1); add(r, exact, 57); add(r, over, 7) }, false},
		"8 too long, over 64":               {func(r *accuracy.Rank) { add(r, over, 1); add(r, exact, 56); add(r, over, 7) }, true},
		"31 explained":                      {func(r *accuracy.Rank) { add(r, explained, 31) }, false},
		"32 explained":                      {func(r *accuracy.Rank) { add(r, explained, 32) }, true},
		"63 right again":                    {func(r *accuracy.Rank) { add(r, over, 8); add(r, exact, 63) }, true},
		"64 right again":                    {func(r *accuracy.Rank) { add(r, over, 8); add(r, exact, 64) }, false},
		"right again but for 8 explained":   {func(r *accuracy.Rank) { add(r, over, 8); add(r, exact, 56); add(r, explained, 8) }, false},
		"right again but for 9 explained":   {func(r *accuracy.Rank) { add(r, over, 8); add(r, exact, 55); add(r, explained, 9) }, true},
		"of others in between":              {func(r *accuracy.Rank) { add(r, over, 7); add(r, doubted, 100); add(r, over, 1) }, true},
	} {
		var r accuracy.Rank
		if tt.outcomes(&r); r.Overpredicted != tt.want {
			t.Errorf("%s: overpredicted is %v, want %v", name, r.Overpredicted, tt.want)
		}
	}
}

func TestChangesAreReportedOnce(t *testing.T) {
	var r accuracy.Rank
	if n := add(&r, over, 100); n != 1 || !r.Overpredicted {
		t.Errorf("%d changes, want 1", n)
	}
	if n := add(&r, exact, 100); n != 1 || r.Overpredicted {
		t.Errorf("%d changes back, want 1", n)
	}
}

func TestDetail(t *testing.T) {
	var r accuracy.Rank
	if add(&r, exact, 5); r.Detail(16) != "" {
		t.Errorf("the detail of a rank that is right is %q", r.Detail(16))
	}
	add(&r, over, 8)
	if got := r.Detail(16); !strings.Contains(got, "the last 8 outcomes without a removal were all too long by 16 tokens, one block: ") {
		t.Error(got)
	}
	if got := r.Detail(8); strings.Contains(got, "one block") || !strings.Contains(got, "16 tokens") {
		t.Error(got)
	}
	add(&r, overMore, 1)
	if got, want := r.Detail(16), "9 of the last 64 outcomes were too long"; got != want {
		t.Errorf("got  %s\nwant %s", got, want)
	}
}

// TestRankFollowsTheRules compares a rank with the rules, applied to a list of all outcomes.
func TestRankFollowsTheRules(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		var (
			r      accuracy.Rank
			want   accuracy.Counts
			judged []accuracy.Outcome
			wrong  bool
		)
		bias := rapid.SampledFrom([]int{2, 8, 30}).Draw(t, "one in so many is too long")
		for range rapid.IntRange(1, 300).Draw(t, "outcomes") {
			o := accuracy.Outcome{Predicted: 10, Reused: 10, Judged: rapid.IntRange(0, 4).Draw(t, "judged") > 0, Explained: rapid.Bool().Draw(t, "explained")}
			switch rapid.IntRange(0, bias).Draw(t, "sort") {
			case 0:
				o.Reused = 4
				want.Outcomes[accuracy.Over]++
				want.Tokens[accuracy.Exact] += 4
				want.Tokens[accuracy.Over] += 6
			case 1:
				o.Predicted = 3
				want.Outcomes[accuracy.Under]++
				want.Tokens[accuracy.Exact] += 3
				want.Tokens[accuracy.Under] += 7
			default:
				want.Outcomes[accuracy.Exact]++
				want.Tokens[accuracy.Exact] += 10
			}
			if o.Judged {
				judged = append(judged, o)
			}
			all, unexplained := 0, 0
			for _, o := range judged[max(0, len(judged)-64):] {
				if o.Predicted > o.Reused {
					all++
					if !o.Explained {
						unexplained++
					}
				}
			}
			before := wrong
			if !wrong {
				wrong = unexplained >= 8 || all >= 32
			} else {
				wrong = unexplained > 0 || all > 8
			}
			if changed := r.Add(o); changed != (wrong != before) || r.Overpredicted != wrong || r.Counts != want {
				t.Fatalf("after %+v: changed %v, %+v\nwant %v, %+v", o, changed, r, wrong, want)
			}
		}
	})
}
