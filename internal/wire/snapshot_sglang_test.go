package wire_test

import (
	"bytes"
	"errors"
	"fmt"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/tinylib/msgp/msgp"
	"pgregory.net/rapid"

	"github.com/kvcast/kvcast/internal/core/kvblock"
	"github.com/kvcast/kvcast/internal/core/testclass"
	"github.com/kvcast/kvcast/internal/wire"
)

// packed returns values in MessagePack.
func packed(t *testing.T, values ...any) []byte {
	t.Helper()
	b, err := msgp.AppendIntf(nil, values)
	if err != nil {
		t.Fatal(err)
	}
	return b
}

// readSGLangSnapshot returns what the messages of a snapshot of rank 2 say, without the parts that say nothing, up to the
// first error.
func readSGLangSnapshot(messages ...[][]byte) (parts []wire.SnapshotPart, err error) {
	r := wire.SGLangSnapshot{Rank: 2}
	for _, m := range messages {
		for i, f := range m {
			p, err := r.Next(f, i < len(m)-1)
			if err != nil {
				return parts, err
			}
			if p.Kind != wire.SnapshotNothing || p.End {
				parts = append(parts, p)
			}
		}
	}
	return parts, nil
}

func TestSGLangSnapshot(t *testing.T) {
	message := func(kind string, body []byte) [][]byte { return [][]byte{nil, []byte(kind), body} }
	fields := func(change func(f []any)) []byte {
		f := []any{1, "0a1b", 2, 8, 7, "barrier", 3}
		change(f)
		return packed(t, f...)
	}
	header := message("header", fields(func([]any) {}))
	two, one := packed(t, []any{nil, []any{11}}, []any{11, []any{12}}), packed(t, []any{12, []any{13}})
	end := message("end", nil)
	begun := wire.SnapshotPart{Kind: wire.SnapshotHeader, Seq: 7, Epoch: []byte("0a1b")}
	chunk := func(payload []byte) wire.SnapshotPart {
		return wire.SnapshotPart{Kind: wire.SnapshotRecords, Payload: payload}
	}
	for _, tt := range []struct {
		name     string
		messages [][][]byte
		want     []wire.SnapshotPart
		err      error
	}{
		{"whole", [][][]byte{header, message("chunk", two), message("chunk", one), end}, []wire.SnapshotPart{begun, chunk(two), chunk(one), {End: true}}, nil},
		{"busy", [][][]byte{message("error", []byte("snapshot provider busy"))}, nil, wire.ErrNoSnapshot},
		{"error after the header", [][][]byte{header, message("error", []byte("x"))}, []wire.SnapshotPart{begun}, wire.ErrNoSnapshot},
		{"no header", [][][]byte{message("chunk", two)}, nil, wire.ErrSnapshot},
		{"two headers", [][][]byte{header, header}, []wire.SnapshotPart{begun}, wire.ErrSnapshot},
		{"records are missing", [][][]byte{header, message("chunk", two), end}, []wire.SnapshotPart{begun, chunk(two)}, wire.ErrSnapshot},
		{"too many records", [][][]byte{header, message("chunk", two), message("chunk", two)}, []wire.SnapshotPart{begun, chunk(two)}, wire.ErrSnapshot},
		{"another kind", [][][]byte{header, message("chunks", two)}, []wire.SnapshotPart{begun}, wire.ErrSnapshot},
		{"two frames", [][][]byte{{nil, []byte("end")}}, nil, wire.ErrSnapshot},
		{"four frames", [][][]byte{append(slices.Clone(header), nil)}, nil, wire.ErrSnapshot},
		{"no delimiter", [][][]byte{{[]byte("x"), []byte("header"), header[2]}}, nil, wire.ErrSnapshot},
		{"chunk is no list", [][][]byte{header, message("chunk", []byte{1})}, []wire.SnapshotPart{begun}, wire.ErrSnapshot},
		{"version", [][][]byte{message("header", fields(func(f []any) { f[0] = 2 }))}, nil, wire.ErrSnapshot},
		{"rank", [][][]byte{message("header", fields(func(f []any) { f[2] = 1 }))}, nil, wire.ErrSnapshot},
		{"resume_seq", [][][]byte{message("header", fields(func(f []any) { f[3] = 9 }))}, nil, wire.ErrSnapshot},
		{"no epoch", [][][]byte{message("header", fields(func(f []any) { f[1] = "" }))}, nil, wire.ErrSnapshot},
		{"long epoch", [][][]byte{message("header", fields(func(f []any) { f[1] = strings.Repeat("a", 257) }))}, nil, wire.ErrSnapshot},
		{"epoch is a number", [][][]byte{message("header", fields(func(f []any) { f[1] = 1 }))}, nil, wire.ErrSnapshot},
		{"field is a list", [][][]byte{message("header", fields(func(f []any) { f[5] = []any{} }))}, nil, wire.ErrSnapshot},
		{"six fields", [][][]byte{message("header", packed(t, 1, "a", 2, 8, 7, "b"))}, nil, wire.ErrSnapshot},
		{"header is cut off", [][][]byte{message("header", header[2][:5])}, nil, wire.ErrSnapshot},
	} {
		t.Run(tt.name, func(t *testing.T) {
			got, err := readSGLangSnapshot(tt.messages...)
			if !errors.Is(err, tt.err) || (err == nil) != (tt.err == nil) {
				t.Errorf("got error %v, want %v", err, tt.err)
			}
			if d := cmp.Diff(tt.want, got); d != "" {
				t.Errorf("parts (-want +got):\n%s", d)
			}
		})
	}
}

