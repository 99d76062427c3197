package pipeline_test

import (
	"testing"

	"github.com/kvcast/kvcast/internal/core/index"
	"github.com/kvcast/kvcast/internal/core/kvblock"
	"github.com/kvcast/kvcast/internal/feed"
	"github.com/kvcast/kvcast/internal/wire"
	"github.com/kvcast/kvcast/pipeline"
	kvcastv1 "github.com/kvcast/kvcast/proto/kvcast/v1"
)

// wantDoubt fails the test if a tier of the first rank counts as complete.
func wantDoubt(t *testing.T, s *subject, tier kvblock.Tier) {
	t.Helper()
	w, ok := s.journal.index.Worker(testWorker)
	if !ok {
		t.Fatal("no worker")
	}
	if w.Ranks[0].TierReasons[tier-kvblock.TierDevice] == 0 {
		t.Errorf("no reason for doubt in tier %d", tier)
	}
}

// TestAClearOfDeviceMemoryDoesNotResolveOtherTiers has a store of host memory that was skipped, so that nothing is known to be there.
func TestAClearOfDeviceMemoryDoesNotResolveOtherTiers(t *testing.T) {
	calls := []call{
		batch(store(1)), doubting(batch(), feed.GapEventsSkipped, 1<<kvblock.TierHostPinned, "x"),
		batch(clearOf(kvblock.TierDevice, "")), batch(store(1)), batch(clearOf(kvblock.TierDevice, "GPU")),
	}
	t.Run("one source", func(t *testing.T) {
		withWorker(t, pipeline.Config{}, func(t *testing.T, s *subject) {
			s.play(t, calls...)
			wantDoubt(t, s, kvblock.TierHostPinned)
		})
	})
	for _, mode := range []feed.Consolidate{feed.ConsolidatePassthrough, feed.ConsolidateDedup} {
		t.Run(string(mode), func(t *testing.T) {
			withSharing(t, pipeline.Config{}, mode, func(t *testing.T, s *subject) {
				s.play(t, calls...)
				wantDoubt(t, s, kvblock.TierHostPinned)
			})
		})
	}
}

// TestAClearOfASourceDoesNotProveTheReplayOfAnother has a clear of the first source, while batches of the second are not proved to be its engine's.
func TestAClearOfASourceDoesNotProveTheReplayOfAnother(t *testing.T) {
	unproved := func(c call) call { return by2(doubting(c, feed.GapReplayUnproved, kvblock.AllTiers, "")) }
	for _, mode := range []feed.Consolidate{feed.ConsolidatePassthrough, feed.ConsolidateDedup} {
		for name, calls := range map[string][]call{
			"it has stored nothing":        {batch(store(1)), unproved(batch()), batch(clearOf(0, ""))},
			"it has no block":              {batch(store(1)), unproved(batch(store(2), remove(2))), batch(clearOf(0, ""))},
			"the first restarts":           {batch(store(1)), unproved(batch(onHost(store(2)))), restarted(0)},
			"the first clears host memory": {batch(store(1), onHost(store(3))), unproved(batch(store(2))), batch(clearOf(kvblock.TierHostPinned, "CPU"))},
		} {
			t.Run(string(mode)+", "+name, func(t *testing.T) {
				withSharing(t, pipeline.Config{}, mode, func(t *testing.T, s *subject) {
					s.play(t, calls...)
					wantDoubt(t, s, kvblock.TierDevice)
					if mode == feed.ConsolidatePassthrough {
						wantDoubt(t, s, kvblock.TierHostPinned)
					}
				})
			})
		}
	}
}

// TestACopyOfABlockOfUnknownContent has device memory store a block of unknown content, host memory get it by its hash alone, and device memory be cleared.
func TestACopyOfABlockOfUnknownContent(t *testing.T) {
	withWorker(t, pipeline.Config{}, func(t *testing.T, s *subject) {
		second := after(1, store(2))
		second.TokensHashes, second.Tokens = nil, nil // as of a block with prompt embeddings
		copied := onHost(second)
		copied.HashesOnly, copied.BlockSize, copied.HasParent, copied.Parent = true, 0, false, 0
		s.play(t,
			batch(store(1)), doubting(batch(second), feed.GapUnknownContent, 1<<kvblock.TierDevice, ""),
			batch(onHost(store(1)), copied), batch(clearOf(kvblock.TierDevice, "GPU")))
		var m index.Matches
		s.journal.index.Match(&index.Query{Prompts: []index.Prompt{{TokensHashes: store(1, 2).TokensHashes}}}, &m)
		if f := &m.Prompts[0][0]; f.Trust() == kvcastv1.Trust_TRUST_EXACT {
			t.Errorf("%d blocks of the prompt, %v, and host memory holds 2", f.Blocks, f.Trust())
		}
	})
}

