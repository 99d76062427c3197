package consolidate

import (
	"runtime"
	"slices"
	"strings"
	"testing"

	"google.golang.org/protobuf/encoding/protowire"
	"google.golang.org/protobuf/proto"

	"github.com/kvcast/kvcast/internal/budget"
	"github.com/kvcast/kvcast/internal/core/testclass"
	statev1 "github.com/kvcast/kvcast/proto/kvcast/state/v1"
)

// manifold returns a tracker whose state has elements in all columns. Its blocks, the oldest first:
//
//   - with the name 5 of the second source, the stale name 1, and the idle name 4
//   - with the stale name 6, and the name 2, which has three copies
//   - of unknown content, with the name 3 of the second source
//   - with the name 14 of the second source, and the router hash 6
func manifold() *Tracker {
	tr := New(2, 100, nil, nil, new(Counts))
	tr.play(
		stores(engine, ofSalt("salt", storeOf(contents(1), 1))), stores(engine, ofSalt("salt", storeOf(contents(1), 4))), losesBatches(engine),
		stores(offload, ofSalt("salt", storeOf(contents(1), 5))), removes(engine, 4),
		stores(engine, ofSalt("salt", continuing(1, storeOf(contents(2), 2)))), stores(engine, ofSalt("salt", continuing(1, storeOf(contents(2), 2)))),
		stores(engine, ofSalt("salt", continuing(1, storeOf(contents(2), 2)))), stores(offload, continuing(9, storeOf(nil, 3))),
		stores(engine, ofLoRA("adapter", storeOf(contents(4), 6))), stores(offload, ofLoRA("adapter", storeOf(contents(4), 14))),
		stores(engine, ofSalt("salt", storeOf(contents(1, 2), 1, 6))), losesBatches(engine),
		stores(engine, ofSalt("salt", continuing(1, storeOf(contents(2), 2)))), stores(engine, ofSalt("salt", continuing(1, storeOf(contents(2), 2)))),
	)
	tr.CountChildren(offload)
	return tr
}

