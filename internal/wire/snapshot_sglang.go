package wire

import (
	"cmp"
	"fmt"
	"strings"
)

// sglangSnapshotVersion is the version of the protocol.
const sglangSnapshotVersion = 1

// sglangHeader are the classes of a header's fields.
var sglangHeader = [7]class{classUint, classStr, classUint, classUint, classUint, classStr, classUint}

// maxEpochBytes is the length of the longest epoch.
const maxEpochBytes = 256

const (
	// maxRecords is the number of records that a chunk may have. SGLang sends 4,096 at most.
	maxRecords = 1 << 16
	// minRecordBytes is the size of the smallest record: [nil, [1]].
	minRecordBytes = 4
)

// SGLangSnapshot reads the replies to a request for a snapshot of SGLang, in builds with a snapshot_endpoint, as of
// November 2026. A reply is a message of an empty frame, a kind and a body:
//
//   - header: [version 1, epoch, replica_rank, resume_seq, barrier_seq, barrier_id, record_count] in MessagePack. The
//     state is that before the batch of barrier_seq, which has no events; resume_seq is the next seq.
//   - chunk: records of blocks, see Decoder.DecodeRecords.
//   - end, or error with a text.
type SGLangSnapshot struct {
	// Rank is the dp rank that the header must have.
	Rank uint32

	frame   int // in the message
	kind    string
	begun   bool
	records uint64 // that are still to come
}

// Request implements SnapshotReader.
func (*SGLangSnapshot) Request() [][]byte { return [][]byte{nil, []byte("snapshot-v1")} }

// Next implements SnapshotReader.
func (s *SGLangSnapshot) Next(frame []byte, more bool) (p SnapshotPart, err error) {
	at := s.frame
	s.frame = (at + 1) % 3
	switch {
	case more != (at < 2):
		return p, fmt.Errorf("read snapshot: message of %d frames or more, want 3: %w", at+1, ErrSnapshot)
	case at == 0 && len(frame) != 0:
		return p, fmt.Errorf("read snapshot: first frame has %d bytes, want none: %w", len(frame), ErrSnapshot)
	case at == 0:
		return p, nil
	case at == 1:
		s.kind = string(frame[:min(len(frame), 16)])
		return p, nil
	case s.kind == "error":
		return p, fmt.Errorf("read snapshot: %q: %w", strings.ToValidUTF8(string(frame[:min(len(frame), 100)]), "?"), ErrNoSnapshot)
	case s.kind == "header" && !s.begun:
		return s.header(frame)
	case s.kind == "chunk" && s.begun:
		class, n, _, f := readHeader(frame, 0)
		if f != 0 || class != classArray || uint64(n) > s.records {
			return p, fmt.Errorf("read snapshot: more records than the header has, or none: %w", ErrSnapshot)
		}
		s.records -= uint64(n)
		return SnapshotPart{Kind: SnapshotRecords, Payload: frame}, nil
	case s.kind == "end" && s.begun && s.records == 0:
		return SnapshotPart{End: true}, nil
	default:
		return p, fmt.Errorf("read snapshot: unexpected message %q, with %d records to come: %w", s.kind, s.records, ErrSnapshot)
	}
}

// header reads the body of the header.
func (s *SGLangSnapshot) header(body []byte) (p SnapshotPart, err error) {
	wrong := func(what string) (SnapshotPart, error) {
		return SnapshotPart{}, fmt.Errorf("read snapshot: header: %s: %w", what, ErrSnapshot)
	}
	class, n, i, f := readHeader(body, 0)
	if f != 0 || class != classArray || n < 7 {
		return wrong("want a list of 7 fields")
	}
	var fields [7]value
	for k := range fields {
		if fields[k], f = readValue(body, i); f != 0 || fields[k].class == classArray || fields[k].class == classMap {
			return wrong("want numbers and texts")
		}
		i = fields[k].end
	}
	for k, want := range sglangHeader {
		if fields[k].class != want {
			return wrong("want numbers and texts")
		}
	}
	epoch, resume, barrier := fields[1].bytes, fields[3].bits, fields[4].bits
	switch {
	case fields[0].bits != sglangSnapshotVersion:
		return wrong(fmt.Sprintf("version %d, want %d", fields[0].bits, sglangSnapshotVersion))
	case len(epoch) == 0 || len(epoch) > maxEpochBytes:
		return wrong(fmt.Sprintf("epoch of %d bytes, want 1 to %d", len(epoch), maxEpochBytes))
	case fields[2].bits != uint64(s.Rank):
		return wrong(fmt.Sprintf("replica_rank %d, want %d", fields[2].bits, s.Rank))
	case resume != barrier+1 || resume == 0:
		return wrong(fmt.Sprintf("resume_seq %d, want the one after barrier_seq %d", resume, barrier))
	}
	s.begun, s.records = true, fields[6].bits
	return SnapshotPart{Kind: SnapshotHeader, Seq: barrier, Epoch: epoch}, nil
}

// DecodeRecords decodes the records of a SGLang snapshot, [[parent or nil, [hashes]], ...], as a batch of stores without
// contents: hash-only blocks in device memory, each of which continues the one before it. More than maxRecords, or a
// record without hashes, is an error. The batch is valid as that of Decode.
func (d *Decoder) DecodeRecords(payload []byte) (*Batch, error) {
	return d.decode(payload, (*Decoder).readRecords)
}

func (d *Decoder) readRecords() (int, fault) {
	d.batch.Form = FormArray
	class, n, i, f := readHeader(d.p, 0)
	if f != 0 || class != classArray {
		return i, cmp.Or(f, badBatchShape)
	}
	if n > maxRecords || n > (len(d.p)-i)/minRecordBytes {
		return i, badBatchShape
	}
	if cap(d.batch.Events) < n {
		d.batch.Events = make([]Event, 0, n)
	}
	if !d.hashes.fits(n) {
		d.hashes.grow(n) // each record has a hash at least
	}
	for k := 0; k < n; k++ {
		class, fields, at, f := readHeader(d.p, i)
		if f != 0 || class != classArray || fields != 2 {
			return i, cmp.Or(f, badBatchShape)
		}
		ev := d.newEvent(k, n-k, i)
		ev.Kind = KindStored
		parent, f := readValue(d.p, at)
		if f != 0 {
			return i, f
		}
		if parent.class != classNil {
			if ev.Parent, ev.HasParent = parent.hash(); !ev.HasParent {
				return i, badBatchShape
			}
		}
		if i, f = (hashList{}).read(d, ev, 0, parent.end); f != 0 {
			return i, f
		}
		if len(ev.BlockHashes) == 0 {
			return i, badBatchShape
		}
	}
	return i, 0
}
