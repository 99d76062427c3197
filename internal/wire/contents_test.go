package wire_test

import (
	"slices"
	"testing"

	"github.com/tinylib/msgp/msgp"

	"github.com/kvcast/kvcast/internal/core/kvblock"
	"github.com/kvcast/kvcast/internal/wire"
)

// admitContents admits a store in the form of AppendContents, of a rank whose blocks have 16 tokens, and returns what is left of it.
func admitContents(t *testing.T, e wire.Event) ([]wire.Event, wire.Doubts) {
	t.Helper()
	encoder := wire.Encoder{EventForm: wire.FormMap}
	payload := encoder.AppendBatch(nil, &wire.Batch{HasRank: true, Events: []wire.Event{e}})
	var decoder wire.Decoder
	b, err := decoder.Decode(payload)
	if err != nil {
		t.Fatal(err)
	}
	rules := wire.NewRules(&wire.BlockSize{Tokens: 16, Configured: true})
	rules.ContentInKeys = true
	rules.Admit(b, 0, new(wire.Counts))
	return b.Events, b.Doubts
}

func TestContentsInKeys(t *testing.T) {
	t.Parallel()
	store := func(change func(*wire.Event)) wire.Event {
		e := wire.Event{
			Kind: wire.KindStored, Medium: "EXTERNAL", BlockHashes: []uint64{1, 2}, BlockSize: 16, Parent: 9, HasParent: true, LoRAName: "a",
			Raw: &wire.Raw{ExtraKeys: wire.AppendContents(nil, []uint64{1 << 63, 7})},
		}
		if change != nil {
			change(&e)
		}
		return e
	}
	got, doubts := admitContents(t, store(nil))
	if len(got) != 1 || doubts != (wire.Doubts{}) {
		t.Fatalf("%+v, %v", got, doubts)
	}
	if e := got[0]; !slices.Equal(e.TokensHashes, []uint64{1 << 63, 7}) || e.HashesOnly || e.Tier != kvblock.TierExternal || e.Parent != 9 || e.LoRAName != "a" || e.BlockSize != 16 {
		t.Errorf("%+v", e)
	}
	keys := func(encoded []byte) func(*wire.Event) {
		return func(e *wire.Event) { e.Raw.ExtraKeys = encoded }
	}
	for name, c := range map[string]struct {
		change func(*wire.Event)
		want   wire.Reason
	}{
		"no contents":           {func(e *wire.Event) { e.Raw = nil }, wire.ReasonUnknownContent},
		"fewer contents":        {keys(wire.AppendContents(nil, []uint64{1})), wire.ReasonUnknownContent},
		"contents of 4 bytes":   {keys(msgp.AppendBytes(msgp.AppendArrayHeader(msgp.AppendBytes(msgp.AppendArrayHeader(msgp.AppendArrayHeader(nil, 2), 1), make([]byte, 4)), 1), make([]byte, 4))), wire.ReasonUnknownContent},
		"contents as text":      {keys(msgp.AppendString(msgp.AppendArrayHeader(msgp.AppendString(msgp.AppendArrayHeader(msgp.AppendArrayHeader(nil, 2), 1), "12345678"), 1), "12345678")), wire.ReasonUnknownContent},
		"contents in no list":   {keys(msgp.AppendBytes(msgp.AppendBytes(msgp.AppendArrayHeader(nil, 2), make([]byte, 8)), make([]byte, 8))), wire.ReasonUnknownContent},
		"another block size":    {func(e *wire.Event) { e.BlockSize = 32 }, wire.ReasonBlockSizeMismatch},
		"no block size":         {func(e *wire.Event) { e.BlockSize = 0 }, wire.ReasonBlockSizeMismatch},
		"a block twice":         {func(e *wire.Event) { e.BlockHashes[1] = 1 }, wire.ReasonRepeatedHash},
		"a block as its parent": {func(e *wire.Event) { e.Parent = 2 }, wire.ReasonRepeatedHash},
	} {
		got, doubts := admitContents(t, store(c.change))
		if len(got) != 0 || doubts[c.want] == 0 {
			t.Errorf("%s: %+v, %v; want %v", name, got, doubts, c.want)
		}
	}
}

// TestContentsInKeysOfEngines has the form from an engine: its blocks are known by hash alone.
func TestContentsInKeysOfEngines(t *testing.T) {
	t.Parallel()
	e := wire.Event{Kind: wire.KindStored, BlockHashes: []uint64{1}, BlockSize: 16, Raw: &wire.Raw{ExtraKeys: wire.AppendContents(nil, []uint64{7})}}
	rules := wire.NewRules(new(wire.BlockSize))
	b := wire.Batch{Events: []wire.Event{e}}
	rules.Admit(&b, 0, new(wire.Counts))
	if len(b.Events) != 1 || len(b.Events[0].TokensHashes) != 0 || !b.Events[0].HashesOnly {
		t.Errorf("%+v", b.Events)
	}
}
