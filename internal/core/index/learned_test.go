package index_test

import (
	"reflect"
	"slices"
	"testing"

	"pgregory.net/rapid"

	"github.com/kvcast/kvcast/internal/core/index"
	"github.com/kvcast/kvcast/internal/core/index/hybrid/vllmhash"
	"github.com/kvcast/kvcast/internal/core/kvblock"
	"github.com/kvcast/kvcast/internal/core/testclass"
	kvcastv1 "github.com/kvcast/kvcast/proto/kvcast/v1"
)

// forkedPrompts returns prompts of 12 blocks of 4 tokens, which begin with the same tokens and differ from some token on, with their hashes.
func forkedPrompts(t *testing.T, forks ...int) (prompts [][]uint32, hashes, tokensHashes [][]uint64) {
	t.Helper()
	for _, fork := range forks {
		var tokens []uint32
		for n := range 48 {
			token := uint32(1000 + n)
			if n >= fork {
				token += uint32(fork) * 100
			}
			tokens = append(tokens, token)
		}
		prompts = append(prompts, tokens)
		hashes = append(hashes, hashesOf(t, tokens, vllmhash.Content{}))
		tokensHashes = append(tokensHashes, kvblock.AppendTokensHashes(nil, tokens, 4, kvblock.Seed("", ""), false, nil))
	}
	return prompts, hashes, tokensHashes
}

