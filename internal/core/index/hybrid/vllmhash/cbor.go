package vllmhash

import (
	"crypto/sha256"
	"encoding/binary"
)

// Major types of CBOR (RFC 8949), in place.
const (
	cborUint  = 0 << 5
	cborBytes = 2 << 5
	cborText  = 3 << 5
	cborArray = 4 << 5
	cborNull  = 0xf6
)

// appendCBORHead appends the head of a value, in as few bytes as possible.
func appendCBORHead(b []byte, major byte, n uint32) []byte {
	switch {
	case n < 24:
		return append(b, major|byte(n))
	case n < 1<<8:
		return append(b, major|24, byte(n))
	case n < 1<<16:
		return binary.BigEndian.AppendUint16(append(b, major|25), uint16(n))
	default:
		return binary.BigEndian.AppendUint32(append(b, major|26), n)
	}
}

func appendCBORText(b []byte, text string) []byte {
	return append(appendCBORHead(b, cborText, uint32(len(text))), text...)
}

// appendCBORUnit appends a message without its end: the parent's hash and the array of tokens.
func appendCBORUnit(b []byte, parent *[sha256.Size]byte, tokens []uint32) []byte {
	b = appendCBORHead(b, cborArray, 3)
	b = append(appendCBORHead(b, cborBytes, sha256.Size), parent[:]...)
	b = appendCBORHead(b, cborArray, uint32(len(tokens)))
	for _, t := range tokens {
		b = appendCBORHead(b, cborUint, t)
	}
	return b
}

// appendCBOREnd appends the end of a message: the extra keys.
func appendCBOREnd(b []byte, c Content) []byte {
	keys := uint32(0)
	for _, value := range [...]string{c.LoRAName, c.CacheSalt} {
		if value != "" {
			keys++
		}
	}
	if keys == 0 {
		return append(b, cborNull)
	}
	b = appendCBORHead(b, cborArray, keys)
	if c.LoRAName != "" {
		b = appendCBORText(appendCBORHead(b, cborArray, 3), "lora")
		b = appendCBORText(appendCBORText(b, c.LoRAName), c.LoRAPath)
	}
	if c.CacheSalt != "" {
		b = appendCBORText(appendCBORText(appendCBORHead(b, cborArray, 2), "cache_salt"), c.CacheSalt)
	}
	return b
}
