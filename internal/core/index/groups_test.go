package index_test

import (
	"slices"
	"testing"

	"github.com/kvcast/kvcast/internal/core/index"
	"github.com/kvcast/kvcast/internal/core/index/hybrid/vllmhash"
	"github.com/kvcast/kvcast/internal/core/kvblock"
	kvcastv1 "github.com/kvcast/kvcast/proto/kvcast/v1"
)

// Groups of an engine with windows of two blocks beside full attention, whose blocks have 4 tokens.
var (
	fullGroup   = &kvcastv1.AttentionGroup{Index: 0, Kind: kvcastv1.AttentionGroup_KIND_FULL_ATTENTION, BlockSize: 4, Main: true}
	windowGroup = &kvcastv1.AttentionGroup{Index: 1, Kind: kvcastv1.AttentionGroup_KIND_SLIDING_WINDOW, BlockSize: 4, Window: 9}
	mambaGroup  = &kvcastv1.AttentionGroup{Index: 2, Kind: kvcastv1.AttentionGroup_KIND_MAMBA, BlockSize: 8}
	hashed      = &kvcastv1.BlockHashing{Algorithm: kvcastv1.BlockHashing_ALGORITHM_SHA256, LoraPaths: map[string]string{"sql": "/adapters/sql"}}
)

// hashesOf returns the hashes that an engine computes of a prompt, by 4 tokens.
func hashesOf(t *testing.T, tokens []uint32, content vllmhash.Content) []uint64 {
	t.Helper()
	h, err := vllmhash.New(vllmhash.SHA256, vllmhash.DefaultSeed, 4)
	if err != nil {
		t.Fatal(err)
	}
	hashes, err := h.Append(nil, tokens, content, new(vllmhash.Buffer))
	if err != nil {
		t.Fatal(err)
	}
	return hashes
}

// storedOf returns the store of a prompt's first n blocks in the main group.
func storedOf(t *testing.T, tokens []uint32, lora string, n int) *kvcastv1.Stored {
	t.Helper()
	content := vllmhash.Content{}
	if path := hashed.GetLoraPaths()[lora]; path != "" { // else the hashes do not matter
		content = vllmhash.Content{LoRAName: lora, LoRAPath: path}
	}
	s := &kvcastv1.Stored{
		BlockHashes: hashesOf(t, tokens, content)[:n], BlockSize: 4,
		TokensHashes: kvblock.AppendTokensHashes(nil, tokens, 4, kvblock.Seed(lora, ""), false, nil)[:n],
	}
	if lora != "" {
		s.LoraName = &lora
	}
	return s
}

