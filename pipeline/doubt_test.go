package pipeline_test

import (
	"fmt"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/kvcast/kvcast/internal/core/kvblock"
	"github.com/kvcast/kvcast/internal/feed"
	"github.com/kvcast/kvcast/internal/wire"
	"github.com/kvcast/kvcast/pipeline"
	kvcastv1 "github.com/kvcast/kvcast/proto/kvcast/v1"
	"github.com/kvcast/kvcast/test/harness"
)

// doubting adds a doubt to a batch.
func doubting(c call, reason feed.GapReason, tiers kvblock.Tiers, detail string) call {
	c.Batch.Doubts = append(c.Batch.Doubts, feed.Doubt{Reason: reason, Tiers: tiers, Detail: detail})
	return c
}

// clearOf is a clear of a tier: one that the engine names, or that its clears are of.
func clearOf(tier kvblock.Tier, medium string) wire.Event {
	return wire.Event{Kind: wire.KindCleared, Tier: tier, Medium: medium}
}

// textDoubts describes entries with the tiers and details of their Gaps.
func textDoubts(entries []*kvcastv1.Entry) [][]string {
	all := describe(entries)
	for i, e := range entries {
		for j, ev := range e.GetEvents() {
			if g := ev.GetGap(); g != nil {
				var tiers []string
				for _, tier := range g.GetTiers() {
					tiers = append(tiers, strings.TrimPrefix(tier.String(), "TIER_"))
				}
				text := "gap " + strings.TrimPrefix(g.GetReason().String(), "REASON_")
				for _, part := range []string{strings.Join(tiers, "+"), g.GetDetail()} {
					if part != "" {
						text += " " + part
					}
				}
				all[i][j] = text
			}
		}
	}
	return all
}