// TestLearnedNamesAnswerAsComputedOnes applies the same random events to three workers, and compares their answers to prompts.
//   - The first also holds a block of unknown content, so that a prompt's block hashes are always computed for it.
//   - For the second they are only learned. It must answer as the first does, or say that it does not know.
//   - For the third they are computed where it has not learned enough. It must answer as the first does.
//
// Prompts given by hashes must have the same answers.
func TestLearnedNamesAnswerAsComputedOnes(t *testing.T) {
	t.Parallel()
	prompts, hashes, tokensHashes := forkedPrompts(t, 0, 8, 20, 36)
	known, unknown := 0, 0
	rapid.Check(t, func(t *rapid.T) {
		groups := []*kvcastv1.AttentionGroup{fullGroup, windowGroup}
		if rapid.Bool().Draw(t, "states") {
			groups = append(groups, mambaGroup)
		}
		drops := rapid.Bool().Draw(t, "drops")
		if drops {
			groups[1] = &kvcastv1.AttentionGroup{Index: 1, Kind: windowGroup.GetKind(), BlockSize: 4, Window: 9, Drops: true}
		}
		x := index.New()
		seq := uint64(0)
		apply := func(ev func() *kvcastv1.RouterEvent) {
			for _, worker := range []string{"computed", "learned", "both"} {
				seq++
				events := []*kvcastv1.RouterEvent{ev()}
				if worker == "computed" {
					events = append(events, event(0, &kvcastv1.Stored{BlockHashes: []uint64{1}, BlockSize: 4}))
				}
				x.ApplyEntry(&kvcastv1.Entry{Seq: seq, Worker: worker, Model: "m", Events: events})
			}
		}
		describe := func() {
			for worker, hashing := range map[string]*kvcastv1.BlockHashing{"computed": hashed, "learned": nil, "both": hashed} {
				seq++
				x.ApplyEntry(&kvcastv1.Entry{Seq: seq, Worker: worker, Model: "m", Events: []*kvcastv1.RouterEvent{
					event(0, &kvcastv1.GroupsOmitted{}), event(0, &kvcastv1.Groups{Groups: groups, Unit: 4, Hashing: hashing}),
				}})
			}
		}
		apply(func() *kvcastv1.RouterEvent { return event(0, &kvcastv1.WorkerAdded{Model: "m", Ranks: []uint32{0}}) })
		late := rapid.Bool().Draw(t, "groups are described later")
		if !late {
			describe()
		}
		for range rapid.IntRange(5, 60).Draw(t, "events") {
			p := rapid.IntRange(0, len(prompts)-1).Draw(t, "prompt")
			from := rapid.IntRange(0, 11).Draw(t, "from")
			to := rapid.IntRange(from+1, 12).Draw(t, "to")
			tier := rapid.SampledFrom([]kvcastv1.Tier{1, 1, 2}).Draw(t, "tier")
			on := func(kind any) func() *kvcastv1.RouterEvent {
				return func() *kvcastv1.RouterEvent {
					ev := event(0, kind)
					ev.Tier = tier
					return ev
				}
			}
			part := hashes[p][from:to]
			switch rapid.IntRange(0, 9).Draw(t, "kind") {
			case 0, 1, 2:
				s := &kvcastv1.Stored{BlockHashes: part, TokensHashes: tokensHashes[p][from:to], BlockSize: 4}
				if from > 0 {
					s.ParentHash = &hashes[p][from-1]
				}
				apply(on(s))
			case 3:
				apply(on(&kvcastv1.Stored{BlockHashes: hashes[p], TokensHashes: tokensHashes[p], BlockSize: 4}))
			case 4, 5, 6:
				apply(on(&kvcastv1.GroupStored{Group: uint32(rapid.IntRange(1, len(groups)-1).Draw(t, "group")), BlockHashes: part}))
			case 7:
				apply(on(&kvcastv1.Removed{BlockHashes: part}))
			case 8:
				apply(on(&kvcastv1.GroupRemoved{Group: uint32(rapid.IntRange(1, len(groups)-1).Draw(t, "group")), BlockHashes: part}))
			default:
				var tiers []kvcastv1.Tier
				if rapid.Bool().Draw(t, "one tier") {
					tiers = []kvcastv1.Tier{tier}
				}
				apply(func() *kvcastv1.RouterEvent {
					return event(0, &kvcastv1.Cleared{Reason: kvcastv1.Cleared_REASON_ENGINE_CLEARED, Tiers: tiers})
				})
			}
		}
		if late {
			describe()
		}
		for p, tokens := range prompts {
			n := rapid.IntRange(4, 48).Draw(t, "tokens")
			exclude := rapid.Bool().Draw(t, "without the last token")
			byTokens := matchesOf(x, index.Prompt{TokenIDs: tokens[:n], ExcludeLastToken: exclude})
			want, got := byTokens["computed"], byTokens["learned"]
			compare := func(how string, want, got index.Match) {
				if got.Trust() != kvcastv1.Trust_TRUST_EXACT && got.Worker != "" && (how != "token ids" || got.Worker == "learned") {
					// An engine that drops a block looks at a block more, which may have no learned name.
					if !drops {
						t.Fatalf("prompt %d of %d tokens by %s: %v", p, n, how, got.Trust())
					}
					unknown++
					return
				}
				known++
				if got.Tokens() != want.Tokens() || got.TierTokens(0) != want.TierTokens(0) || got.TierTokens(1) != want.TierTokens(1) {
					t.Fatalf("prompt %d of %d tokens by %s: got %d tokens (%d, %d), %v; want %d (%d, %d)", p, n, how, got.Tokens(), got.TierTokens(0),
						got.TierTokens(1), got.Trust(), want.Tokens(), want.TierTokens(0), want.TierTokens(1))
				}
			}
			compare("token ids", want, got)
			compare("token ids", want, byTokens["both"])
			whole := matchesOf(x, index.Prompt{TokenIDs: tokens[:n/4*4]})["computed"]
			for _, worker := range []string{"computed", "learned"} {
				compare("tokens hashes", whole, matchesOf(x, index.Prompt{TokensHashes: tokensHashes[p][:n/4]})[worker])
				compare("block hashes", whole, matchesOf(x, index.Prompt{BlockHashes: hashes[p][:n/4]})[worker])
			}
		}
	})
	t.Logf("%d exact, %d not", known, unknown)
	if known == 0 || testclass.Full() && known < 10*unknown { // of few random inputs, a large part may have such names
		t.Errorf("%d answers were exact, %d were not", known, unknown)
	}
}