// TestPrefixesThatAllGroupsHold matches a prompt of 30 tokens after events of an engine with several attention groups. The
// answers follow from what each kind of group needs: all blocks, the last two blocks, the state at the end.
func TestPrefixesThatAllGroupsHold(t *testing.T) {
	t.Parallel()
	var tokens []uint32
	for n := range uint32(30) {
		tokens = append(tokens, 100+n)
	}
	h := hashesOf(t, tokens, vllmhash.Content{})
	groups := func(all ...*kvcastv1.AttentionGroup) *kvcastv1.Groups {
		return &kvcastv1.Groups{Groups: all, Unit: 4, Hashing: hashed}
	}
	main := storedOf(t, tokens, "", 7)
	window := func(hashes ...uint64) *kvcastv1.GroupStored {
		return &kvcastv1.GroupStored{Group: 1, BlockHashes: hashes}
	}
	state := func(hashes ...uint64) *kvcastv1.GroupStored {
		return &kvcastv1.GroupStored{Group: 2, BlockHashes: hashes}
	}
	learned := &kvcastv1.Groups{Groups: []*kvcastv1.AttentionGroup{fullGroup, windowGroup}}
	drops := &kvcastv1.Groups{Groups: []*kvcastv1.AttentionGroup{fullGroup, {Index: 1, Kind: windowGroup.GetKind(), BlockSize: 4, Window: 9, Drops: true}}}
	other := &kvcastv1.Stored{BlockHashes: []uint64{1, 2, 3, 4, 5, 6, 7}, BlockSize: 4, TokensHashes: main.GetTokensHashes()}
	cleared := &kvcastv1.Cleared{Reason: kvcastv1.Cleared_REASON_ENGINE_CLEARED}
	exact, bound, degraded := kvcastv1.Trust_TRUST_EXACT, kvcastv1.Trust_TRUST_UPPER_BOUND, kvcastv1.Trust_TRUST_DEGRADED
	for name, tt := range map[string]struct {
		events []any
		prompt index.Prompt
		tokens int
		trust  kvcastv1.Trust
	}{
		"all blocks of a window":              {[]any{groups(fullGroup, windowGroup), main, window(h...)}, index.Prompt{}, 28, exact},
		"the last blocks of a window":         {[]any{groups(fullGroup, windowGroup), main, window(h[5], h[6])}, index.Prompt{}, 28, exact},
		"one block of a window is not enough": {[]any{groups(fullGroup, windowGroup), main, window(h[2], h[3], h[6])}, index.Prompt{}, 16, exact},
		"a window without blocks":             {[]any{groups(fullGroup, windowGroup), main}, index.Prompt{}, 0, exact},
		"a window whose block is gone": {[]any{
			groups(fullGroup, windowGroup), main, window(h...), &kvcastv1.GroupRemoved{Group: 1, BlockHashes: h[6:7]},
		}, index.Prompt{}, 24, exact},
		"a block of the main group is gone": {[]any{groups(fullGroup, windowGroup), main, window(h...), removed(h[4])}, index.Prompt{}, 16, exact},
		"a state at the end":                {[]any{groups(fullGroup, mambaGroup), main, state(h[5])}, index.Prompt{}, 24, exact},
		"no state":                          {[]any{groups(fullGroup, mambaGroup), main}, index.Prompt{}, 0, exact},
		"three groups":                      {[]any{groups(fullGroup, windowGroup, mambaGroup), main, window(h...), state(h[1], h[3])}, index.Prompt{}, 16, exact},
		"without the last token":            {[]any{groups(fullGroup, windowGroup), main, window(h...)}, index.Prompt{TokenIDs: tokens[:28], ExcludeLastToken: true}, 24, exact},
		"a group that drops": {[]any{
			groups(fullGroup, &kvcastv1.AttentionGroup{Index: 1, Kind: windowGroup.GetKind(), BlockSize: 4, Window: 9, Drops: true}), main, window(h...),
		}, index.Prompt{}, 24, exact},
		"one group that drops": {[]any{
			groups(&kvcastv1.AttentionGroup{Index: 0, Kind: fullGroup.GetKind(), BlockSize: 4, Drops: true, Main: true}), main,
		}, index.Prompt{}, 24, exact},
		"no main group": {[]any{groups(windowGroup), window(h[3], h[4])}, index.Prompt{}, 20, exact},
		"main blocks of unknown content": {[]any{
			groups(fullGroup, windowGroup), &kvcastv1.Stored{BlockHashes: h[:6], BlockSize: 4}, window(h...),
		}, index.Prompt{}, 24, exact},
		"an adapter": {[]any{
			groups(fullGroup, windowGroup), storedOf(t, tokens, "sql", 7), window(hashesOf(t, tokens, vllmhash.Content{LoRAName: "sql", LoRAPath: "/adapters/sql"})...),
		}, index.Prompt{LoRA: "sql"}, 28, exact},
		"an adapter without a path": {[]any{
			groups(fullGroup, windowGroup), storedOf(t, tokens, "other", 5), window(h...),
		}, index.Prompt{LoRA: "other"}, 20, exact},
		"tokens hashes":                    {[]any{groups(fullGroup, windowGroup), main, window(h[:6]...)}, index.Prompt{TokensHashes: main.GetTokensHashes()}, 24, exact},
		"tokens hashes, an empty window":   {[]any{groups(fullGroup, windowGroup), main}, index.Prompt{TokensHashes: main.GetTokensHashes()}, 0, exact},
		"block hashes":                     {[]any{groups(fullGroup, windowGroup), main, window(h[:6]...)}, index.Prompt{BlockHashes: h}, 24, exact},
		"hashes that cannot be computed":   {[]any{learned, main, window(h[0])}, index.Prompt{}, 4, exact},
		"main blocks before the groups":    {[]any{main, learned, window(h[:6]...)}, index.Prompt{}, 24, exact},
		"a learned name of a block gone":   {[]any{learned, main, window(h...), removed(h[4])}, index.Prompt{}, 16, exact},
		"two names of a block":             {[]any{learned, main, other, window(h...)}, index.Prompt{}, 28, bound},
		"two names, one of them computed":  {[]any{groups(fullGroup, windowGroup), main, other, window(h[:6]...)}, index.Prompt{}, 24, exact},
		"two names in two tiers":           {[]any{learned, main, inTier(2, event(0, other)), window(h...)}, index.Prompt{}, 28, bound},
		"one of two names is gone":         {[]any{learned, main, other, window(h...), removed(other.GetBlockHashes()...), main}, index.Prompt{}, 28, exact},
		"another name in its place":        {[]any{learned, main, window(h...), removed(h...), other}, index.Prompt{}, 0, exact},
		"another name and its own window":  {[]any{learned, main, window(h...), removed(h...), other, window(6, 7)}, index.Prompt{}, 28, exact},
		"names after a clear":              {[]any{learned, other, cleared, main, window(h[:6]...)}, index.Prompt{}, 24, exact},
		"names of an engine that drops":    {[]any{drops, main, window(h...)}, index.Prompt{}, 24, exact},
		"drops, without the last token":    {[]any{drops, main, window(h...)}, index.Prompt{TokenIDs: tokens[:28], ExcludeLastToken: true}, 24, bound},
		"names of blocks and parts":        {[]any{&kvcastv1.Groups{Groups: learned.GetGroups(), Unit: 2}, main, window(h...)}, index.Prompt{}, 28, bound},
		"states, if parts of blocks exist": {[]any{&kvcastv1.Groups{Groups: []*kvcastv1.AttentionGroup{fullGroup, mambaGroup}}, main, state(h...)}, index.Prompt{}, 28, bound},
		"states of whole blocks":           {[]any{&kvcastv1.Groups{Groups: []*kvcastv1.AttentionGroup{fullGroup, mambaGroup}, Unit: 4}, main, state(h[4])}, index.Prompt{}, 20, exact},
		"a group of an unknown kind": {[]any{
			&kvcastv1.Groups{Groups: []*kvcastv1.AttentionGroup{fullGroup, {Index: 1, BlockSize: 4}}, Unit: 4, Hashing: hashed}, main,
		}, index.Prompt{}, 28, bound},
		"a group that is missing something": {[]any{
			&kvcastv1.Groups{Groups: []*kvcastv1.AttentionGroup{fullGroup, windowGroup}, Unit: 4, Hashing: hashed, Missing: "set something"}, main,
		}, index.Prompt{}, 28, bound},
		"a gap": {[]any{groups(fullGroup, windowGroup), main, window(h...), &kvcastv1.Gap{Reason: kvcastv1.Gap_REASON_REPLAY_FORGOTTEN}}, index.Prompt{}, 28, degraded},
		"cleared": {[]any{
			groups(fullGroup, windowGroup), main, window(h...), cleared, main, window(h[0]),
		}, index.Prompt{}, 4, exact},
		"restarted with one group": {[]any{
			groups(fullGroup, windowGroup), main, &kvcastv1.Cleared{Reason: kvcastv1.Cleared_REASON_ENGINE_RESTARTED}, main,
		}, index.Prompt{}, 28, exact},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			x := index.New()
			events := []*kvcastv1.RouterEvent{event(0, &kvcastv1.WorkerAdded{Model: "m", Ranks: []uint32{0}})}
			if g, ok := tt.events[0].(*kvcastv1.Groups); ok && len(g.GetGroups()) > 0 {
				events = append(events, event(0, &kvcastv1.GroupsOmitted{}))
			}
			for _, kind := range tt.events {
				ev, ok := kind.(*kvcastv1.RouterEvent)
				if !ok {
					ev = event(0, kind)
				}
				events = append(events, ev)
			}
			x.ApplyEntry(entryOf(1, events...))
			copied := index.New()
			copyWorker(t, x, copied, "w", allTiers)
			restored := index.New()
			state, _, ok := x.Checkpoint(t.Context(), "w")
			if err := restored.Restore(state); err != nil || !ok {
				t.Fatalf("restore: %v, %v", ok, err)
			}
			p := tt.prompt
			if p.TokenIDs == nil && p.TokensHashes == nil && p.BlockHashes == nil {
				p.TokenIDs = tokens
			}
			for of, x := range map[string]*index.Index{"entries": x, "a snapshot": copied, "a checkpoint": restored} {
				var m index.Matches
				x.Match(&index.Query{Model: "m", Prompts: []index.Prompt{p}}, &m)
				got, trust := 0, exact
				if w, _ := x.Worker("w"); len(w.Ranks) > 0 {
					trust = w.Ranks[0].Trust()
				}
				if tt.tokens == 0 && len(m.Prompts[0]) > 0 {
					t.Errorf("index of %s: got %v, want no match", of, m.Prompts[0])
				}
				for _, match := range m.Prompts[0] {
					got, trust = match.Tokens(), match.Trust()
				}
				if got != tt.tokens || trust != tt.trust {
					t.Errorf("index of %s: got %d tokens, %v, want %d, %v", of, got, trust, tt.tokens, tt.trust)
				}
			}
		})
	}
}