// TestDoubtsAreReportedOnce plays batches to a worker with one source, and compares the entries of the last call.
func TestDoubtsAreReportedOnce(t *testing.T) {
	const (
		skipped = feed.GapEventsSkipped
		size    = feed.GapBlockSizeMismatch
	)
	host := func(e wire.Event) wire.Event { return inTier(kvblock.TierHostPinned, e) }
	onHost, onDevice := kvblock.Tiers(1<<kvblock.TierHostPinned), kvblock.Tiers(1<<kvblock.TierDevice)
	unknown := func(e wire.Event) wire.Event {
		e.HashesOnly, e.BlockSize, e.TokensHashes, e.Tokens = true, 0, nil, nil
		return e
	}
	const otherParent = "a store says of a block that device memory holds that it has another parent"
	const hashesAlone = "a store of hashes alone names a block that is in no tier"
	for name, c := range map[string]struct {
		calls []call
		want  [][]string // of the last call
	}{
		"first":                     {[]call{doubting(batch(store(1)), skipped, kvblock.AllTiers, "unknown_tag")}, [][]string{{"store [1]", "gap EVENTS_SKIPPED unknown_tag"}}},
		"in a batch without events": {[]call{doubting(batch(), skipped, onHost, "")}, [][]string{{"gap EVENTS_SKIPPED HOST_PINNED"}}},
		"again":                     {[]call{doubting(batch(), skipped, kvblock.AllTiers, "a"), doubting(batch(store(1)), skipped, onHost, "b")}, [][]string{{"store [1]"}}},
		"in another tier":           {[]call{doubting(batch(), skipped, onHost, "a"), doubting(batch(), skipped, kvblock.AllTiers, "b")}, [][]string{{"gap EVENTS_SKIPPED b"}}},
		"another reason":            {[]call{doubting(batch(), skipped, onHost, ""), doubting(batch(), size, onHost, "16, not 32")}, [][]string{{"gap BLOCK_SIZE_MISMATCH HOST_PINNED 16, not 32"}}},
		"after a clear in the batch": {[]call{doubting(batch(clearOf(0, "")), skipped, kvblock.AllTiers, "")},
			[][]string{{"cleared [] ENGINE_CLEARED", "gap EVENTS_SKIPPED"}}},
		"after a clear":             {[]call{doubting(batch(), skipped, kvblock.AllTiers, ""), batch(clearOf(0, "")), doubting(batch(), skipped, kvblock.AllTiers, "")}, [][]string{{"gap EVENTS_SKIPPED"}}},
		"after a clear of the tier": {[]call{batch(store(1), host(store(1))), doubting(batch(), skipped, onDevice, ""), batch(clearOf(kvblock.TierDevice, "GPU")), doubting(batch(), skipped, onDevice, "")}, [][]string{{"gap EVENTS_SKIPPED DEVICE"}}},
		"first use of host memory after a clear of device memory": {[]call{doubting(batch(), skipped, kvblock.AllTiers, ""), batch(clearOf(kvblock.TierDevice, "")), batch(store(1)), batch(host(store(1)))},
			[][]string{{"gap TIER_NOT_CLEARED HOST_PINNED", "HOST_PINNED store [1]"}}},
		"first remove from host memory after a clear of device memory": {[]call{doubting(batch(), skipped, kvblock.AllTiers, ""), batch(clearOf(kvblock.TierDevice, "")), batch(host(remove(1)))},
			[][]string{{"gap TIER_NOT_CLEARED HOST_PINNED", "HOST_PINNED remove [1]"}}},
		"second use": {[]call{doubting(batch(), skipped, kvblock.AllTiers, ""), batch(clearOf(kvblock.TierDevice, "")), batch(host(store(1))), batch(host(store(2)))},
			[][]string{{"HOST_PINNED store [2]"}}},
		"first use after a clear that followed a replay which is not proved": {[]call{doubting(batch(), feed.GapReplayUnproved, kvblock.AllTiers, ""), batch(clearOf(kvblock.TierDevice, "")), batch(host(store(1)))}, [][]string{{"HOST_PINNED store [1]"}}},
		"a clear of host memory before any use, and a store in device memory": {[]call{doubting(batch(), skipped, kvblock.AllTiers, ""), batch(clearOf(kvblock.TierHostPinned, "CPU")), doubting(batch(store(1)), skipped, onDevice, "")},
			[][]string{{"store [1]"}}},
		"a clear of host memory, of which nothing is known": {[]call{batch(clearOf(kvblock.TierHostPinned, "CPU"))}, [][]string{{"cleared [TIER_HOST_PINNED] ENGINE_CLEARED"}}},
		"first use after a clear without doubts":            {[]call{batch(store(1)), batch(clearOf(kvblock.TierDevice, "")), batch(host(store(1)))}, [][]string{{"HOST_PINNED store [1]"}}},
		"first use after two clears":                        {[]call{doubting(batch(), skipped, kvblock.AllTiers, ""), batch(clearOf(kvblock.TierDevice, ""), clearOf(kvblock.TierDevice, "")), batch(host(store(1)))}, [][]string{{"gap TIER_NOT_CLEARED HOST_PINNED", "HOST_PINNED store [1]"}}},
		"first use after a clear of all":                    {[]call{doubting(batch(), skipped, kvblock.AllTiers, ""), batch(clearOf(0, "")), batch(host(store(1)))}, [][]string{{"HOST_PINNED store [1]"}}},
		"first use after a clear of host memory":            {[]call{doubting(batch(), skipped, kvblock.AllTiers, ""), batch(clearOf(kvblock.TierDevice, "")), batch(clearOf(kvblock.TierHostPinned, "CPU")), batch(host(store(1)))}, [][]string{{"HOST_PINNED store [1]"}}},
		"a clear of all after one of device memory":         {[]call{doubting(batch(), skipped, kvblock.AllTiers, ""), batch(clearOf(kvblock.TierDevice, "")), batch(clearOf(0, "")), batch(host(store(1)))}, [][]string{{"HOST_PINNED store [1]"}}},
		"first use after a restart":                         {[]call{doubting(batch(), skipped, kvblock.AllTiers, ""), batch(clearOf(kvblock.TierDevice, "")), restarted(0), batch(host(store(1)))}, [][]string{{"HOST_PINNED store [1]"}}},
		"after a clear of another":                          {[]call{batch(store(1), host(store(1))), doubting(batch(), skipped, onDevice, ""), batch(clearOf(kvblock.TierHostPinned, "CPU")), doubting(batch(), skipped, onDevice, "")}, [][]string{}},

		"remove of a block that was skipped for its size": {[]call{doubting(batch(store(1)), size, onDevice, ""), batch(remove(2, 1))}, [][]string{{"remove [1]"}}},
		"remove of an unknown block in another tier":      {[]call{doubting(batch(store(1)), size, onHost, ""), batch(remove(2))}, [][]string{{"remove [2]"}}},
		"hashes alone of a block in another tier":         {[]call{batch(store(1)), batch(unknown(host(store(1))))}, [][]string{{"HOST_PINNED store [1] block size 0 hash only"}}},
		"hashes alone of no block":                        {[]call{batch(store(1)), batch(unknown(host(store(1, 2))))}, [][]string{{"gap UNKNOWN_CONTENT HOST_PINNED " + hashesAlone, "HOST_PINNED store [1 2] block size 0 hash only"}}},
		"another parent than on the device":               {[]call{batch(store(1, 2)), batch(host(after(9, store(2))))}, [][]string{{"gap UNKNOWN_CONTENT HOST_PINNED " + otherParent, "HOST_PINNED store [2] hash only"}}},
		"no parent, unlike on the device":                 {[]call{batch(store(1), host(store(2, 1)), host(store(2, 1)))}, [][]string{{"store [1]", "gap UNKNOWN_CONTENT HOST_PINNED " + otherParent, "HOST_PINNED store [2 1] hash only", "HOST_PINNED store [2 1] hash only"}}},
		"the parent that it has on the device":            {[]call{batch(store(1, 2)), batch(host(after(1, store(2))))}, [][]string{{"HOST_PINNED store [2] after 1"}}},
		"a chunk whose last block is on the device":       {[]call{batch(store(2)), batch(host(store(wire.PartBefore(2), 2)))}, [][]string{{fmt.Sprintf("HOST_PINNED store [%d 2]", wire.PartBefore(2))}}},
		"hashes alone on the device":                      {[]call{batch(unknown(store(2))), batch(host(after(1, store(2))))}, [][]string{{"HOST_PINNED store [2] after 1"}}},
		"hashes alone of a chunk":                         {[]call{batch(host(store(wire.PartBefore(2), 2))), batch(unknown(inTier(kvblock.TierDisk, store(2))))}, [][]string{{"gap CONNECTOR_TIER DISK a store of hashes alone names a chunk", "DISK store [2] block size 0 hash only"}}},
		"a device that has another parent afterwards":     {[]call{batch(host(after(9, store(2)))), batch(store(1, 2))}, [][]string{{"store [1 2]"}}},
		"a clear of device memory without other tiers":    {[]call{batch(store(1)), batch(clearOf(kvblock.TierDevice, ""))}, [][]string{{"cleared [] ENGINE_CLEARED"}}},
		"a clear of device memory after a late join":      {[]call{gap(0), batch(store(1)), batch(clearOf(kvblock.TierDevice, ""))}, [][]string{{"cleared [] ENGINE_CLEARED"}}},
		"a clear of device memory beside host memory":     {[]call{batch(store(1), host(store(1))), batch(clearOf(kvblock.TierDevice, ""))}, [][]string{{"cleared [TIER_DEVICE] ENGINE_CLEARED", "gap TIER_NOT_CLEARED HOST_PINNED"}}},
		"another one": {[]call{batch(store(1), host(store(1))), batch(clearOf(kvblock.TierDevice, "")), batch(store(2)), batch(clearOf(kvblock.TierDevice, ""))}, [][]string{{"cleared [TIER_DEVICE] ENGINE_CLEARED"}}},
		"a clear of device memory beside emptied memory":   {[]call{batch(store(1), host(store(1))), batch(host(remove(1))), batch(clearOf(kvblock.TierDevice, ""))}, [][]string{{"cleared [] ENGINE_CLEARED"}}},
		"a clear that names the device beside host memory": {[]call{batch(store(1), host(store(1))), batch(clearOf(kvblock.TierDevice, "GPU"))}, [][]string{{"cleared [TIER_DEVICE] ENGINE_CLEARED"}}},
		"a clear of host memory":                           {[]call{batch(store(1), host(store(1))), batch(clearOf(kvblock.TierHostPinned, "CPU"), host(store(2)))}, [][]string{{"cleared [TIER_HOST_PINNED] ENGINE_CLEARED", "HOST_PINNED store [2]"}}},
		"a clear of all tiers":                             {[]call{batch(store(1), host(store(1))), batch(clearOf(0, ""))}, [][]string{{"cleared [] ENGINE_CLEARED"}}},
		"a clear of device memory with refused blocks in host memory": {[]call{batch(store(1, 2, 3)), batch(host(store(4))), batch(clearOf(kvblock.TierDevice, ""))},
			[][]string{{"cleared [TIER_DEVICE] ENGINE_CLEARED", "gap TIER_NOT_CLEARED HOST_PINNED"}}},
	} {
		t.Run(name, func(t *testing.T) {
			withWorker(t, pipeline.Config{MaxBlocksPerRank: 3}, func(t *testing.T, s *subject) {
				last := len(c.calls) - 1
				s.play(t, c.calls[:last]...)
				if diff := cmp.Diff(c.want, textDoubts(s.play(t, c.calls[last]))); diff != "" {
					t.Errorf("entries (-want +got):\n%s", diff)
				}
			})
		})
	}
}