func TestDecodeRecords(t *testing.T) {
	var d wire.Decoder
	b, err := d.DecodeRecords(packed(t, []any{nil, []any{11, -1}}, []any{-1, []any{12}}))
	if err != nil {
		t.Fatal(err)
	}
	var got []string
	for _, e := range b.Events {
		got = append(got, fmt.Sprintf("%d %v after %d, %v", e.Kind, e.BlockHashes, e.Parent, e.HasParent))
	}
	want := []string{
		fmt.Sprintf("%d [11 18446744073709551615] after 0, false", wire.KindStored),
		fmt.Sprintf("%d [12] after 18446744073709551615, true", wire.KindStored),
	}
	if d := cmp.Diff(want, got); d != "" {
		t.Errorf("events (-want +got):\n%s", d)
	}
	var blockSize wire.BlockSize
	var counts wire.Counts
	wire.NewRules(&blockSize).Admit(b, 0, &counts)
	if len(b.Events) != 2 || b.Events[0].Tier != kvblock.TierDevice || len(b.Events[0].TokensHashes) != 0 || counts != (wire.Counts{}) {
		t.Errorf("admitted %+v, skipped %v, want both without contents", b.Events, counts)
	}
	for _, bad := range [][]byte{
		nil, {1}, packed(t, 1), packed(t, []any{nil}), packed(t, []any{nil, 1}), packed(t, []any{nil, []any{"x"}}), packed(t, []any{"x", []any{1}}), packed(t, []any{nil, []any{}}),
		append(packed(t), 1), packed(t, []any{nil, []any{1}})[:3], {0xdd, 0xff, 0xff, 0xff, 0xff},
	} {
		if b, err := d.DecodeRecords(bad); err == nil {
			t.Errorf("%x: got %+v, want an error", bad, b)
		}
	}
}

// rootRecords returns n records of the smallest size.
func rootRecords(n int) []byte {
	return append([]byte{0xdd, byte(n >> 24), byte(n >> 16), byte(n >> 8), byte(n)}, bytes.Repeat([]byte{0x92, 0xc0, 0x91, 1}, n)...)
}

// Memory for the records is allocated at once: its allocations, and with them the copies, do not grow with their number.
func TestDecodeRecordsAllocatesOnce(t *testing.T) {
	testclass.WithoutRace(t)
	allocations := func(n int) float64 {
		payload := rootRecords(n)
		return testing.AllocsPerRun(5, func() {
			var d wire.Decoder
			if b, err := d.DecodeRecords(payload); err != nil || len(b.Events) != n {
				t.Fatal(err)
			}
		})
	}
	if n, twice := allocations(500), allocations(1000); n > 10 || twice > n {
		t.Errorf("%v allocations for 500 records, %v for 1000", n, twice)
	}
}

func TestDecodeRecordsIsBounded(t *testing.T) {
	var d wire.Decoder
	if _, err := d.DecodeRecords(rootRecords(1 << 16)); err != nil {
		t.Errorf("65536 records: %v", err)
	}
	if _, err := d.DecodeRecords(rootRecords(1<<16 + 1)); err == nil {
		t.Error("65537 records: no error")
	}
}

// Any bytes are records or an error, and the decoder reads batches afterwards.
func TestDecodeRecordsOfAnyBytes(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		var d wire.Decoder
		b, err := d.DecodeRecords(rapid.SliceOfN(rapid.Byte(), 0, 40).Draw(t, "payload"))
		if (b == nil) == (err == nil) {
			t.Fatalf("got %v and error %v", b, err)
		}
		payload := (&wire.Encoder{BatchForm: wire.FormArray, EventForm: wire.FormArray}).AppendBatch(nil, &wire.Batch{Events: []wire.Event{
			{Kind: wire.KindRemoved, BlockHashes: []uint64{7}},
		}})
		if b, err := d.Decode(payload); err != nil || len(b.Events) != 1 || b.Events[0].BlockHashes[0] != 7 || b.Events[0].HasParent {
			t.Fatalf("batch after records: %+v, %v", b, err)
		}
	})
}