// TestNamesAreComputedForRanksThatNeedThemMeanwhile computes the names of a prompt for the ranks that need them. Then another rank begins to need
// them, by a block of unknown content or by its groups.
func TestNamesAreComputedForRanksThatNeedThemMeanwhile(t *testing.T) {
	t.Parallel()
	tokens := make([]uint32, 28)
	h := hashesOf(t, tokens, vllmhash.Content{})
	groups := event(0, &kvcastv1.Groups{Groups: []*kvcastv1.AttentionGroup{fullGroup, windowGroup}, Unit: 4, Hashing: hashed})
	window, main := event(0, &kvcastv1.GroupStored{Group: 1, BlockHashes: h}), event(0, storedOf(t, tokens, "", 4))
	unknown := func(hashes []uint64, parent *uint64) *kvcastv1.RouterEvent {
		return event(0, &kvcastv1.Stored{BlockHashes: hashes, ParentHash: parent, BlockSize: 4})
	}
	for name, tt := range map[string]struct{ before, between []*kvcastv1.RouterEvent }{
		"blocks after known ones": {[]*kvcastv1.RouterEvent{groups, window, main}, []*kvcastv1.RouterEvent{unknown(h[4:], &h[3])}},
		"all blocks":              {[]*kvcastv1.RouterEvent{groups, window}, []*kvcastv1.RouterEvent{unknown(h, nil)}},
		"groups":                  {[]*kvcastv1.RouterEvent{main, unknown(h[4:], &h[3]), window}, []*kvcastv1.RouterEvent{groups}},
		"two names":               {[]*kvcastv1.RouterEvent{groups, window, event(0, storedOf(t, tokens, "", 7))}, []*kvcastv1.RouterEvent{event(0, &kvcastv1.Stored{BlockHashes: []uint64{1}, TokensHashes: storedOf(t, tokens, "", 1).GetTokensHashes(), BlockSize: 4})}},
	} {
		x, seq, calls := index.New(), uint64(0), 0
		apply := func(events []*kvcastv1.RouterEvent) {
			seq++
			x.ApplyEntry(entryOf(seq, events...))
		}
		apply(append([]*kvcastv1.RouterEvent{event(0, &kvcastv1.WorkerAdded{Model: "m", BlockSize: 4})}, tt.before...))
		var m index.Matches
		got := x.MatchBetween(&index.Query{Model: "m", Prompts: []index.Prompt{{TokenIDs: tokens}}}, &m, func() {
			if calls++; calls == 1 {
				apply(tt.between)
			}
		})
		if len(m.Prompts[0]) != 1 || m.Prompts[0][0].Tokens() != 28 || m.Prompts[0][0].Trust() != kvcastv1.Trust_TRUST_EXACT || got != 2 {
			t.Errorf("%s: got %+v at %d, want 28 tokens, exact, at 2", name, m.Prompts[0], got)
		}
		if calls > 2 {
			t.Errorf("%s: names were computed %d times", name, calls)
		}
	}
}