// TestKnownPrefixIsStoredWithItsContent splits a store of which the content of the last blocks is unknown.
func TestKnownPrefixIsStoredWithItsContent(t *testing.T) {
	e := store(1, 2, 3)
	e.TokensHashes = e.TokensHashes[:2]
	want := [][]string{{"store [1 2]", "store [3] after 2 hash only"}}
	check := func(t *testing.T, s *subject) {
		t.Helper()
		if diff := cmp.Diff(want, describe(s.play(t, batch(e)))); diff != "" {
			t.Errorf("entries (-want +got):\n%s", diff)
		}
	}
	withWorker(t, pipeline.Config{}, check)
	for _, mode := range []feed.Consolidate{feed.ConsolidatePassthrough, feed.ConsolidateDedup} {
		withSharing(t, pipeline.Config{}, mode, check)
	}
}

// TestClearsOfOneOfSeveralSources compares the entries of a clear of the first source's device memory.
func TestClearsOfOneOfSeveralSources(t *testing.T) {
	host := func(e wire.Event) wire.Event { return inTier(kvblock.TierHostPinned, e) }
	for name, c := range map[string]struct {
		mode  feed.Consolidate
		calls []call
		want  [][]string
	}{
		"its own tiers": {feed.ConsolidatePassthrough, []call{batch(store(1), host(store(1))), batch(clearOf(kvblock.TierDevice, ""))},
			[][]string{{"cleared [TIER_DEVICE] ENGINE_CLEARED", "gap TIER_NOT_CLEARED HOST_PINNED"}}},
		"a tier that another uses": {feed.ConsolidatePassthrough, []call{batch(store(1), host(store(1))), by2(batch(store(2))), batch(clearOf(kvblock.TierDevice, ""))},
			[][]string{{"gap SHARED_TIER DEVICE", "gap TIER_NOT_CLEARED HOST_PINNED"}}},
		"while another is incomplete": {feed.ConsolidatePassthrough, []call{batch(store(1)), by2(batch(host(store(2)))), by2(gap(0)), batch(clearOf(kvblock.TierDevice, ""))},
			[][]string{{"cleared [TIER_DEVICE] UNREPAIRED_GAP"}}},
		"deduplicated": {feed.ConsolidateDedup, []call{batch(store(1), host(store(2))), by2(batch(store(3))), batch(clearOf(kvblock.TierDevice, ""))},
			[][]string{{"remove [1 2]", "gap TIER_NOT_CLEARED"}}},
		"deduplicated, of host memory": {feed.ConsolidateDedup, []call{batch(store(1), host(store(2))), by2(batch(store(3))), batch(clearOf(kvblock.TierHostPinned, "CPU"))},
			[][]string{{"gap TIER_NOT_CLEARED"}}},
	} {
		t.Run(name, func(t *testing.T) {
			withSharing(t, pipeline.Config{}, c.mode, func(t *testing.T, s *subject) {
				last := len(c.calls) - 1
				s.play(t, c.calls[:last]...)
				if diff := cmp.Diff(c.want, textDoubts(s.play(t, c.calls[last]))); diff != "" {
					t.Errorf("entries (-want +got):\n%s", diff)
				}
			})
		})
	}
}

