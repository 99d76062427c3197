package wire

import (
	"encoding/binary"
	"errors"
	"fmt"
	"math"
)

// ErrReply is a message of a replay socket that is no reply.
var ErrReply = errors.New("no replay reply")

// ParseReply reads a message that a DEALER receives from an engine's replay
// socket. It is read from its end, because newer engines put a topic before the
// seq. end tells that it is the mark after the last batch, which has neither seq
// nor payload. The payload is a part of frames.
func ParseReply(frames [][]byte) (seq uint64, payload []byte, end bool, err error) {
	if len(frames) < 2 {
		return 0, nil, false, fmt.Errorf("parse reply: %d frames: %w", len(frames), ErrReply)
	}
	payload = frames[len(frames)-1]
	number := frames[len(frames)-2]
	if len(number) != 8 {
		return 0, nil, false, fmt.Errorf("parse reply: seq of %d bytes: %w", len(number), ErrReply)
	}
	seq = binary.BigEndian.Uint64(number)
	if seq == math.MaxUint64 && len(payload) == 0 {
		return 0, nil, true, nil
	}
	return seq, payload, false, nil
}
