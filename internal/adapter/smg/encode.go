package smg

import (
	"google.golang.org/protobuf/proto"

	smgv1 "github.com/kvcast/kvcast/internal/peer/smg/v1"
	"github.com/kvcast/kvcast/internal/wire"
)

// levels are the cache levels of media. A tier is its level plus 1.
var levels = map[string]uint32{"GPU": 0, "CPU": 1, "STORAGE": 2, "EXTERNAL": 3}

// newBatch returns a batch without its sequence number. The ids of its events follow id; 0: they have none. It references the
// memory of the events.
func newBatch(time float64, rank uint32, events []wire.Event, id uint64) *smgv1.KvEventBatch {
	b := &smgv1.KvEventBatch{Timestamp: time, DpRank: &rank, Events: make([]*smgv1.KvCacheEvent, len(events))}
	for i := range events {
		e, out := &events[i], new(smgv1.KvCacheEvent)
		if id > 0 {
			out.EventId = id + uint64(i)
		}
		switch level := levels[e.Medium]; e.Kind {
		case wire.KindStored:
			out.Data = &smgv1.KvCacheEvent_Stored{Stored: newStored(e, level)}
		case wire.KindRemoved:
			out.Data = &smgv1.KvCacheEvent_Removed{Removed: &smgv1.KvBlocksRemoved{
				BlockHashes: e.BlockHashes, CacheLevel: &level, Tier: level + 1, Medium: e.Medium,
			}}
		default:
			out.Data = &smgv1.KvCacheEvent_Cleared{Cleared: new(smgv1.KvCacheCleared)}
		}
		b.Events[i] = out
	}
	return b
}

func newStored(e *wire.Event, level uint32) *smgv1.KvBlocksStored {
	s := &smgv1.KvBlocksStored{Blocks: make([]*smgv1.KvBlock, len(e.BlockHashes)), Tier: level + 1, Medium: e.Medium, LoraName: e.LoRAName}
	if e.HasParent {
		s.ParentBlockHash = &e.Parent
	}
	blocks, size := make([]smgv1.KvBlock, len(e.BlockHashes)), int(e.BlockSize)
	for i, hash := range e.BlockHashes {
		b := &blocks[i]
		b.BlockHash, b.TokenIds, b.BlockSize, b.CacheLevel = hash, e.Tokens[i*size:(i+1)*size], e.BlockSize, &level
		s.Blocks[i] = b
	}
	return s
}

// appendBatch appends fields of a batch to those that are encoded.
func appendBatch(b []byte, m *smgv1.KvEventBatch) []byte {
	b, err := proto.MarshalOptions{}.MarshalAppend(b, m)
	if err != nil {
		panic("smg: encode batch: " + err.Error()) // the only cause is a string that is not UTF-8, which ingest prevents
	}
	return b
}
