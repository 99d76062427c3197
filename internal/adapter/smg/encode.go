package smg

import (
	"errors"
	"math"

	"google.golang.org/protobuf/encoding/protowire"

	"github.com/kvcast/kvcast/internal/wire"
)

// Field numbers of smg.grpc.common, by message. The messages are encoded and decoded by hand: that keeps batches as bytes, which
// are encoded once for all subscribers.
const (
	requestStart = 1

	batchSeq, batchTime, batchEvents, batchRank, batchSnapshot = 1, 2, 3, 4, 7

	snapshotIndex, snapshotCount, snapshotBlocks = 1, 2, 3

	eventID, eventStored, eventRemoved, eventCleared = 1, 2, 3, 4

	storedBlocks, storedParent, storedTier, storedMedium, storedLoRAName = 1, 2, 3, 4, 11

	blockHash, blockTokens, blockSize, blockLevel = 1, 2, 3, 5

	removedHashes, removedLevel, removedTier, removedMedium = 1, 2, 3, 4
)

// levels are the cache levels of media.
var levels = map[string]uint64{"GPU": 0, "CPU": 1, "STORAGE": 2, "EXTERNAL": 3}

// decodeRequest returns the start_sequence_number of a SubscribeKvEventsRequest.
func decodeRequest(b []byte) (start uint64, err error) {
	for len(b) > 0 {
		number, kind, n := protowire.ConsumeTag(b)
		if n < 0 {
			return 0, protowire.ParseError(n)
		}
		b = b[n:]
		if number == requestStart {
			if kind != protowire.VarintType {
				return 0, errors.New("start_sequence_number is no number")
			}
			if start, n = protowire.ConsumeVarint(b); n < 0 {
				return 0, protowire.ParseError(n)
			}
		} else if n = protowire.ConsumeFieldValue(number, kind, b); n < 0 {
			return 0, protowire.ParseError(n)
		}
		b = b[n:]
	}
	return start, nil
}

func appendNumber(b []byte, field protowire.Number, n uint64) []byte {
	return protowire.AppendVarint(protowire.AppendTag(b, field, protowire.VarintType), n)
}

func appendBytes(b []byte, field protowire.Number, value []byte) []byte {
	return protowire.AppendBytes(protowire.AppendTag(b, field, protowire.BytesType), value)
}

func appendText(b []byte, field protowire.Number, value string) []byte {
	return protowire.AppendString(protowire.AppendTag(b, field, protowire.BytesType), value)
}

// appendBatch appends a KvEventBatch without its sequence number. The ids of its events follow id; 0: they have none.
func appendBatch(b []byte, time float64, rank uint32, events []wire.Event, id uint64) []byte {
	b = protowire.AppendFixed64(protowire.AppendTag(b, batchTime, protowire.Fixed64Type), math.Float64bits(time))
	b = appendNumber(b, batchRank, uint64(rank))
	var body []byte
	for i := range events {
		body = body[:0]
		if id > 0 {
			body = appendNumber(body, eventID, id+uint64(i))
		}
		b = appendBytes(b, batchEvents, appendEvent(body, &events[i]))
	}
	return b
}

func appendEvent(b []byte, e *wire.Event) []byte {
	switch e.Kind {
	case wire.KindStored:
		return appendBytes(b, eventStored, appendStored(nil, e))
	case wire.KindRemoved:
		return appendBytes(b, eventRemoved, appendRemoved(nil, e))
	default:
		return appendBytes(b, eventCleared, nil)
	}
}

func appendStored(b []byte, e *wire.Event) []byte {
	level, size := levels[e.Medium], int(e.BlockSize)
	var block, tokens []byte
	for i, hash := range e.BlockHashes {
		tokens = tokens[:0]
		for _, id := range e.Tokens[i*size : (i+1)*size] {
			tokens = protowire.AppendVarint(tokens, uint64(id))
		}
		block = appendNumber(block[:0], blockHash, hash)
		block = appendBytes(block, blockTokens, tokens)
		block = appendNumber(block, blockSize, uint64(size))
		b = appendBytes(b, storedBlocks, appendNumber(block, blockLevel, level))
	}
	if e.HasParent {
		b = appendNumber(b, storedParent, e.Parent)
	}
	b = appendText(appendNumber(b, storedTier, level+1), storedMedium, e.Medium)
	if e.LoRAName != "" {
		b = appendText(b, storedLoRAName, e.LoRAName)
	}
	return b
}

func appendRemoved(b []byte, e *wire.Event) []byte {
	var hashes []byte
	for _, hash := range e.BlockHashes {
		hashes = protowire.AppendVarint(hashes, hash)
	}
	level := levels[e.Medium]
	b = appendNumber(appendBytes(b, removedHashes, hashes), removedLevel, level)
	return appendText(appendNumber(b, removedTier, level+1), removedMedium, e.Medium)
}

// appendSeq appends the sequence number of a batch.
func appendSeq(b []byte, seq uint64) []byte { return appendNumber(b, batchSeq, seq) }

// appendSnapshot appends that a batch is a part of all blocks.
func appendSnapshot(b []byte, index, count int, blocks uint64) []byte {
	s := appendNumber(nil, snapshotIndex, uint64(index))
	return appendBytes(b, batchSnapshot, appendNumber(appendNumber(s, snapshotCount, uint64(count)), snapshotBlocks, blocks))
}
