package wire_test

import (
	"slices"
	"strings"
	"testing"

	"github.com/kvcast/kvcast/internal/core/index/hybrid/vllmhash"
	"github.com/kvcast/kvcast/internal/core/kvblock"
	"github.com/kvcast/kvcast/internal/wire"
	statev1 "github.com/kvcast/kvcast/proto/kvcast/state/v1"
	kvcastv1 "github.com/kvcast/kvcast/proto/kvcast/v1"
)

// followed are rules of a source whose groups are followed.
type followed struct {
	t *testing.T
	*wire.Rules
	settings wire.GroupSettings
	counts   wire.Counts
}

func follow(t *testing.T, settings wire.GroupSettings) *followed {
	t.Helper()
	f := &followed{t: t, Rules: wire.NewRules(&wire.BlockSize{}), settings: settings}
	f.FollowGroups(&f.settings)
	f.TrackChanges()
	return f
}

// admit admits a batch, and returns the events and the groups.
func (f *followed) admit(events ...wire.Event) ([]wire.Event, *kvcastv1.Groups) {
	f.t.Helper()
	b := &wire.Batch{Events: events}
	f.Admit(b, 0, &f.counts)
	return b.Events, b.Groups
}

// root returns a store of a prompt without a parent in a group, of an engine that computes hashes with an algorithm by a unit of 4 tokens.
func (f *followed) root(group int64, kind string, blockSize int, tokens []uint32, algorithm vllmhash.Algorithm, content vllmhash.Content) wire.Event {
	f.t.Helper()
	h, err := vllmhash.New(algorithm, vllmhash.DefaultSeed, 4)
	if err != nil {
		f.t.Fatal(err)
	}
	hashes, err := h.Append(nil, tokens, content, new(vllmhash.Buffer))
	if err != nil {
		f.t.Fatal(err)
	}
	e := wire.Event{
		Kind: wire.KindStored, Tokens: tokens, BlockSize: uint32(blockSize), HasGroupIdx: true, GroupIdx: group, SpecKind: kind, LoRAName: content.LoRAName,
		Rare: &wire.Rare{SlidingWindow: 9},
	}
	for n := blockSize; n <= len(tokens); n += blockSize {
		e.BlockHashes = append(e.BlockHashes, hashes[n/4-1])
	}
	return e
}

var somePrompt = []uint32{1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16}

// TestGroupsAreFollowed admits stores of two groups, and finds the engine's hashes with each algorithm.
func TestGroupsAreFollowed(t *testing.T) {
	for algorithm, want := range map[vllmhash.Algorithm]kvcastv1.BlockHashing_Algorithm{
		vllmhash.SHA256: kvcastv1.BlockHashing_ALGORITHM_SHA256, vllmhash.SHA256CBOR: kvcastv1.BlockHashing_ALGORITHM_SHA256_CBOR,
	} {
		f := follow(t, wire.GroupSettings{EAGLEGroups: 0b10})
		if _, groups := f.admit(f.root(0, "full_attention", 8, somePrompt, algorithm, vllmhash.Content{})); groups != nil && f.settings.EAGLEGroups == 0 {
			t.Errorf("one group is described: %v", groups)
		}
		events, groups := f.admit(
			f.root(0, "full_attention", 8, somePrompt, algorithm, vllmhash.Content{}), f.root(1, "sliding_window", 4, somePrompt, algorithm, vllmhash.Content{}),
			wire.Event{Kind: wire.KindRemoved, BlockHashes: []uint64{1}, HasGroupIdx: true, GroupIdx: 1},
		)
		if len(events) != 3 || events[0].Group != 0 || events[1].Group != 2 || events[2].Group != 2 || events[1].RawID != 0 {
			t.Fatalf("got events %+v", events)
		}
		if groups.GetUnit() != 4 || groups.GetHashing().GetAlgorithm() != want || groups.GetMissing() != "" {
			t.Errorf("got unit %d, %v, missing %q", groups.GetUnit(), groups.GetHashing(), groups.GetMissing())
		}
		if g := groups.GetGroups(); len(g) != 2 || !g[0].GetMain() || g[1].GetMain() || g[0].GetBlockSize() != 8 || g[1].GetWindow() != 9 || !g[1].GetDrops() || g[0].GetDrops() {
			t.Errorf("got groups %v", g)
		}
		// Another run continues with the same groups.
		next := follow(t, f.settings)
		next.Restore(f.State())
		if _, again := next.admit(); again.String() != groups.String() {
			t.Errorf("after a restart of kvcast: got %v, want %v", again, groups)
		}
		f.Reset(0)
		if _, groups := f.admit(); groups != nil {
			t.Errorf("after a restart of the engine: got %v, want none", groups)
		}
	}
}