// TestWalkIsWhatAllGroupsHold reads a prompt of seven blocks from device memory, of which a window ends the prefix, then from host memory, and then
// from disk, which has the main group alone.
func TestWalkIsWhatAllGroupsHold(t *testing.T) {
	t.Parallel()
	tokens := make([]uint32, 28)
	h := hashesOf(t, tokens, vllmhash.Content{})
	groups := event(0, &kvcastv1.Groups{Groups: []*kvcastv1.AttentionGroup{fullGroup, windowGroup}, Unit: 4, Hashing: hashed})
	window := func(hashes ...uint64) *kvcastv1.RouterEvent {
		return event(0, &kvcastv1.GroupStored{Group: 1, BlockHashes: hashes})
	}
	for name, tt := range map[string]struct {
		events []*kvcastv1.RouterEvent
		want   [index.NumTiers]int
	}{
		"device memory alone": {[]*kvcastv1.RouterEvent{event(0, storedOf(t, tokens, "", 7)), window(h[:3]...)}, [index.NumTiers]int{3, 3, 3, 3}},
		"host memory adds to it": {[]*kvcastv1.RouterEvent{
			event(0, storedOf(t, tokens, "", 3)), window(h[:3]...), inTier(2, event(0, storedOf(t, tokens, "", 7))), inTier(2, window(h[3:5]...)),
		}, [index.NumTiers]int{3, 5, 5, 5}},
		"disk has the main group": {[]*kvcastv1.RouterEvent{
			event(0, storedOf(t, tokens, "", 3)), window(h[:3]...), inTier(3, event(0, storedOf(t, tokens, "", 7))),
		}, [index.NumTiers]int{3, 3, 7, 7}},
		"a group that is alone": {[]*kvcastv1.RouterEvent{
			event(0, &kvcastv1.Groups{Groups: []*kvcastv1.AttentionGroup{windowGroup}, Unit: 4, Hashing: hashed}), window(h[:5]...),
		}, [index.NumTiers]int{5, 5, 5, 5}},
	} {
		x := index.New()
		x.ApplyEntry(entryOf(1, append([]*kvcastv1.RouterEvent{event(0, &kvcastv1.WorkerAdded{Model: "m"}), groups}, tt.events...)...))
		var m index.Matches
		x.Match(&index.Query{Model: "m", Prompts: []index.Prompt{{TokenIDs: tokens}}, Walk: true}, &m)
		if len(m.Prompts[0]) != 1 || m.Prompts[0][0].Walk != tt.want {
			t.Errorf("%s: got %+v, want the walk %v", name, m.Prompts[0], tt.want)
		}
		x.Match(&index.Query{Model: "m", Prompts: []index.Prompt{{BlockHashes: h}}, Walk: true}, &m)
		for _, match := range m.Prompts[0] {
			if match.Walk != [index.NumTiers]int{} {
				t.Errorf("%s: got %+v by block hashes, want no walk", name, match)
			}
		}
	}
}