// TestAClearOfDeviceMemoryEndsItsDoubts has a source of which host memory alone is doubted.
func TestAClearOfDeviceMemoryEndsItsDoubts(t *testing.T) {
	withSharing(t, pipeline.Config{}, feed.ConsolidatePassthrough, func(t *testing.T, s *subject) {
		s.play(t, batch(store(1)), doubting(batch(), feed.GapEventsSkipped, 1<<kvblock.TierHostPinned, "x"), batch(clearOf(kvblock.TierDevice, "GPU")), batch(store(1)))
		wantDoubt(t, s, kvblock.TierHostPinned)
		if w, _ := s.journal.index.Worker(testWorker); w.Ranks[0].TierReasons[0] != 0 {
			t.Errorf("device memory has the reasons %v", w.Ranks[0].TierReasons[0].List())
		}
	})
}

// TestFirstUseOfATierAfterAClear has a source, of two, that clears its device memory while there are doubts about it, and then stores into host
// memory for the first time. What the other source does proves nothing about that.
func TestFirstUseOfATierAfterAClear(t *testing.T) {
	deviceClear, use := batch(clearOf(kvblock.TierDevice, "GPU")), batch(onHost(store(1)))
	late2, clear2, use2 := by2(joinedLate(0)), by2(batch(clearOf(kvblock.TierDevice, "GPU"))), by2(batch(onHost(store(1))))
	for name, c := range map[string]struct {
		calls []call
		want  bool // host memory is in doubt
	}{
		"a late join":                      {[]call{joinedLate(0), deviceClear, use}, true},
		"skipped events":                   {[]call{doubting(batch(), feed.GapEventsSkipped, kvblock.AllTiers, "x"), deviceClear, use}, true},
		"of the other source":              {[]call{late2, clear2, use2}, true},
		"two clears":                       {[]call{joinedLate(0), deviceClear, deviceClear, use}, true},
		"a clear of all":                   {[]call{joinedLate(0), batch(clearOf(0, "")), use}, false},
		"a clear of all afterwards":        {[]call{joinedLate(0), deviceClear, batch(clearOf(0, "")), use}, false},
		"a restart":                        {[]call{joinedLate(0), deviceClear, restarted(0), use}, false},
		"a restart of one of two in doubt": {[]call{joinedLate(0), by2(joinedLate(0)), deviceClear, restarted(0), use}, true},
		"nothing in doubt":                 {[]call{batch(store(2)), deviceClear, use}, false},

		"the other restarts":                       {[]call{late2, clear2, restarted(0), use2}, true},
		"the other clears all":                     {[]call{late2, clear2, batch(clearOf(0, "")), use2}, true},
		"the other restarts, after both clears":    {[]call{joinedLate(0), late2, deviceClear, clear2, restarted(0), use2}, true},
		"the other uses the tier and restarts":     {[]call{late2, clear2, use, restarted(0), use2}, true},
		"the other clears host memory":             {[]call{batch(store(1), onHost(store(3))), late2, clear2, batch(clearOf(kvblock.TierHostPinned, "CPU")), use2}, true},
		"both use it, and the other restarts":      {[]call{joinedLate(0), late2, deviceClear, clear2, use, use2, restarted(0)}, true},
		"only the other uses it":                   {[]call{late2, clear2, use}, false},
		"the source restarts beside another":       {[]call{batch(store(2)), late2, clear2, by2(restarted(0)), batch(clearOf(0, "")), use2}, false},
		"a clear of host memory alone, in doubt":   {[]call{late2, by2(batch(clearOf(kvblock.TierHostPinned, "CPU"))), restarted(0)}, true},
		"a clear of all by each, after late joins": {[]call{joinedLate(0), late2, batch(clearOf(0, "")), by2(batch(clearOf(0, ""))), use, use2}, false},
	} {
		for _, mode := range []feed.Consolidate{feed.ConsolidatePassthrough, feed.ConsolidateDedup} {
			t.Run(string(mode)+", "+name, func(t *testing.T) {
				withSharing(t, pipeline.Config{}, mode, func(t *testing.T, s *subject) {
					s.play(t, c.calls...)
					w, _ := s.journal.index.Worker(testWorker)
					tier := kvblock.TierHostPinned
					if mode == feed.ConsolidateDedup {
						tier = kvblock.TierDevice // in which routers hold all blocks
					}
					if got := w.Ranks[0].TierReasons[tier-kvblock.TierDevice]; (got != 0) != c.want {
						t.Errorf("reasons %v, want some: %v", got.List(), c.want)
					}
				})
			})
		}
	}
}

// TestCopiesOfADeduplicatedBlockDoNotTellItsContent has a copy of a block with an image, by a connector that does not tell it.
func TestCopiesOfADeduplicatedBlockDoNotTellItsContent(t *testing.T) {
	withSharing(t, pipeline.Config{}, feed.ConsolidateDedup, func(t *testing.T, s *subject) {
		image, untold := store(1), onHost(store(1))
		image.TokensHashes, image.Inputs, untold.Inputs = []uint64{77}, wire.InputsSent, wire.InputsNotSent
		s.play(t, batch(image), batch(untold))
		var m index.Matches
		s.journal.index.Match(&index.Query{Prompts: []index.Prompt{{TokensHashes: []uint64{77}}, {TokensHashes: untold.TokensHashes}}}, &m)
		if len(m.Prompts[0]) != 1 || len(m.Prompts[1]) != 0 {
			t.Errorf("matches %v, want one of the prompt with the image", m.Prompts)
		}
	})
}
