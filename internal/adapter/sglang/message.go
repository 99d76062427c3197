package sglang

import (
	"encoding/binary"
	"errors"
	"fmt"
	"slices"

	"google.golang.org/protobuf/encoding/protowire"
)

// Field numbers of kv_indexer.v1, by message.
const (
	requestHashes, requestMaxBlocks = 1, 2

	responseMatches, responseBest, responseRead = 1, 2, 3

	matchAddress, matchBlocks, matchWorker = 1, 2, 3
)

const hashBytes = 8 // of an sfixed64

// decodeRequest returns the hashes of a MatchExternalKvPrefixRequest, at most max_blocks of them if that is not 0. More than maxHashes
// of them are an error.
func decodeRequest(b []byte) (hashes []uint64, err error) {
	var limit uint64
	for len(b) > 0 {
		number, kind, n := protowire.ConsumeTag(b)
		if n < 0 {
			return nil, protowire.ParseError(n)
		}
		b = b[n:]
		switch {
		case number == requestHashes && kind == protowire.Fixed64Type:
			var hash uint64
			if hash, n = protowire.ConsumeFixed64(b); n >= 0 {
				hashes = append(hashes, hash)
			}
		case number == requestHashes && kind == protowire.BytesType:
			var packed []byte
			if packed, n = protowire.ConsumeBytes(b); n >= 0 {
				if hashes, err = appendPacked(hashes, packed); err != nil {
					return nil, err
				}
			}
		case number == requestHashes:
			return nil, errors.New("hashes have the wrong type: want sfixed64")
		case number == requestMaxBlocks && kind == protowire.VarintType:
			limit, n = protowire.ConsumeVarint(b)
		case number == requestMaxBlocks:
			return nil, errors.New("max_blocks is no number")
		default:
			n = protowire.ConsumeFieldValue(number, kind, b)
		}
		if n < 0 {
			return nil, protowire.ParseError(n)
		}
		b = b[n:]
	}
	if limit != 0 && uint64(len(hashes)) > limit {
		hashes = hashes[:limit]
	}
	if len(hashes) > maxHashes {
		return nil, fmt.Errorf("%d blocks are more than the limit of %d: set max_blocks, or send fewer hashes", len(hashes), maxHashes)
	}
	return hashes, nil
}

func appendPacked(hashes []uint64, packed []byte) ([]uint64, error) {
	if len(packed)%hashBytes != 0 {
		return nil, fmt.Errorf("hashes have %d bytes: want packed sfixed64, of 8 bytes each", len(packed))
	}
	hashes = slices.Grow(hashes, len(packed)/hashBytes)
	for ; len(packed) > 0; packed = packed[hashBytes:] {
		hashes = append(hashes, binary.LittleEndian.Uint64(packed))
	}
	return hashes, nil
}

// appendMatch appends an element of matches.
func appendMatch(b []byte, address string, blocks int, worker string) []byte {
	var m []byte
	m = protowire.AppendString(protowire.AppendTag(m, matchAddress, protowire.BytesType), address)
	m = appendNumber(m, matchBlocks, blocks)
	m = protowire.AppendString(protowire.AppendTag(m, matchWorker, protowire.BytesType), worker)
	return protowire.AppendBytes(protowire.AppendTag(b, responseMatches, protowire.BytesType), m)
}

// appendTotals appends the longest prefix, and how many blocks were looked up.
func appendTotals(b []byte, best, read int) []byte {
	return appendNumber(appendNumber(b, responseBest, best), responseRead, read)
}

func appendNumber(b []byte, field protowire.Number, n int) []byte {
	return protowire.AppendVarint(protowire.AppendTag(b, field, protowire.VarintType), uint64(n))
}
