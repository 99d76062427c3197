package vllmhash

import (
	"crypto/sha256"
	"encoding/binary"
)

// Opcodes of pickle's protocol 5, as CPython's C implementation writes them. Each string, byte string and tuple that is not empty is
// followed by a memoize opcode.
const (
	opProto      = 0x80
	opFrame      = 0x95
	opShortBytes = 'C'  // length in 1 byte
	opShortText  = 0x8c // length in 1 byte
	opText       = 'X'  // length in 4 bytes
	opInt1       = 'K'
	opInt2       = 'M'
	opInt4       = 'J'  // signed
	opLong1      = 0x8a // signed, length in 1 byte
	opNone       = 'N'
	opMark       = '('
	opTuple      = 't' // of all values since the mark
	opTuple1     = 0x85
	opTuple2     = 0x86
	opTuple3     = 0x87
	opMemoize    = 0x94
	opStop       = '.'
)

// frameStart is the number of bytes before the contents of the frame.
const frameStart = 11

// appendPickledStart appends what precedes the contents of the frame; finishPickle sets the frame's length.
func appendPickledStart(b []byte) []byte {
	return append(b, opProto, 5, opFrame, 0, 0, 0, 0, 0, 0, 0, 0)
}

// finishPickle sets the length of the frame of a complete message.
func finishPickle(message []byte) []byte {
	binary.LittleEndian.PutUint64(message[frameStart-8:], uint64(len(message)-frameStart))
	return message
}

// appendPickledSeed appends a message that is a string.
func appendPickledSeed(b []byte, seed string) []byte {
	return finishPickle(append(appendPickledText(appendPickledStart(b), seed), opStop))
}

// appendPickledUnit appends a message without its end: the parent's hash and the tuple of tokens.
func appendPickledUnit(b []byte, parent *[sha256.Size]byte, tokens []uint32) []byte {
	b = append(appendPickledStart(b), opShortBytes, sha256.Size)
	b = append(append(b, parent[:]...), opMemoize)
	if len(tokens) > 3 {
		b = append(b, opMark)
	}
	for _, t := range tokens {
		switch {
		case t < 1<<8:
			b = append(b, opInt1, byte(t))
		case t < 1<<16:
			b = append(b, opInt2, byte(t), byte(t>>8))
		case t < 1<<31:
			b = append(b, opInt4, byte(t), byte(t>>8), byte(t>>16), byte(t>>24))
		default:
			b = append(b, opLong1, 5, byte(t), byte(t>>8), byte(t>>16), byte(t>>24), 0)
		}
	}
	if len(tokens) > 3 {
		return append(b, opTuple, opMemoize)
	}
	return append(b, opTuple1+byte(len(tokens)-1), opMemoize)
}

// appendPickledEnd appends the end of a message: the extra keys, and the end of the tuple of all.
func appendPickledEnd(b []byte, c Content) []byte {
	keys := byte(0)
	if c.LoRAName != "" {
		b = appendPickledText(appendPickledText(appendPickledText(b, "lora"), c.LoRAName), c.LoRAPath)
		b = append(b, opTuple3, opMemoize)
		keys++
	}
	if c.CacheSalt != "" {
		b = appendPickledText(appendPickledText(b, "cache_salt"), c.CacheSalt)
		b = append(b, opTuple2, opMemoize)
		keys++
	}
	if keys == 0 {
		b = append(b, opNone)
	} else {
		b = append(b, opTuple1+keys-1, opMemoize)
	}
	return append(b, opTuple3, opMemoize, opStop)
}

func appendPickledText(b []byte, text string) []byte {
	if len(text) < 1<<8 {
		b = append(b, opShortText, byte(len(text)))
	} else {
		b = binary.LittleEndian.AppendUint32(append(b, opText), uint32(len(text)))
	}
	return append(append(b, text...), opMemoize)
}