// TestMatchNamesTheGroupThatEndsIt matches seven blocks of which a window, and then the main group, holds less than the others do.
func TestMatchNamesTheGroupThatEndsIt(t *testing.T) {
	t.Parallel()
	tokens := make([]uint32, 28)
	h := hashesOf(t, tokens, vllmhash.Content{})
	groups := &kvcastv1.Groups{Groups: []*kvcastv1.AttentionGroup{fullGroup, windowGroup, mambaGroup}, Unit: 4, Hashing: hashed}
	window := &kvcastv1.GroupStored{Group: 1, BlockHashes: h[:5]}
	states := &kvcastv1.GroupStored{Group: 2, BlockHashes: h}
	for name, tt := range map[string]struct {
		events []any
		want   int // -1: no group
	}{
		"the prompt":     {[]any{groups, storedOf(t, tokens, "", 7), &kvcastv1.GroupStored{Group: 1, BlockHashes: h}, states}, -1},
		"a window":       {[]any{groups, storedOf(t, tokens, "", 7), window, states}, 1},
		"the main group": {[]any{groups, storedOf(t, tokens, "", 4), window, states}, 0},
		"one group":      {[]any{storedOf(t, tokens, "", 4)}, -1},
	} {
		x := index.New()
		events := []*kvcastv1.RouterEvent{event(0, &kvcastv1.WorkerAdded{Model: "m", Ranks: []uint32{0}})}
		for _, kind := range tt.events {
			events = append(events, event(0, kind))
		}
		x.ApplyEntry(entryOf(1, events...))
		var m index.Matches
		x.Match(&index.Query{Model: "m", Prompts: []index.Prompt{{TokenIDs: tokens}}}, &m)
		if len(m.Prompts[0]) != 1 {
			t.Errorf("%s: got %d matches, want 1", name, len(m.Prompts[0]))
			continue
		}
		if got, ok := m.Prompts[0][0].EndedBy(0); ok != (tt.want >= 0) || ok && got != tt.want {
			t.Errorf("%s: ended by group %d, %t, want %d", name, got, ok, tt.want)
		}
		for _, unused := range []int{1, 2} {
			if got, ok := m.Prompts[0][0].EndedBy(unused); ok {
				t.Errorf("%s: in tier %d, ended by group %d", name, unused, got)
			}
		}
	}
}