// TestRestoreReportsInvalidState changes a part of a valid state at a time.
func TestRestoreReportsInvalidState(t *testing.T) {
	tests := map[string]struct {
		change func(*statev1.Tracker)
		want   string
	}{
		"too few generations": {
			func(s *statev1.Tracker) { s.Generations = s.Generations[1:] }, "generations of 1 and counted names of 2 sources, want 2",
		},
		"too many counted names": {
			func(s *statev1.Tracker) { s.CountedNames = append(s.CountedNames, 0) }, "generations of 2 and counted names of 3 sources, want 2",
		},
		"generation": {
			func(s *statev1.Tracker) { s.Generations[1] = maxGeneration + 1 }, "source 1: generation 2097152, want at most 2097151",
		},
		"counted names": {
			func(s *statev1.Tracker) { s.CountedNames[1] = 8 }, "source 1: children of 8 names counted, of up to 7",
		},
		"low peak":      {func(s *statev1.Tracker) { s.CountedNames[1], s.PeakNames = 0, 6 }, "a peak of 6 names with 7 names"},
		"high peak":     {func(s *statev1.Tracker) { s.PeakNames = maxRecords + 1 }, "a peak of 4294965248 names with 7 names"},
		"stale from":    {func(s *statev1.Tracker) { s.StaleFrom = 5 }, "stale from block 5 of 4"},
		"too few salts": {func(s *statev1.Tracker) { s.ScopeCacheSalts = s.ScopeCacheSalts[1:] }, "2 LoRA adapters and 1 cache salts of 4 blocks"},
		"high peak of scopes": {
			func(s *statev1.Tracker) { s.ReservedScopes = 9 }, "a peak of 9 scopes, with 2 scopes and a peak of 7 names",
		},
		"scopes only reserved": {
			func(s *statev1.Tracker) {
				*s = statev1.Tracker{Generations: s.Generations, CountedNames: s.CountedNames, PeakNames: 7, ReservedScopes: 2}
			},
			"a peak of 2 scopes, with 0 scopes and a peak of 7 names",
		},
		"equal scopes":   {func(s *statev1.Tracker) { s.ScopeLoraNames[1], s.ScopeCacheSalts[1] = "", []byte("salt") }, "scope 2 is the same as scope 1"},
		"unused scope":   {func(s *statev1.Tracker) { s.BlockScopes[3] = 1 }, "1 of 2 scopes have blocks"},
		"unknown scope":  {func(s *statev1.Tracker) { s.BlockScopes[3] = 3 }, "block 4 of 4: scope 3 of 2"},
		"equal contents": {func(s *statev1.Tracker) { s.BlockSequenceHashes[1] = 1 }, "block 2 of 4: another block has the same content"},
		"no live name":   {func(s *statev1.Tracker) { s.BlockLiveNames[1] = 0 }, "block 2 of 4: 0 live and 0 idle names, of 4"},
		"more names than there are": {
			func(s *statev1.Tracker) { s.BlockLiveNames[1], s.BlockIdleNames[1] = 1<<32-1, 1<<32-1 },
			"block 2 of 4: 4294967295 live and 4294967295 idle names, of 4",
		},
		"router name":    {func(s *statev1.Tracker) { s.BlockRouterNames[1] = 3 }, "block 2 of 4: router hash of name 3 of 2"},
		"source":         {func(s *statev1.Tracker) { s.NameFlags[3] = 2 << storedSourceShift }, "block 2 of 4: name 6 of source 2, want less than 2"},
		"equal names":    {func(s *statev1.Tracker) { s.NameHashes[3] = 1 }, "block 2 of 4: name 1 of source 0: another name is the same"},
		"no copies":      {func(s *statev1.Tracker) { s.NameFurtherCopies[0] = 0 }, "block 2 of 4: name 2 of source 0 has no further copies, or is stale"},
		"copies, stale":  {func(s *statev1.Tracker) { s.NameFlags[4] |= storedStale }, "block 2 of 4: name 2 of source 0 has no further copies, or is stale"},
		"stale":          {func(s *statev1.Tracker) { s.NameFlags[5] |= storedStale }, "block 3 of 4: name 3 of source 1 is stale without a gap"},
		"flags of idle":  {func(s *statev1.Tracker) { s.NameFlags[2] |= storedParent }, "block 1 of 4: name 4 of source 0 is idle, and has flags 0x1"},
		"missing block":  {func(s *statev1.Tracker) { s.BlockScopes = append(s.BlockScopes, 0) }, "block 5 of 5: 0 live and 0 idle names, of 0"},
		"missing parent": {func(s *statev1.Tracker) { s.NameParents = s.NameParents[1:] }, "the columns do not have the same number of blocks or names"},
		"further name":   {func(s *statev1.Tracker) { s.NameHashes = append(s.NameHashes, 7); s.PeakNames++ }, "the columns do not have the same number"},
		"idle names": {
			func(s *statev1.Tracker) {
				s.BlockIdleNames[0], s.PeakNames = 6, 12
				s.NameHashes = slices.Insert(s.NameHashes, 2, 20, 21, 22, 23, 24)
				s.NameFlags = slices.Insert(s.NameFlags, 2, 0, 0, 0, 0, 0)
			},
			"block 1 of 4: 6 idle names of a source, want at most 4",
		},
	}
	for name, test := range tests {
		t.Run(name, func(t *testing.T) {
			s := new(statev1.Tracker)
			if err := proto.Unmarshal(manifold().AppendState(nil), s); err != nil {
				t.Fatal(err)
			}
			test.change(s)
			state, err := proto.Marshal(s)
			if err != nil {
				t.Fatal(err)
			}
			blocks, attributes := budget.New("blocks", 0), budget.New("attribute_bytes", 0)
			if _, err := Restore(state, 2, 100, blocks, attributes, new(Counts)); err == nil || !strings.Contains(err.Error(), test.want) {
				t.Errorf("got error %v, want %q", err, test.want)
			}
			if blocks.Used() != 0 || attributes.Used() != 0 {
				t.Errorf("reserved %d units and %d bytes, want none", blocks.Used(), attributes.Used())
			}
		})
	}
	if _, err := Restore([]byte{1}, 2, 100, nil, nil, new(Counts)); err == nil {
		t.Error("no message: got no error")
	}
}

// TestMemoryOfInvalidStateIsBounded decodes states of equal elements, which are as short as possible.
func TestMemoryOfInvalidStateIsBounded(t *testing.T) {
	testclass.WithoutRace(t)
	const n = 1 << 20
	fields := new(statev1.Tracker).ProtoReflect().Descriptor().Fields()
	valid := manifold().AppendState(nil)
	for i := range fields.Len() {
		field := fields.Get(i)
		var state []byte
		for range n {
			switch {
			case field.Kind().String() == "fixed64":
				state = protowire.AppendFixed64(state, 1)
			case field.IsPacked():
				state = append(state, 1)
			case field.IsList():
				state = append(protowire.AppendTag(state, field.Number(), protowire.BytesType), 0)
			}
		}
		if field.IsPacked() {
			state = protowire.AppendBytes(protowire.AppendTag(nil, field.Number(), protowire.BytesType), state)
		}
		state = append(state, valid...)
		var before, after runtime.MemStats
		runtime.ReadMemStats(&before)
		if _, err := Restore(state, 2, n, nil, nil, new(Counts)); err == nil && field.IsList() {
			t.Errorf("%s: got no error", field.Name())
		}
		runtime.ReadMemStats(&after)
		if got, limit := after.TotalAlloc-before.TotalAlloc, uint64(1<<20+64*len(state)); got > limit {
			t.Errorf("%s: allocated %d bytes for a state of %d, want at most %d", field.Name(), got, len(state), limit)
		}
	}
}