// TestManyRanksMatchAsEachAlone has workers with about the same blocks, of two models and with several rules. Each matches as in an index of its own.
func TestManyRanksMatchAsEachAlone(t *testing.T) {
	t.Parallel()
	prompts, hashes, tokensHashes := forkedPrompts(t, 0, 20)
	wide := &kvcastv1.AttentionGroup{Index: 1, Kind: windowGroup.GetKind(), BlockSize: 4, Window: 2 * windowGroup.GetWindow()}
	modelOf := func(worker string) string { return string("mn"[worker[0]%5/4]) }
	drops := &kvcastv1.AttentionGroup{Index: 1, Kind: windowGroup.GetKind(), BlockSize: 4, Window: windowGroup.GetWindow(), Drops: true}
	sets := [][]*kvcastv1.AttentionGroup{
		{fullGroup, windowGroup}, {fullGroup, wide}, {fullGroup, windowGroup, mambaGroup}, {fullGroup, drops}, {fullGroup, wide, mambaGroup},
	}
	rapid.Check(t, func(t *rapid.T) {
		all := index.New()
		alone := make(map[string]*index.Index)
		seq := uint64(0)
		apply := func(worker string, tier kvcastv1.Tier, kinds ...any) {
			seq++
			e := &kvcastv1.Entry{Seq: seq, Worker: worker, Model: modelOf(worker)}
			for _, kind := range kinds {
				ev := event(0, kind)
				ev.Tier = tier
				e.Events = append(e.Events, ev)
			}
			all.ApplyEntry(e)
			alone[worker].ApplyEntry(e)
		}
		groups := sets[rapid.IntRange(0, len(sets)-1).Draw(t, "groups")]
		var workers []string
		for n := range 8 {
			worker := string(rune('a' + n))
			workers, alone[worker] = append(workers, worker), index.New()
			if rapid.IntRange(0, 4).Draw(t, "other groups") == 0 {
				groups = sets[rapid.IntRange(0, len(sets)-1).Draw(t, "groups")]
			}
			apply(worker, kvcastv1.Tier_TIER_DEVICE, &kvcastv1.WorkerAdded{Model: modelOf(worker), Ranks: []uint32{0}}, &kvcastv1.Groups{Groups: groups, Unit: 4})
			for p := range prompts {
				apply(worker, kvcastv1.Tier_TIER_DEVICE, &kvcastv1.Stored{BlockHashes: hashes[p], TokensHashes: tokensHashes[p], BlockSize: 4},
					&kvcastv1.GroupStored{Group: 1, BlockHashes: hashes[p]}, &kvcastv1.GroupStored{Group: 2, BlockHashes: hashes[p]})
			}
		}
		for range rapid.IntRange(0, 6).Draw(t, "changes") {
			p, from := rapid.IntRange(0, 1).Draw(t, "prompt"), rapid.IntRange(0, 11).Draw(t, "from")
			to := rapid.IntRange(from+1, 12).Draw(t, "to")
			part, other := hashes[p][from:to], []uint64{1} // another hash of the first block
			kind := rapid.SampledFrom([]any{
				&kvcastv1.Removed{BlockHashes: hashes[p][from:]}, &kvcastv1.GroupRemoved{Group: 1, BlockHashes: part},
				&kvcastv1.GroupRemoved{Group: 2, BlockHashes: part}, &kvcastv1.GroupStored{Group: 1, BlockHashes: part},
				&kvcastv1.GroupRemoved{Group: 1, BlockHashes: hashes[p]},
				&kvcastv1.Stored{BlockHashes: hashes[p], TokensHashes: tokensHashes[p], BlockSize: 4},
				&kvcastv1.Stored{BlockHashes: other, TokensHashes: tokensHashes[p][:1], BlockSize: 4}, &kvcastv1.GroupStored{Group: 1, BlockHashes: other},
			}).Draw(t, "change")
			tier := rapid.SampledFrom([]kvcastv1.Tier{1, 1, 1, 2, 3}).Draw(t, "tier")
			apply(rapid.SampledFrom(workers).Draw(t, "worker"), tier, kind)
		}
		for p, tokens := range prompts {
			n := rapid.IntRange(4, 48).Draw(t, "tokens")
			q := &index.Query{
				Prompts: []index.Prompt{{TokenIDs: tokens[:n], ExcludeLastToken: rapid.Bool().Draw(t, "without the last token")}, {TokensHashes: tokensHashes[p]}},
				Walk:    rapid.Bool().Draw(t, "walk"),
			}
			var got, want index.Matches
			all.Match(q, &got)
			for form, got := range got.Prompts {
				matches := 0
				for _, worker := range workers {
					alone[worker].Match(q, &want)
					matches += len(want.Prompts[form])
					for _, w := range want.Prompts[form] {
						i := slices.IndexFunc(got, func(m index.Match) bool { return m.Worker == worker })
						if i < 0 || !reflect.DeepEqual(got[i], w) {
							t.Fatalf("prompt %d of %d tokens, form %d, worker %s: got %+v, alone %+v", p, n, form, worker, got, w)
						}
					}
				}
				if matches != len(got) {
					t.Fatalf("prompt %d of %d tokens, form %d: %d matches, %d of workers alone", p, n, form, len(got), matches)
				}
			}
		}
	})
}