// TestHashingIsForgottenWithItsRanks has no hashing of a model left after its workers are gone, and follows no more than four ways.
func TestHashingIsForgottenWithItsRanks(t *testing.T) {
	t.Parallel()
	x := index.New()
	names := []string{"a", "b", "c", "d", "e"}
	var seq uint64
	apply := func(worker string, events ...*kvcastv1.RouterEvent) {
		seq++
		x.ApplyEntry(&kvcastv1.Entry{Seq: seq, Worker: worker, Model: "m", Events: events})
	}
	for _, name := range names {
		g := &kvcastv1.Groups{
			Groups: []*kvcastv1.AttentionGroup{fullGroup, windowGroup}, Unit: 2, // in whole blocks, names would be learned
			Hashing: &kvcastv1.BlockHashing{Algorithm: kvcastv1.BlockHashing_ALGORITHM_SHA256, Seed: name},
		}
		apply(name, event(0, &kvcastv1.WorkerAdded{Model: "m"}), event(0, &kvcastv1.GroupsOmitted{}), event(0, g))
	}
	followed := func() (all []string) {
		workers, _ := x.Workers(nil)
		for _, w := range workers {
			if w.Ranks[0].Followed {
				all = append(all, w.Name)
			}
		}
		return all
	}
	if got := followed(); !slices.Equal(got, names[:4]) {
		t.Errorf("followed: got %v, want %v", got, names[:4])
	}
	for _, name := range names {
		apply(name, event(0, &kvcastv1.WorkerRemoved{}))
	}
	if n := x.Models(); n != 0 {
		t.Errorf("%d models are left", n)
	}
}

