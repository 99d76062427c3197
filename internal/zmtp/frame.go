package zmtp

import (
	"encoding/binary"
	"time"
)

// Flags of a frame: RFC 37, "framing".
const (
	flagMore    = 1 << 0
	flagLong    = 1 << 1
	flagCommand = 1 << 2
	flagsKnown  = flagMore | flagLong | flagCommand
)

// maxShort is the size in bytes of the largest frame with a one-byte size.
const maxShort = 255

// frameHeader is the decoded header of a frame.
type frameHeader struct {
	flags byte
	bytes int    // of the header
	size  uint64 // of the body
}

// parseHeader decodes the header at the beginning of in. It reports false if the header is incomplete.
func parseHeader(in []byte) (h frameHeader, ok bool) {
	switch {
	case len(in) < 2:
		return h, false
	case in[0]&flagLong == 0:
		return frameHeader{flags: in[0], bytes: 2, size: uint64(in[1])}, true
	case len(in) < 9:
		return h, false
	default:
		return frameHeader{flags: in[0], bytes: 9, size: binary.BigEndian.Uint64(in[1:])}, true
	}
}

// appendHeader appends the header of a frame with a body of a number of bytes.
func appendHeader(dst []byte, flags byte, size int) []byte {
	if size <= maxShort {
		return append(dst, flags, byte(size))
	}
	return binary.BigEndian.AppendUint64(append(dst, flags|flagLong), uint64(size))
}

// AppendMessage appends a message of one or more frames to dst.
func AppendMessage(dst []byte, frames ...[]byte) []byte {
	for i, f := range frames {
		var flags byte
		if i < len(frames)-1 {
			flags = flagMore
		}
		dst = append(appendHeader(dst, flags, len(f)), f...)
	}
	return dst
}

// AppendMore appends a frame of a message that has more frames to dst.
func AppendMore(dst, body []byte) []byte {
	return append(appendHeader(dst, flagMore, len(body)), body...)
}

// AppendCommand appends a command to dst. A name has 1 to 255 bytes.
func AppendCommand(dst []byte, name string, data ...byte) []byte {
	dst = appendHeader(dst, flagCommand, 1+len(name)+len(data))
	dst = append(append(dst, byte(len(name))), name...)
	return append(dst, data...)
}

// maxPingTTL is the longest TTL of a PING: with more, libzmq 4.3 exceeds 16 bits.
const maxPingTTL = 65 * time.Second

// AppendPing appends a PING to dst: RFC 37, "heartbeating". A peer that honours the TTL, as libzmq does, closes the connection if nothing
// follows the PING for that time, which is rounded up to a tenth of a second. 0 means that it need not.
func AppendPing(dst []byte, ttl time.Duration) []byte {
	const unit = 100 * time.Millisecond
	tenths := uint16((min(ttl, maxPingTTL) + unit - 1) / unit)
	return AppendCommand(dst, "PING", byte(tenths>>8), byte(tenths))
}
