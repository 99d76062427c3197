package index_test

import (
	"os"
	"regexp"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/kvcast/kvcast/internal/core/index"
	kvcastv1 "github.com/kvcast/kvcast/proto/kvcast/v1"
)

// matchingRows returns rows of the tables in docs/matching.md that match a pattern: their first group, and their second.
func matchingRows(t *testing.T, pattern string) map[string]string {
	t.Helper()
	text, err := os.ReadFile("../../../docs/matching.md")
	if err != nil {
		t.Fatal(err)
	}
	rows := make(map[string]string)
	for _, m := range regexp.MustCompile(pattern).FindAllStringSubmatch(string(text), -1) {
		rows[m[1]] = m[2]
	}
	return rows
}

// TestReasonsOfGapsAreDocumented compares the trust reason of each Gap with docs/matching.md, which lists several reasons of
// Gaps in a row if they have the same.
func TestReasonsOfGapsAreDocumented(t *testing.T) {
	t.Parallel()
	documented := make(map[string]string)
	for names, reason := range matchingRows(t, "(?m)^\\| ((?:`[A-Z_]+`(?:, )?)+) \\| [^|]+ \\| `([A-Z_]+)` \\|") {
		for name := range strings.SplitSeq(names, ", ") {
			documented[strings.Trim(name, "`")] = reason
		}
	}
	want := make(map[string]string)
	for number, name := range kvcastv1.Gap_Reason_name {
		if number == 0 {
			continue
		}
		x := index.New()
		x.ApplyEntry(entryOf(1, event(0, gap(kvcastv1.Gap_Reason(number), 0))))
		w, _ := x.Worker("w")
		if all := w.Ranks[0].Reasons.List(); len(all) == 1 {
			want[strings.TrimPrefix(name, "REASON_")] = strings.TrimPrefix(all[0].String(), "DEGRADED_REASON_")
		}
	}
	if diff := cmp.Diff(want, documented); diff != "" {
		t.Errorf("(-want +documented):\n%s", diff)
	}
}

// TestTrustReasonsAreDocumented checks that the table in docs/matching.md says of each reason what is wrong and what a router
// does.
func TestTrustReasonsAreDocumented(t *testing.T) {
	t.Parallel()
	documented := matchingRows(t, "(?m)^\\| `([A-Z_]+)` \\| ([^|`][^|]+) \\| [^|`][^|]+ \\|$")
	for number, name := range kvcastv1.DegradedReason_name {
		if name = strings.TrimPrefix(name, "DEGRADED_REASON_"); number != 0 && documented[name] == "" {
			t.Errorf("%s is missing", name)
		}
	}
}