// matchesOf returns the matches of a prompt by worker.
func matchesOf(x *index.Index, p index.Prompt) map[string]index.Match {
	var m index.Matches
	x.Match(&index.Query{Model: "m", Prompts: []index.Prompt{p}}, &m)
	all := make(map[string]index.Match)
	for _, match := range slices.Clone(m.Prompts[0]) {
		all[match.Worker] = match
	}
	return all
}

// TestLearnedWordsAreBounded stores and removes blocks of a window, and stores the same hash with ever other contents, as no engine does.
func TestLearnedWordsAreBounded(t *testing.T) {
	t.Parallel()
	x := index.New()
	var seq uint64
	apply := func(kinds ...any) {
		seq++
		e := &kvcastv1.Entry{Seq: seq, Worker: "w", Model: "m"}
		for _, kind := range kinds {
			e.Events = append(e.Events, event(0, kind))
		}
		x.ApplyEntry(e)
	}
	const bound = 1100
	apply(&kvcastv1.WorkerAdded{Model: "m"}, &kvcastv1.Groups{Groups: []*kvcastv1.AttentionGroup{fullGroup, windowGroup}})
	for n := range uint64(5000) {
		apply(&kvcastv1.Stored{BlockHashes: []uint64{n + 1}, TokensHashes: []uint64{n}, BlockSize: 4}, &kvcastv1.GroupStored{Group: 1, BlockHashes: []uint64{n + 1}})
		if n >= 10 {
			apply(&kvcastv1.GroupRemoved{Group: 1, BlockHashes: []uint64{n - 9}})
		}
		if names := x.LearnedWords("w", 0); names > bound {
			t.Fatalf("got %d names of 10 blocks of a window", names)
		}
	}
	for n := range uint64(5000) {
		apply(&kvcastv1.Stored{BlockHashes: []uint64{5000}, TokensHashes: []uint64{n + 5000}, BlockSize: 4})
	}
	if names := x.LearnedWords("w", 0); names > bound {
		t.Errorf("got %d names of 10 blocks of a window", names)
	}
	if x.Learners() != 1 {
		t.Errorf("%d ranks learn, want 1", x.Learners())
	}
	x.Reset()
	if x.Learners() != 0 {
		t.Errorf("%d ranks of an empty index learn", x.Learners())
	}
}
