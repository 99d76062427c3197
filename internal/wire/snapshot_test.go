package wire_test

import (
	"bytes"
	"encoding/binary"
	"errors"
	"testing"

	"github.com/google/go-cmp/cmp"
	"pgregory.net/rapid"

	"github.com/kvcast/kvcast/internal/wire"
)

func seqFrame(seq int64) []byte { return binary.BigEndian.AppendUint64(nil, uint64(seq)) }

// readSnapshot returns what the frames of a message say, up to the first error.
func readSnapshot(frames ...[]byte) (parts []wire.SnapshotPart, err error) {
	var r wire.VLLMSnapshot
	for i, f := range frames {
		p, err := r.Next(f, i < len(frames)-1)
		if err != nil {
			return parts, err
		}
		parts = append(parts, p)
	}
	return parts, nil
}

func TestVLLMSnapshot(t *testing.T) {
	id := bytes.Repeat([]byte{7}, 16)
	for _, tt := range []struct {
		name   string
		frames [][]byte
		want   []wire.SnapshotPart
		err    error
	}{
		{"of two batches", [][]byte{nil, seqFrame(5), id, {1}, {2}}, []wire.SnapshotPart{
			{}, {},
			{Kind: wire.SnapshotHeader, Seq: 5, Publisher: id},
			{Kind: wire.SnapshotBatch, Payload: []byte{1}},
			{Kind: wire.SnapshotBatch, Payload: []byte{2}, End: true},
		}, nil},
		{"of an empty cache", [][]byte{nil, seqFrame(0), id}, []wire.SnapshotPart{{}, {}, {Kind: wire.SnapshotHeader, Publisher: id, End: true}}, nil},
		{"before the first batch", [][]byte{nil, seqFrame(-1), id}, []wire.SnapshotPart{{}}, wire.ErrNoSnapshot},
		{"not now", [][]byte{nil, seqFrame(-2), id}, []wire.SnapshotPart{{}}, wire.ErrNoSnapshot},
		{"another number", [][]byte{nil, seqFrame(-3), id}, []wire.SnapshotPart{{}}, wire.ErrSnapshot},
		{"no delimiter", [][]byte{seqFrame(5), id}, nil, wire.ErrSnapshot},
		{"one frame", [][]byte{nil}, nil, wire.ErrSnapshot},
		{"two frames", [][]byte{nil, seqFrame(5)}, []wire.SnapshotPart{{}}, wire.ErrSnapshot},
		{"short seq", [][]byte{nil, {5}, id}, []wire.SnapshotPart{{}}, wire.ErrSnapshot},
		{"short id", [][]byte{nil, seqFrame(5), id[1:]}, []wire.SnapshotPart{{}, {}}, wire.ErrSnapshot},
	} {
		t.Run(tt.name, func(t *testing.T) {
			got, err := readSnapshot(tt.frames...)
			if !errors.Is(err, tt.err) || (err == nil) != (tt.err == nil) {
				t.Errorf("got error %v, want %v", err, tt.err)
			}
			if d := cmp.Diff(tt.want, got); d != "" {
				t.Errorf("parts (-want +got):\n%s", d)
			}
		})
	}
}

// Any frames are a snapshot, whose header comes before its batches, or an error.
func TestVLLMSnapshotReadsAnything(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		frames := rapid.SliceOfN(rapid.SliceOfN(rapid.Byte(), 0, 17), 1, 8).Draw(t, "frames")
		parts, err := readSnapshot(frames...)
		for i, p := range parts {
			want := []wire.SnapshotKind{wire.SnapshotNothing, wire.SnapshotNothing, wire.SnapshotHeader, wire.SnapshotBatch}[min(i, 3)]
			if p.Kind != want || p.End != (i == len(frames)-1) {
				t.Fatalf("part %d: %+v", i, p)
			}
		}
		if err == nil && len(parts) < 3 {
			t.Fatalf("%d parts are a snapshot", len(parts))
		}
	})
}
