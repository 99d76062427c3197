package consolidate

import (
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/testing/protocmp"

	"github.com/kvcast/kvcast/internal/budget"
	"github.com/kvcast/kvcast/pipeline/internal/copies"
	statev1 "github.com/kvcast/kvcast/proto/kvcast/state/v1"
)

// TestRecorderEncodesCalls compares the recorded calls with messages of the generated code.
func TestRecorderEncodesCalls(t *testing.T) {
	blocks := budget.New("blocks", 7)
	tr := New(2, 100, blocks, nil, new(Counts))
	var r Recorder
	tr.RecordTo(&r, 3)
	tr.play(
		stores(engine, storeOf(contents(1, 2), 1, 2)),
		stores(offload, ofSalt("\xff", ofLoRA("adapter", continuing(0, storeOf(contents(3, 4, 5), 13, 14, 15))))),
		stores(offload, ofLoRA("ignored", storeOf(nil, 11))),
		removes(engine, 1, 2, 9), removes(offload, 13),
		func(tr *Tracker) { tr.Remove(offload, 11, copies.RemoveDownTo+1) },
		func(tr *Tracker) { tr.RemoveBlocks(nil) },
		func(tr *Tracker) { tr.RemoveBlocks([]uint64{14, 15}) },
		func(tr *Tracker) { tr.CountChildren(offload) },
		func(tr *Tracker) { tr.CountChildren(offload) }, // already counted
		losesBatches(offload), clears(engine), resetAll,
	)
	want := &statev1.TrackerCalls{Calls: []*statev1.TrackerCall{
		{Kind: statev1.TrackerCall_KIND_STORE, BlockHashes: []uint64{1, 2}, TokensHashes: []uint64{1, 2}},
		{
			Kind: statev1.TrackerCall_KIND_STORE, Source: 1, ParentHash: new(uint64(0)), BlockHashes: []uint64{13, 14, 15}, TokensHashes: []uint64{3, 4, 5},
			LoraName: "adapter", CacheSalt: []byte("\xff"), FailedChecks: []uint32{1, 4, 7, 10},
		},
		{Kind: statev1.TrackerCall_KIND_STORE, Source: 1, BlockHashes: []uint64{11}, FailedChecks: []uint32{0, 3}},
		{Kind: statev1.TrackerCall_KIND_REMOVE, BlockHashes: []uint64{1, 2, 9}},
		{Kind: statev1.TrackerCall_KIND_REMOVE, Source: 1, BlockHashes: []uint64{13}},
		{Kind: statev1.TrackerCall_KIND_REMOVE, Source: 1, Op: uint32(copies.RemoveDownTo) + 1, BlockHashes: []uint64{11}},
		{Kind: statev1.TrackerCall_KIND_REMOVE_BLOCKS, BlockHashes: []uint64{14, 15}},
		{Kind: statev1.TrackerCall_KIND_COUNT_CHILDREN, Source: 1},
		{Kind: statev1.TrackerCall_KIND_GAP, Source: 1},
		{Kind: statev1.TrackerCall_KIND_CLEAR_SOURCE},
		{Kind: statev1.TrackerCall_KIND_RESET},
	}}
	for _, call := range want.GetCalls() {
		call.Rank = 3
	}
	calls := r.Calls()
	got := new(statev1.TrackerCalls)
	if err := proto.Unmarshal(calls, got); err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(want, got, protocmp.Transform()); diff != "" {
		t.Errorf("calls (-want +got):\n%s", diff)
	}
	if encoded, err := proto.Marshal(want); err != nil || len(encoded) != len(calls) {
		t.Errorf("length: got %d, want %d as of the generated code (%v)", len(calls), len(encoded), err)
	}
	if again := r.Calls(); len(again) > 0 {
		t.Errorf("calls were returned again: %x", again)
	}
}

// TestRecorderReleasesLargeBuffers records calls that need more than a Recorder keeps.
func TestRecorderReleasesLargeBuffers(t *testing.T) {
	tr := New(2, 100, nil, nil, new(Counts))
	var r Recorder
	tr.RecordTo(&r, 0)
	hashes := make([]uint64, maxIdleCalls)
	tr.RemoveBlocks(hashes)
	full := budget.New("blocks", 1)
	full.Adjust(1)
	tr.budget = full
	tr.play(removes(engine, hashes...), stores(engine, storeOf(nil, hashes...)))
	r.Calls()
	for name, bytes := range map[string]int{
		"calls": cap(r.calls), "one call": cap(r.scratch), "removes": 8 * cap(r.removed), "failed checks": 4 * cap(r.checks.failed),
	} {
		if bytes > 2*maxIdleCalls {
			t.Errorf("%s: keeps %d bytes, want at most %d", name, bytes, 2*maxIdleCalls)
		}
	}
}

func TestReplayReportsInvalidCalls(t *testing.T) {
	call := func(c *statev1.TrackerCall) []byte {
		calls, err := proto.Marshal(&statev1.TrackerCalls{Calls: []*statev1.TrackerCall{
			{Kind: statev1.TrackerCall_KIND_STORE, BlockHashes: []uint64{1, 2}, FailedChecks: []uint32{0}}, c,
		}})
		if err != nil {
			t.Fatal(err)
		}
		return calls
	}
	const store = statev1.TrackerCall_KIND_STORE
	truncated := call(&statev1.TrackerCall{Kind: store})
	truncated = truncated[:len(truncated)-1]
	for _, test := range []struct {
		calls []byte
		want  string
	}{
		{[]byte{1}, "decode call 1 of consolidated sources: "},
		{truncated, "decode call 2 of consolidated sources: "},
		{call(&statev1.TrackerCall{Kind: store, Rank: 1}), "replay call 2 of consolidated sources: no sources of dp rank 1"},
		{call(&statev1.TrackerCall{Kind: store, Source: 2}), "source 2 of 2"},
		{call(&statev1.TrackerCall{Kind: store, BlockHashes: []uint64{1, 2}, TokensHashes: []uint64{3}}), "1 tokens hashes of 2 blocks"},
		{call(&statev1.TrackerCall{Kind: store, BlockHashes: []uint64{3}, FailedChecks: []uint32{0, 9}}), "check 9 failed, of 4"},
		{call(&statev1.TrackerCall{}), "unknown kind of call"},
		{call(&statev1.TrackerCall{Kind: 99}), "unknown kind of call"},
	} {
		tr := New(2, 100, nil, nil, new(Counts))
		err := Replay(test.calls, func(rank uint32) *Tracker {
			if rank != 0 {
				return nil
			}
			return tr
		})
		if err == nil || !strings.Contains(err.Error(), test.want) {
			t.Errorf("got error %v, want %q", err, test.want)
		}
		checkTracker(t, tr)
	}
}

// TestReplayIgnoresUnknownFields has fields of a later version.
func TestReplayIgnoresUnknownFields(t *testing.T) {
	calls := []byte{2<<3 | 2, 1, 0, 3 << 3, 5}
	tr := New(2, 100, nil, nil, new(Counts))
	var r Recorder
	tr.RecordTo(&r, 0)
	tr.play(stores(engine, storeOf(contents(1), 1)))
	restored := New(2, 100, nil, nil, new(Counts))
	if err := Replay(append(calls, r.Calls()...), func(uint32) *Tracker { return restored }); err != nil || restored.Len() != 1 {
		t.Errorf("got %d blocks and error %v, want a block", restored.Len(), err)
	}
}
