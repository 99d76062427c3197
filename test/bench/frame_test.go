package bench_test

import (
	"encoding/binary"
	"errors"
	"fmt"
	"testing"

	"github.com/google/go-cmp/cmp"
	"google.golang.org/grpc/encoding"
	"google.golang.org/grpc/encoding/proto" // registers the fallback
	"google.golang.org/grpc/mem"
	"google.golang.org/protobuf/encoding/protowire"
	gproto "google.golang.org/protobuf/proto"

	kvcastv1 "github.com/kvcast/kvcast/proto/kvcast/v1"
)

// The common fields of the messages of all streams.
const (
	fieldEntries        = 1
	fieldPosition       = 2
	fieldPrevSeq        = 3
	fieldSnapshotBlocks = 8
	fieldSnapshotEnd    = 9
)

// frame is a message of a stream. Only the top level is parsed, in place. This detects missing
// entries, and uses little CPU time.
type frame struct {
	// keep makes read set raw.
	keep bool

	bytes    int
	raw      []byte  // nil unless keep is set
	fields   [16]int // number of occurrences of each field
	position uint64  // seq; 0 if absent
	prevSeq  uint64

	// State of the field that is being read:
	field  int // 0: a tag is next
	length int
	shift  int
	rest   int // bytes of it still to come; the length is next while 0
	kept   []byte
}

var errFrame = errors.New("read message: not one of kvcast's")

// read parses a message.
func (f *frame) read(data mem.BufferSlice) error {
	*f = frame{keep: f.keep, kept: f.kept, bytes: data.Len()}
	if f.keep {
		f.raw = data.Materialize()
	}
	for _, b := range data {
		if err := f.part(b.ReadOnlyData()); err != nil {
			return err
		}
	}
	if f.field != 0 {
		return errFrame
	}
	return nil
}

// part parses the next part of a message, split at any byte.
func (f *frame) part(p []byte) error {
	for len(p) > 0 {
		if f.rest > 0 {
			n := min(f.rest, len(p))
			if f.field == fieldPosition || f.field == fieldPrevSeq {
				f.kept = append(f.kept, p[:n]...)
			}
			p = p[n:]
			if f.rest -= n; f.rest == 0 {
				if err := f.end(); err != nil {
					return err
				}
			}
			continue
		}
		c := p[0]
		p = p[1:]
		if f.field == 0 {
			f.field, f.length, f.shift, f.kept = int(c>>3), 0, 0, f.kept[:0]
			switch {
			case c >= 0x80 || f.field == 0:
				return errFrame
			case protowire.Type(c&7) == protowire.Fixed64Type:
				f.rest = 8
			case protowire.Type(c&7) != protowire.BytesType:
				return errFrame
			}
			continue
		}
		f.length |= int(c&0x7f) << f.shift
		f.shift += 7
		switch {
		case c >= 0x80 && f.shift >= 32:
			return errFrame
		case c >= 0x80:
		case f.length > 0:
			f.rest = f.length
		default:
			if err := f.end(); err != nil {
				return err
			}
		}
	}
	return nil
}

// end counts a field.
func (f *frame) end() error {
	f.fields[f.field]++
	switch f.field {
	case fieldPrevSeq:
		f.prevSeq = binary.LittleEndian.Uint64(f.kept)
	case fieldPosition:
		var p kvcastv1.Position
		if err := gproto.Unmarshal(f.kept, &p); err != nil {
			return fmt.Errorf("read position: %w", err)
		}
		f.position = p.GetSeq()
	}
	f.field = 0
	return nil
}

// codec decodes frames, and delegates everything else to gRPC's own protobuf codec.
type codec struct{ encoding.CodecV2 }

func newCodec() codec { return codec{encoding.GetCodecV2(proto.Name)} }

// Unmarshal implements encoding.CodecV2.
func (c codec) Unmarshal(data mem.BufferSlice, v any) error {
	if f, ok := v.(*frame); ok {
		return f.read(data)
	}
	return c.CodecV2.Unmarshal(data, v)
}

// TestFrameReadsTheTopLevel compares with protobuf, for a message split at every byte.
func TestFrameReadsTheTopLevel(t *testing.T) {
	messages := map[string]*kvcastv1.SubscribeResponse{
		"accepted": {Accepted: &kvcastv1.Accepted{Epoch: "e", OldestSeq: 1}, Position: &kvcastv1.Position{Epoch: "e"}},
		"entries": {
			Entries:  []*kvcastv1.Entry{{Seq: 4, Worker: workerName, Model: modelName}, {}, {Seq: 6, Worker: string(make([]byte, 300))}},
			Position: &kvcastv1.Position{Epoch: "0123456789abcdef", Seq: 6}, PrevSeq: 3,
		},
		"snapshot": {SnapshotBlocks: []*kvcastv1.SnapshotBlocks{{Worker: workerName}}},
		"end":      {SnapshotEnd: &kvcastv1.SnapshotEnd{}, Position: &kvcastv1.Position{Epoch: "e", Seq: 1 << 60}, PrevSeq: 1 << 60},
	}
	for name, m := range messages {
		encoded, err := gproto.Marshal(m)
		if err != nil {
			t.Fatal(err)
		}
		type top struct {
			entries, blocks, ends int
			position, prevSeq     uint64
			bytes                 int
		}
		want := top{
			len(m.GetEntries()), len(m.GetSnapshotBlocks()), 0, m.GetPosition().GetSeq(), m.GetPrevSeq(), len(encoded),
		}
		if m.GetSnapshotEnd() != nil {
			want.ends = 1
		}
		f := frame{keep: true}
		for cut := range encoded {
			data := mem.BufferSlice{mem.SliceBuffer(encoded[:cut]), mem.SliceBuffer(encoded[cut:])}
			if err := f.read(data); err != nil {
				t.Fatalf("%s, cut at %d: %v", name, cut, err)
			}
			got := top{
				f.fields[fieldEntries], f.fields[fieldSnapshotBlocks], f.fields[fieldSnapshotEnd], f.position, f.prevSeq, f.bytes,
			}
			if diff := cmp.Diff(want, got, cmp.AllowUnexported(top{})); diff != "" || string(f.raw) != string(encoded) {
				t.Fatalf("%s, cut at %d (-want +got):\n%s", name, cut, diff)
			}
		}
		if cut := (mem.BufferSlice{mem.SliceBuffer(encoded[:len(encoded)-1])}); f.read(cut) == nil {
			t.Errorf("%s without its last byte: no error", name)
		}
	}
}