// TestAdaptersOfEngines has engines that know the paths of different adapters, as they are found one by one: all are followed. One engine has
// the adapter under another path, with other hashes.
func TestAdaptersOfEngines(t *testing.T) {
	t.Parallel()
	tokens := []uint32{1, 2, 3, 4, 5, 6, 7, 8}
	x := index.New()
	paths := map[string]map[string]string{
		"a": {"sql": "/1"}, "b": {"sql": "/1", "b": "/b"}, "c": {"sql": "/1", "c": "/c"}, "d": {"sql": "/1", "d": "/d"}, "e": {"sql": "/2", "e": "/e"}, "f": {"f": "/f"},
	}
	for i, name := range []string{"a", "b", "c", "d", "e", "f"} {
		h := hashesOf(t, tokens, vllmhash.Content{LoRAName: "sql", LoRAPath: "/1"})
		if name == "e" {
			h = hashesOf(t, tokens, vllmhash.Content{LoRAName: "sql", LoRAPath: "/2"})
		}
		x.ApplyEntry(&kvcastv1.Entry{Seq: uint64(i + 1), Worker: name, Model: "m", Events: []*kvcastv1.RouterEvent{
			event(0, &kvcastv1.WorkerAdded{Model: "m"}), event(0, &kvcastv1.GroupsOmitted{}),
			event(0, &kvcastv1.Groups{
				Groups: []*kvcastv1.AttentionGroup{fullGroup, windowGroup}, Unit: 4,
				Hashing: &kvcastv1.BlockHashing{Algorithm: kvcastv1.BlockHashing_ALGORITHM_SHA256, LoraPaths: paths[name]},
			}),
			event(0, &kvcastv1.Stored{BlockHashes: h, BlockSize: 4}), event(0, &kvcastv1.GroupStored{Group: 1, BlockHashes: h}),
		}})
	}
	for lora, want := range map[string][]string{"sql": {"a", "b", "c", "d", "e"}, "f": nil, "": nil} {
		var m index.Matches
		x.Match(&index.Query{Model: "m", Prompts: []index.Prompt{{TokenIDs: tokens, LoRA: lora}}}, &m)
		var got []string
		for _, match := range m.Prompts[0] {
			got = append(got, match.Worker)
			if match.Tokens() != 8 || match.Trust() != kvcastv1.Trust_TRUST_EXACT {
				t.Errorf("adapter %q, worker %s: got %d tokens, %v", lora, match.Worker, match.Tokens(), match.Trust())
			}
		}
		if !slices.Equal(got, want) {
			t.Errorf("adapter %q: got workers %v, want %v", lora, got, want)
		}
	}
}

// TestFilesContinueWhatGroupsHold has a rank whose files, of which only the main group is known, have the blocks after those in device memory.
func TestFilesContinueWhatGroupsHold(t *testing.T) {
	t.Parallel()
	var tokens []uint32
	for n := range uint32(33) {
		tokens = append(tokens, 100+n)
	}
	h := hashesOf(t, tokens, vllmhash.Content{})
	all := kvblock.AppendTokensHashes(nil, tokens, 4, kvblock.Seed("", ""), false, nil)
	x := index.New()
	onDisk := func(from, to int) *kvcastv1.RouterEvent {
		return inTier(disk, event(0, &kvcastv1.Stored{ParentHash: &h[from-1], BlockHashes: h[from:to], TokensHashes: all[from:to], BlockSize: 4}))
	}
	x.ApplyEntry(entryOf(1, event(0, &kvcastv1.GroupsOmitted{}),
		event(0, &kvcastv1.Groups{Unit: 4, Groups: []*kvcastv1.AttentionGroup{fullGroup, windowGroup}, Hashing: hashed}),
		event(0, storedOf(t, tokens, "", 4)), event(0, &kvcastv1.GroupStored{Group: 1, BlockHashes: h[:4]})))
	want := func(blocks int, trust kvcastv1.Trust) {
		t.Helper()
		for _, p := range []index.Prompt{{TokenIDs: tokens}, {TokensHashes: all}, {BlockHashes: h[:8]}} {
			var m index.Matches
			x.Match(&index.Query{Prompts: []index.Prompt{p}}, &m)
			f := &m.Prompts[0][0]
			if f.Blocks != blocks || f.Tokens() != 4*blocks || f.Trust() != trust || f.TierTrust(0) != kvcastv1.Trust_TRUST_EXACT || f.TierBlocks[0] != 4 {
				t.Errorf("%+v: %d blocks, %d tokens, %v, in device memory %d, %v", p, f.Blocks, f.Tokens(), f.Trust(), f.TierBlocks[0], f.TierTrust(0))
			}
		}
	}
	want(4, kvcastv1.Trust_TRUST_EXACT)
	x.ApplyEntry(entryOf(2, onDisk(5, 8)))
	want(4, kvcastv1.Trust_TRUST_EXACT) // there is no block between
	x.ApplyEntry(entryOf(3, onDisk(4, 5)))
	want(8, kvcastv1.Trust_TRUST_UPPER_BOUND)
}
