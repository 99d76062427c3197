package zmtp

import (
	"bytes"
	"encoding/binary"
	"fmt"
)

// GreetingBytes is the size in bytes of the greeting of either side: signature (10), version
// (2), mechanism (20), as-server (1), filler (31).
const GreetingBytes = 64

// SignatureBytes is the size of the signature at the beginning of a greeting.
const SignatureBytes = 10

const (
	majorAt        = 10
	minorAt        = 11
	mechanismAt    = 12
	mechanismBytes = 20

	majorVersion = 3
	minorVersion = 1
	mechanism    = "NULL"
)

// AppendGreeting appends the greeting of ZMTP 3.1 with the NULL mechanism to dst.
func AppendGreeting(dst []byte) []byte {
	var g [GreetingBytes]byte
	g[0], g[SignatureBytes-1] = 0xff, 0x7f
	g[majorAt], g[minorAt] = majorVersion, minorVersion
	copy(g[mechanismAt:], mechanism)
	return append(dst, g[:]...)
}

// CheckGreeting checks as much of a greeting as has arrived, so that a peer that waits for more of ours is refused at its first wrong byte.
func CheckGreeting(in []byte) error {
	if len(in) > 0 && in[0] != 0xff || len(in) >= SignatureBytes && in[SignatureBytes-1]&1 == 0 {
		return &Error{ReasonProtocol, "peer does not speak ZMTP 3.0 or 3.1"}
	}
	if len(in) > majorAt && in[majorAt] < majorVersion {
		return &Error{ReasonVersion, "peer speaks ZMTP 2.0 or older (libzmq 3 or older), want ZMTP 3.0 or 3.1"}
	}
	if len(in) < mechanismAt+mechanismBytes {
		return nil
	}
	name := in[mechanismAt : mechanismAt+mechanismBytes]
	name, _, _ = bytes.Cut(name, []byte{0})
	if string(name) != mechanism {
		return &Error{ReasonMechanism, fmt.Sprintf("peer requires mechanism %q, want %q", name, mechanism)}
	}
	return nil
}

// maxMetadataBytes bounds the body of a READY command.
const maxMetadataBytes = 4096

// appendReady appends a READY command with the socket type.
func appendReady(dst []byte, socket SocketType) []byte {
	return AppendCommand(dst, "READY", appendProperty(nil, "Socket-Type", string(socket))...)
}

func appendProperty(dst []byte, name, value string) []byte {
	dst = append(append(dst, byte(len(name))), name...)
	return append(binary.BigEndian.AppendUint32(dst, uint32(len(value))), value...)
}

// parseReady returns the socket type of a READY command's properties. Other properties are ignored. Names are case-insensitive.
func parseReady(data []byte) (socket SocketType, err error) {
	malformed := &Error{ReasonProtocol, "malformed metadata in READY"}
	for len(data) > 0 {
		nameEnd := 1 + int(data[0])
		if nameEnd == 1 || len(data) < nameEnd+4 {
			return "", malformed
		}
		name, rest := data[1:nameEnd], data[nameEnd+4:]
		size := binary.BigEndian.Uint32(data[nameEnd:])
		if uint64(size) > uint64(len(rest)) {
			return "", malformed
		}
		if bytes.EqualFold(name, []byte("Socket-Type")) {
			socket = SocketType(rest[:size])
		}
		data = rest[size:]
	}
	return socket, nil
}
