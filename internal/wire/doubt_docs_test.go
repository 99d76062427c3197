package wire_test

import (
	"maps"
	"os"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/kvcast/kvcast/internal/core/kvblock"
	"github.com/kvcast/kvcast/internal/wire"
)

// TestTrustTableIsDocumented compares the table of what is left out or not understood with the one in docs/matching.md: each
// row has the reason, what the engine sent, what is done with it, the trust reason and the tiers.
func TestTrustTableIsDocumented(t *testing.T) {
	type row struct{ trust, tiers string }
	text, err := os.ReadFile("../../docs/matching.md")
	if err != nil {
		t.Fatal(err)
	}
	documented := make(map[string]row)
	for _, m := range regexp.MustCompile("(?m)^\\| `([a-z0-9_]+)` \\| [^|]+ \\| [^|]+ \\| ([^|]+) \\| ([^|]+) \\|$").FindAllStringSubmatch(string(text), -1) {
		if _, twice := documented[m[1]]; twice {
			t.Errorf("%s is documented twice", m[1])
		}
		documented[m[1]] = row{m[2], m[3]}
	}
	tiers := map[kvblock.Tiers]string{0: "its tier", kvblock.AllTiers: "all", kvblock.LowerTiers: "all below the device"}
	want := make(map[string]row)
	for reason := wire.ReasonNone + 1; reason < wire.NumReasons; reason++ {
		r := row{"`" + strings.TrimPrefix(reason.Gap().String(), "REASON_") + "`", tiers[reason.Tiers()]}
		switch {
		case reason == wire.ReasonNonMainAttentionGroup || reason == wire.ReasonPartialBlock:
			r = row{"`UPPER_BOUND`", "all"}
		case reason.Gap() == 0:
			r = row{"stays exact", "none"}
		}
		if r.tiers == "" {
			t.Errorf("%s: tiers %b have no words", reason, reason.Tiers())
		}
		want[reason.String()] = r
	}
	if diff := cmp.Diff(want, documented, cmp.AllowUnexported(row{})); diff != "" {
		t.Errorf("rows %q (-want +documented):\n%s", slices.Sorted(maps.Keys(documented)), diff)
	}
}
