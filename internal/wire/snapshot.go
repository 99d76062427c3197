package wire

import (
	"encoding/binary"
	"errors"
	"fmt"
)

// Errors of snapshots.
var (
	// ErrSnapshot is a reply that is not a snapshot.
	ErrSnapshot = errors.New("not a snapshot")
	// ErrNoSnapshot means that the engine has no snapshot now, and may have one later.
	ErrNoSnapshot = errors.New("the engine has no snapshot now")
)

// SnapshotKind is the kind of a SnapshotPart.
type SnapshotKind uint8

// The kinds.
const (
	// SnapshotNothing: the frame has nothing by itself.
	SnapshotNothing SnapshotKind = iota
	// SnapshotHeader: Seq, and Publisher or Epoch are set. It comes first.
	SnapshotHeader
	// SnapshotBatch: Payload is the next batch of the state.
	SnapshotBatch
	// SnapshotRecords: Payload is for Decoder.DecodeRecords.
	SnapshotRecords
)

// SnapshotPart is what a frame of a snapshot says.
type SnapshotPart struct {
	Kind SnapshotKind
	// Seq is the seq of the last batch that the snapshot includes. Publisher is the publisher id, and Epoch the
	// epoch in the topics of the engine's run.
	Seq       uint64
	Publisher []byte
	Epoch     []byte
	Payload   []byte
	// End reports whether the snapshot is complete.
	End bool
}

// SnapshotReader reads the replies to a request for a snapshot, frame by frame.
type SnapshotReader interface {
	// Request returns the frames of the request, as a DEALER sends them.
	Request() [][]byte
	// Next reads the next frame. more reports whether the message has further frames. Slices of the part are views of the frame.
	Next(frame []byte, more bool) (SnapshotPart, error)
}

// VLLMSnapshot reads the reply to a request for a snapshot, frame by frame. The reply is that of the proposal for vLLM of November 2026
// (vllm-project/vllm, pull request 57789), as a DEALER receives it: one message of an empty frame, a seq of 8 bytes, signed and in network
// byte order, the publisher id of 16 bytes, and the payloads of batches. The seq is -1 if the publisher has recorded no batch, and -2 if
// there can be no snapshot now. The zero value is ready for use.
type VLLMSnapshot struct {
	frames int
	seq    int64
}

// Request implements SnapshotReader.
func (*VLLMSnapshot) Request() [][]byte { return [][]byte{nil, []byte("snapshot")} }

// Next implements SnapshotReader.
func (s *VLLMSnapshot) Next(frame []byte, more bool) (p SnapshotPart, err error) {
	p.End = !more
	at := s.frames
	s.frames = min(at+1, 3)
	switch {
	case at == 0 && len(frame) != 0:
		return p, fmt.Errorf("read snapshot: first frame has %d bytes, want none: %w", len(frame), ErrSnapshot)
	case at == 1 && len(frame) != 8:
		return p, fmt.Errorf("read snapshot: seq of %d bytes: %w", len(frame), ErrSnapshot)
	case at == 1:
		s.seq = int64(binary.BigEndian.Uint64(frame))
		switch {
		case s.seq == -1 || s.seq == -2:
			return p, fmt.Errorf("read snapshot: seq %d: %w", s.seq, ErrNoSnapshot)
		case s.seq < 0:
			return p, fmt.Errorf("read snapshot: seq %d: %w", s.seq, ErrSnapshot)
		}
	case at == 2 && len(frame) != PublisherIDBytes:
		return p, fmt.Errorf("read snapshot: publisher id of %d bytes, want %d: %w", len(frame), PublisherIDBytes, ErrSnapshot)
	case at == 2:
		p.Kind, p.Seq, p.Publisher = SnapshotHeader, uint64(s.seq), frame
	case at > 2:
		p.Kind, p.Payload = SnapshotBatch, frame
	}
	if at < 2 && !more {
		return p, fmt.Errorf("read snapshot: %d frames, want at least 3: %w", at+1, ErrSnapshot)
	}
	return p, nil
}
