package outbound

import (
	"encoding/binary"
	"math"
)

// EndOfReplay is the seq of the message after the last reply to a replay request of vLLM's protocol. No batch has it.
const EndOfReplay = math.MaxUint64

// SeqFrame returns the frame of a seq.
func SeqFrame(seq uint64) []byte { return binary.BigEndian.AppendUint64(nil, seq) }

// ParseSeq parses the seq of a replay request: a big-endian number of any length. EndOfReplay stands for larger ones.
func ParseSeq(frame []byte) (seq uint64) {
	for _, b := range frame {
		if seq > math.MaxUint64>>8 {
			return EndOfReplay
		}
		seq = seq<<8 | uint64(b)
	}
	return seq
}
