package query

import (
	"bytes"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/testing/protocmp"

	kvcastv1 "github.com/kvcast/kvcast/proto/kvcast/v1"
)

func TestPromptIsReadInEachForm(t *testing.T) {
	file := filepath.Join(t.TempDir(), "prompt")
	if err := os.WriteFile(file, []byte("1 2,\n3\t4\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	ids := func(all ...uint32) *kvcastv1.Prompt { return &kvcastv1.Prompt{TokenIds: all} }
	for _, tt := range []struct {
		name  string
		flags promptFlags
		stdin string
		want  *kvcastv1.Prompt
	}{
		{"tokens", promptFlags{Tokens: "1,2,4294967295"}, "", ids(1, 2, 1<<32-1)},
		{"a JSON array", promptFlags{Tokens: " [1, 2]"}, "", ids(1, 2)},
		{"a file", promptFlags{TokensFile: file}, "", ids(1, 2, 3, 4)},
		{"standard input", promptFlags{TokensFile: "-"}, "[5,\n6]\n", ids(5, 6)},
		{"tokens in standard input", promptFlags{Tokens: "-"}, "5,6", ids(5, 6)},
		{"tokens hashes", promptFlags{TokensHashes: "0xff,18446744073709551615"}, "", &kvcastv1.Prompt{TokensHashes: []uint64{255, 1<<64 - 1}}},
		{"block hashes", promptFlags{BlockHashes: "7", BlockSize: 16}, "", &kvcastv1.Prompt{BlockHashes: []uint64{7}, BlockSize: 16}},
		{"attributes", promptFlags{Tokens: "1", LoRA: "l", Salt: "s", Eagle: true, BlockSize: 2}, "",
			&kvcastv1.Prompt{TokenIds: []uint32{1}, LoraName: "l", CacheSalt: "s", Eagle: true, BlockSize: 2}},
	} {
		got, err := tt.flags.prompt(strings.NewReader(tt.stdin))
		if err != nil {
			t.Errorf("%s: %v", tt.name, err)
		}
		if diff := cmp.Diff(tt.want, got, protocmp.Transform()); diff != "" {
			t.Errorf("%s (-want +got):\n%s", tt.name, diff)
		}
	}
}

func TestMatchesInPoolsAreWrittenAsATable(t *testing.T) {
	var out bytes.Buffer
	err := writeMatches(&out, []*kvcastv1.PrefixMatch{
		{Worker: "w0", Blocks: 3, Tokens: 48, Trust: kvcastv1.Trust_TRUST_EXACT, Pools: []*kvcastv1.PoolPrefix{
			{Pool: "a", Tokens: 512, Blocks: 2, Trust: kvcastv1.Trust_TRUST_EXACT},
			{Pool: "b\n", Tokens: 256, Blocks: 1, Trust: kvcastv1.Trust_TRUST_DEGRADED, Reasons: []kvcastv1.DegradedReason{kvcastv1.DegradedReason_DEGRADED_REASON_CONNECTOR_TIER}},
		}},
		{Worker: "w1", Blocks: 1, Trust: kvcastv1.Trust_TRUST_EXACT},
	})
	const want = `WORKER  RANK  ENDPOINT  BLOCKS  TOKENS  DEVICE  OTHER TIERS  POOLS                                     TRUST
w0      0     -         3       48      0       -            a 512, b` + "\uFFFD" + ` 256 (degraded: connector_tier)  exact
w1      0     -         1       0       0       -            -                                         exact
`
	if err != nil || out.String() != want {
		t.Errorf("got\n%s%v\nwant\n%s", &out, err, want)
	}
}

func TestMatchesAreWrittenAsATable(t *testing.T) {
	var out bytes.Buffer
	err := writeMatches(&out, []*kvcastv1.PrefixMatch{
		{
			Worker: "w0", Endpoint: "10.0.0.5:8000", Blocks: 3, Tokens: 48, Trust: kvcastv1.Trust_TRUST_EXACT,
			Tiers: []*kvcastv1.TierPrefix{{Tier: kvcastv1.Tier_TIER_DEVICE, Blocks: 2}, {Tier: kvcastv1.Tier_TIER_DISK, Blocks: 3}, {Tier: kvcastv1.Tier_TIER_EXTERNAL, Blocks: 1}},
		},
		{
			Worker: "w\n1", DpRank: 7, Blocks: 1, Trust: kvcastv1.Trust_TRUST_DEGRADED,
			Reasons:  []kvcastv1.DegradedReason{kvcastv1.DegradedReason_DEGRADED_REASON_GAP, kvcastv1.DegradedReason_DEGRADED_REASON_SOURCE_DOWN},
			DownNano: 72_400_000_000,
		},
		{Worker: "w3", ExpectedBlocks: 4, Trust: kvcastv1.Trust_TRUST_EXACT},
		{
			Worker: "w2", Blocks: 9, Tokens: 144, Trust: kvcastv1.Trust_TRUST_EXACT,
			Tiers: []*kvcastv1.TierPrefix{{Tier: kvcastv1.Tier_TIER_DEVICE, Blocks: 5, EndedByGroup: proto.Uint32(0)}, {Tier: kvcastv1.Tier_TIER_HOST_PINNED, Blocks: 9, EndedByGroup: proto.Uint32(2)}},
		},
	})
	const want = `WORKER  RANK  ENDPOINT       BLOCKS          TOKENS  DEVICE       OTHER TIERS              TRUST
w0      0     10.0.0.5:8000  3               48      2            disk 3, external 1       exact
w` + "\uFFFD" + `1     7     -              1               0       0            -                        degraded: gap, source_down 1m12s
w3      0     -              0 (4 expected)  0       0            -                        exact
w2      0     -              9               144     5 (group 0)  host_pinned 9 (group 2)  exact
`
	if err != nil || out.String() != want {
		t.Errorf("got\n%s%v\nwant\n%s", &out, err, want)
	}
}