// TestGroupsThatCannotBeFollowedSayWhy has engines for which the rule cannot be applied.
func TestGroupsThatCannotBeFollowedSayWhy(t *testing.T) {
	group := func(idx int64, kind string) wire.Event {
		return wire.Event{Kind: wire.KindStored, BlockSize: 4, Tokens: somePrompt, BlockHashes: []uint64{1, 2, 3, 4}, HasGroupIdx: true, GroupIdx: idx, SpecKind: kind}
	}
	partial := wire.Event{
		Kind: wire.KindStored, BlockSize: 4, Tokens: somePrompt[:4], BlockHashes: []uint64{9}, HasParent: true, Parent: 4, HasGroupIdx: true, SpecKind: "full_attention",
	}
	for missing, events := range map[string][]wire.Event{
		"chunk_size":        {group(0, "full_attention"), group(1, "chunked_local_attention")},
		`kind "new"`:        {group(0, "full_attention"), group(1, "new")},
		"window 0":          {group(0, "full_attention"), group(1, "sliding_window")},
		"groups 0 to 63":    {group(0, "full_attention"), group(64, "mamba")},
		"a part of a block": {partial, group(0, "full_attention"), group(1, "mamba")},
	} {
		f := follow(t, wire.GroupSettings{})
		_, groups := f.admit(events...)
		if !strings.Contains(groups.GetMissing(), missing) {
			t.Errorf("missing: got %q, want %q in it", groups.GetMissing(), missing)
		}
		if groups.GetHashing() != nil {
			t.Errorf("hashes that do not follow from tokens are found: %v", groups.GetHashing())
		}
	}
}

// TestGroupsOfEarlierVersionsAreUnknown restores the state of a version that followed the main group alone: it is not known which blocks
// the others have, until the engine clears its cache.
func TestGroupsOfEarlierVersionsAreUnknown(t *testing.T) {
	f := follow(t, wire.GroupSettings{})
	f.Restore(&statev1.IngestSource{Ranks: []*statev1.IngestRank{{MainGroups: []int64{0}, OtherGroups: []int64{1}}}})
	stores := func() []wire.Event {
		return []wire.Event{
			f.root(0, "full_attention", 4, somePrompt, vllmhash.SHA256, vllmhash.Content{}), f.root(1, "sliding_window", 4, somePrompt, vllmhash.SHA256, vllmhash.Content{}),
		}
	}
	if _, groups := f.admit(stores()...); !strings.Contains(groups.GetMissing(), "earlier version") {
		t.Errorf("got %v, want it to say that an earlier version did not follow groups", groups)
	}
	next := follow(t, wire.GroupSettings{})
	next.Restore(f.State())
	if _, groups := next.admit(); !strings.Contains(groups.GetMissing(), "earlier version") {
		t.Errorf("after another restart: got %v, want it to say so still", groups)
	}
	if _, groups := f.admit(append([]wire.Event{{Kind: wire.KindCleared, Tier: kvblock.TierDevice}}, stores()...)...); groups.GetMissing() != "" {
		t.Errorf("after a clear: missing %q, want nothing", groups.GetMissing())
	}
}

// TestPathsOfAdaptersAreVerified names the paths of adapters that a store has shown to be right, and no others.
func TestPathsOfAdaptersAreVerified(t *testing.T) {
	f := follow(t, wire.GroupSettings{LoRAPaths: map[string]string{"right": "/right", "wrong": "/other", "unseen": "/unseen"}})
	var groups *kvcastv1.Groups
	for _, name := range []string{"", "right", "wrong", "unknown"} {
		content := vllmhash.Content{}
		if name != "" {
			content = vllmhash.Content{LoRAName: name, LoRAPath: "/" + name}
		}
		_, groups = f.admit(f.root(0, "full_attention", 4, somePrompt, vllmhash.SHA256, content), f.root(1, "sliding_window", 4, somePrompt, vllmhash.SHA256, content))
	}
	var got []string
	for name, path := range groups.GetHashing().GetLoraPaths() {
		got = append(got, name+" "+path)
	}
	if want := []string{"right /right"}; !slices.Equal(got, want) {
		t.Errorf("got %q, want %q", got, want)
	}
}

// TestGroupsThatDoNotStayTheSame has an engine that tells another window with each store: routers are told a bounded number of times.
func TestGroupsThatDoNotStayTheSame(t *testing.T) {
	f := follow(t, wire.GroupSettings{})
	f.admit(f.root(0, "full_attention", 8, somePrompt, vllmhash.SHA256, vllmhash.Content{}))
	descriptions := make(map[*kvcastv1.Groups]bool)
	var last *kvcastv1.Groups
	for n := range int64(1000) {
		e := f.root(1, "sliding_window", 4, somePrompt, vllmhash.SHA256, vllmhash.Content{})
		e.Rare = &wire.Rare{SlidingWindow: 9 + n%2}
		_, last = f.admit(e)
		descriptions[last] = true
	}
	if len(descriptions) > 100 {
		t.Errorf("%d descriptions", len(descriptions))
	}
	if last.GetMissing() == "" {
		t.Errorf("the description of groups that change does not say so: %v", last)
	}
}

// TestAPartOfAFirstBlockIsMissed has a part of the first block of a prompt as the engine's first store, which has no parent: it counts as a block until the next
// one shows the size.
func TestAPartOfAFirstBlockIsMissed(t *testing.T) {
	f := follow(t, wire.GroupSettings{})
	admit := func(size int, prompt []uint32) ([]wire.Event, *kvcastv1.Groups) {
		return f.admit(f.root(0, "full_attention", size, prompt, vllmhash.SHA256, vllmhash.Content{}), f.root(1, "mamba", size, prompt, vllmhash.SHA256, vllmhash.Content{}))
	}
	if _, groups := admit(4, somePrompt[:4]); groups.GetMissing() != "" {
		t.Fatalf("missing %q before", groups.GetMissing())
	}
	events, groups := admit(8, []uint32{21, 22, 23, 24, 25, 26, 27, 28, 29, 30, 31, 32, 33, 34, 35, 36})
	if !events[0].ReplacesBlockSize || groups.GetMissing() == "" {
		t.Errorf("replaces the size: %t, missing %q", events[0].ReplacesBlockSize, groups.GetMissing())
	}
}