// TestDoubtsAreLogged checks that each doubt of the pipeline's own is one line.
func TestDoubtsAreLogged(t *testing.T) {
	host := func(e wire.Event) wire.Event { return inTier(kvblock.TierHostPinned, e) }
	unknown := host(store(9))
	unknown.HashesOnly, unknown.TokensHashes = true, nil
	var log harness.Log
	withWorker(t, pipeline.Config{Logger: log.Logger()}, func(t *testing.T, s *subject) {
		s.play(t, batch(store(1), host(store(1))), batch(unknown), batch(clearOf(kvblock.TierDevice, "")), batch(clearOf(0, "")))
		if n := strings.Count(log.String(), "\n"); n != 2 {
			t.Errorf("%d lines, want 2:\n%s", n, log.String())
		}
	})
	log.Want(t,
		`level=WARN msg="content of blocks unknown: no prompt matches them" worker=w source=0 rank=0 reason=unknown_content tiers=host_pinned `+
			`detail="a store of hashes alone names a block that is in no tier" hint="rely on the device's blocks"`,
		`level=WARN msg="the engine cleared its device memory, and perhaps other tiers" worker=w source=0 rank=0 reason=tier_not_cleared tiers=host_pinned `+
			`detail="" hint="set clear: all if the engine clears all tiers"`,
	)
}

// TestSizesOfChunksAreReported has a size that is known after the tier's reason, again, and another one.
func TestSizesOfChunksAreReported(t *testing.T) {
	const onHost = 1 << kvblock.TierHostPinned
	chunks := func(tokens uint32) call {
		c := batch()
		c.Batch.Doubts = []feed.Doubt{{Reason: feed.GapConnectorTier, Tiers: onHost, ChunkTokens: tokens}}
		return c
	}
	withWorker(t, pipeline.Config{}, func(t *testing.T, s *subject) {
		var got []uint32
		for _, tokens := range []uint32{0, 256, 256, 0, 512, 256} {
			for _, e := range s.play(t, chunks(tokens)) {
				for _, event := range e.GetEvents() {
					got = append(got, event.GetGap().GetChunkTokens())
				}
			}
		}
		if d := cmp.Diff([]uint32{0, 256, 512, 256}, got); d != "" {
			t.Errorf("sizes in Gaps (-want +got):\n%s", d)
		}
	})
}
