package enginegrpc

import (
	"fmt"
	"math"

	"github.com/tinylib/msgp/msgp"
	"google.golang.org/protobuf/encoding/protowire"

	"github.com/kvcast/kvcast/internal/wire"
)

// smg is the protocol of SMG's gateway and of the engines' servers for it: the package smg.grpc.common of smg-grpc-proto.
var smg = protocol{
	methods: []string{
		"/vllm.grpc.engine.VllmEngine/SubscribeKvEvents",
		"/sglang.grpc.scheduler.SglangScheduler/SubscribeKvEvents",
		"/trtllm.TrtllmService/SubscribeKvEvents",
		"/tokenspeed.grpc.scheduler.TokenSpeedScheduler/SubscribeKvEvents",
	},
	appendRequest: appendSMGRequest,
	read:          readSMG,
	event:         (*converter).smgEvent,
}

// Field numbers of smg.grpc.common, by message.
const (
	smgRequestStart = 1

	smgBatchSeq, smgBatchTime, smgBatchEvents, smgBatchRank, smgBatchSnapshot, smgBatchLoad = 1, 2, 3, 4, 7, 8

	smgSnapshotIndex, smgSnapshotUnknown = 1, 4

	smgLoadOnly = 9

	smgEventStored, smgEventRemoved, smgEventCleared = 2, 3, 4

	smgStoredBlocks, smgStoredParent, smgStoredTier, smgStoredMedium   = 1, 2, 3, 4
	smgStoredGroup, smgStoredKind, smgStoredWindow, smgStoredLocality  = 5, 6, 7, 8
	smgStoredOwnership, smgStoredSession, smgStoredLoRA, smgStoredSalt = 9, 10, 11, 12

	smgBlockHash, smgBlockTokens, smgBlockSize, smgBlockLoRAID, smgBlockLevel, smgBlockKeys = 1, 2, 3, 4, 5, 6

	smgKeyText, smgKeyBlob, smgKeyNumber, smgKeyMultimodal = 1, 2, 3, 4

	smgMultimodalID, smgMultimodalOffset = 1, 2

	smgRemovedHashes, smgRemovedLevel, smgRemovedTier, smgRemovedMedium = 1, 2, 3, 4
	smgRemovedGroup, smgRemovedLocality, smgRemovedOwnership            = 5, 6, 7

	smgClearedOwnership = 1
)

// appendSMGRequest appends a SubscribeKvEventsRequest. Some servers begin after the seq that it has, as the protocol says, and
// some at that seq: it is the one before the first wanted.
func appendSMGRequest(b []byte, _ uint32, from uint64) []byte {
	if from > 0 {
		b = protowire.AppendVarint(protowire.AppendTag(b, smgRequestStart, protowire.VarintType), from-1)
	}
	return b
}

// readSMG reads a KvEventBatch.
func readSMG(response []byte) (h header, err error) {
	f := fields{rest: response}
	for f.next() {
		switch {
		case f.varint(smgBatchSeq):
			h.seq = f.n
		case f.number == smgBatchTime && f.kind == protowire.Fixed64Type:
			h.time = math.Float64frombits(f.n)
		case f.bytes(smgBatchEvents) && len(h.events) <= maxEvents:
			h.events = append(h.events, f.data)
		case f.varint(smgBatchRank):
			h.rank = uint32(f.n)
		case f.bytes(smgBatchSnapshot):
			h.begins = true
			snapshot := fields{rest: f.data}
			for snapshot.next() {
				switch {
				case snapshot.varint(smgSnapshotIndex):
					h.begins = snapshot.n == 0
				case snapshot.varint(smgSnapshotUnknown):
					h.partial = snapshot.n != 0
				}
			}
			f.err = snapshot.err
		case f.bytes(smgBatchLoad):
			load := fields{rest: f.data}
			for load.next() {
				if load.varint(smgLoadOnly) {
					h.ignored = load.n != 0
				}
			}
			f.err = load.err
		}
	}
	return h, f.err
}

// smgEvent adds a KvCacheEvent.
func (c *converter) smgEvent(event []byte) error {
	f := fields{rest: event}
	for f.next() {
		switch {
		case f.bytes(smgEventStored):
			f.err = c.smgStored(f.data)
		case f.bytes(smgEventRemoved):
			f.err = c.smgRemoved(f.data)
		case f.bytes(smgEventCleared):
			f.err = c.smgCleared(f.data)
		}
	}
	return f.err
}

// smgPlace is where blocks are, and whose they are.
type smgPlace struct {
	tier     uint64
	medium   string
	locality uint64
	rare     wire.Rare
}

// smgMedia are the media of tiers, and of cache levels one above.
var smgMedia = [...]string{1: "GPU", 2: "CPU", 3: "DISK", 4: "EXTERNAL"}

// mediumOf returns the medium of blocks: of their tier if it is set, or else the medium that the engine names, or else that of
// their cache level.
func (p *smgPlace) mediumOf(level uint64) string {
	tier := p.tier
	switch {
	case tier == 0 && p.medium != "":
		return p.medium
	case tier == 0:
		tier = level + 1
	}
	if tier == 0 || tier >= uint64(len(smgMedia)) {
		return fmt.Sprintf("tier %d", tier)
	}
	return smgMedia[tier]
}

// rareFields returns the rare fields of an event; nil if it has none.
func (p *smgPlace) rareFields() *wire.Rare {
	const local = 1
	switch p.locality {
	case 0, local:
	default:
		p.rare.Locality = "REMOTE"
	}
	if p.rare.Locality == "" && p.rare.Ownership == "" && p.rare.SessionID == "" && !p.rare.HasSlidingWindow {
		return nil
	}
	rare := p.rare
	return &rare
}

// smgBlock is a KvBlock.
type smgBlock struct {
	hash      uint64
	size      uint32
	tokens    int // number of its tokens, which are the last of converter.tokens
	loraID    int64
	hasLoRAID bool
	level     uint64
	keys      []byte // extra keys in MessagePack; nil for none
}

// ragged reports whether the block has another number of tokens than its size.
func (b *smgBlock) ragged() bool { return b.tokens != 0 && uint32(b.tokens) != b.size }

// continues reports whether the block can be in one event with the block before it.
func (b *smgBlock) continues(before *smgBlock) bool {
	return !b.ragged() && !before.ragged() && b.size == before.size && (b.tokens == 0) == (before.tokens == 0) &&
		b.loraID == before.loraID && b.hasLoRAID == before.hasLoRAID && b.level == before.level
}

// smgStored adds a KvBlocksStored, as several events if its blocks differ.
func (c *converter) smgStored(message []byte) error {
	var common wire.Event
	var place smgPlace
	f := fields{rest: message}
	for f.next() {
		switch {
		case f.varint(smgStoredParent):
			common.Parent, common.HasParent = f.n, true
		case f.varint(smgStoredTier):
			place.tier = f.n
		case f.bytes(smgStoredMedium):
			f.text(&place.medium)
		case f.varint(smgStoredGroup):
			common.GroupIdx, common.HasGroupIdx = int64(uint32(f.n)), true
		case f.bytes(smgStoredKind):
			f.text(&common.SpecKind)
		case f.varint(smgStoredWindow):
			place.rare.SlidingWindow, place.rare.HasSlidingWindow = int64(uint32(f.n)), true
		case f.varint(smgStoredLocality):
			place.locality = f.n
		case f.bytes(smgStoredOwnership):
			f.text(&place.rare.Ownership)
		case f.bytes(smgStoredSession):
			f.text(&place.rare.SessionID)
		case f.bytes(smgStoredLoRA):
			f.text(&common.LoRAName)
		case f.bytes(smgStoredSalt):
			f.text(&common.CacheSalt)
		}
	}
	if f.err != nil {
		return f.err
	}
	common.Kind, common.Rare = wire.KindStored, place.rareFields()
	return c.smgBlocks(message, common, &place)
}

// smgBlocks adds the blocks of a KvBlocksStored. The other fields of their events are given.
func (c *converter) smgBlocks(message []byte, common wire.Event, place *smgPlace) error {
	run := smgRun{c: c, next: common, place: place}
	f := fields{rest: message}
	for f.next() {
		if !f.bytes(smgStoredBlocks) {
			continue
		}
		b, err := c.smgBlock(f.data)
		if err == nil {
			err = run.add(b)
		}
		if err != nil {
			return err
		}
	}
	if f.err != nil {
		return f.err
	}
	return run.end(len(c.tokens))
}

// smgRun is blocks of a KvBlocksStored that can be in one event.
type smgRun struct {
	c      *converter
	next   wire.Event // the fields of the run's event, except those of its blocks
	place  *smgPlace
	last   smgBlock
	blocks int
	tokens int // where those of the run begin
}

// add adds a block, whose tokens are the last.
func (r *smgRun) add(b smgBlock) error {
	c := r.c
	if first := len(c.tokens) - b.tokens; r.blocks == 0 || !b.continues(&r.last) {
		if err := r.end(first); err != nil {
			return err
		}
		r.tokens = first
	}
	if err := c.addHash(b.hash); err != nil {
		return err
	}
	if b.keys != nil && len(c.keys) == 0 {
		c.keys = append(c.keys, make([][]byte, r.blocks)...)
	}
	if b.keys != nil || len(c.keys) > 0 {
		c.keys = append(c.keys, b.keys)
	}
	r.last, r.blocks = b, r.blocks+1
	return nil
}

// end adds the run's event. Its tokens end at an index.
func (r *smgRun) end(tokens int) error {
	if r.blocks == 0 {
		return nil
	}
	c, e, b := r.c, r.next, &r.last
	e.BlockHashes = c.hashes[len(c.hashes)-r.blocks : len(c.hashes) : len(c.hashes)]
	e.Medium, e.LoRAID, e.HasLoRAID = r.place.mediumOf(b.level), b.loraID, b.hasLoRAID
	switch {
	case b.ragged():
		e.BlockSize = b.size // without tokens, which is refused when it is decoded
	case b.tokens > 0:
		e.BlockSize, e.Tokens = b.size, c.tokens[r.tokens:tokens:tokens]
	}
	if len(c.keys) > 0 {
		e.Raw = &wire.Raw{ExtraKeys: appendLists(nil, c.keys)}
		clear(c.keys)
		c.keys = c.keys[:0]
	}
	r.next.Parent, r.next.HasParent, r.blocks = b.hash, true, 0
	return c.add(e)
}

// smgBlock reads a KvBlock, and appends its tokens.
func (c *converter) smgBlock(message []byte) (b smgBlock, err error) {
	first, keys := len(c.tokens), 0
	f := fields{rest: message}
	for f.next() {
		switch {
		case f.varint(smgBlockHash):
			b.hash = f.n
		case f.number == smgBlockTokens:
			c.tokens = appendUints(&f, smgBlockTokens, c.tokens, maxTokens)
		case f.varint(smgBlockSize):
			b.size = uint32(f.n)
		case f.varint(smgBlockLoRAID):
			b.loraID, b.hasLoRAID = int64(f.n), true
		case f.varint(smgBlockLevel):
			b.level = f.n
		case f.bytes(smgBlockKeys):
			keys++
		}
	}
	b.tokens = len(c.tokens) - first
	if f.err == nil {
		f.err = c.countKeys(keys)
	}
	if f.err != nil || keys == 0 {
		return b, f.err
	}
	b.keys = msgp.AppendArrayHeader(nil, uint32(keys))
	f = fields{rest: message}
	for f.next() && err == nil {
		if f.bytes(smgBlockKeys) {
			b.keys, err = appendSMGKey(b.keys, f.data)
		}
	}
	return b, err
}

// appendSMGKey appends a KvBlockExtraKey as vLLM sends it: a string, bytes, a number, or a list of an identifier and an offset.
func appendSMGKey(b, message []byte) ([]byte, error) {
	key := msgp.AppendNil(nil)
	var text string
	f := fields{rest: message}
	for f.next() {
		switch {
		case f.bytes(smgKeyText):
			f.text(&text)
			key = msgp.AppendString(nil, text)
		case f.bytes(smgKeyBlob):
			key = msgp.AppendBytes(nil, f.data)
		case f.varint(smgKeyNumber):
			key = msgp.AppendInt64(nil, int64(f.n))
		case f.bytes(smgKeyMultimodal):
			var offset int64
			m := fields{rest: f.data}
			for m.next() {
				switch {
				case m.bytes(smgMultimodalID):
					m.text(&text)
				case m.varint(smgMultimodalOffset):
					offset = int64(m.n)
				}
			}
			f.err = m.err
			key = msgp.AppendInt64(msgp.AppendString(msgp.AppendArrayHeader(nil, 2), text), offset)
		}
	}
	return append(b, key...), f.err
}

// appendLists appends a list of encoded values, nil for those that are nil.
func appendLists(b []byte, all [][]byte) []byte {
	b = msgp.AppendArrayHeader(b, uint32(len(all)))
	for _, one := range all {
		if one == nil {
			b = msgp.AppendNil(b)
		}
		b = append(b, one...)
	}
	return b
}

// smgRemoved adds a KvBlocksRemoved.
func (c *converter) smgRemoved(message []byte) error {
	e := wire.Event{Kind: wire.KindRemoved}
	var place smgPlace
	var level uint64
	first := len(c.hashes)
	f := fields{rest: message}
	for f.next() {
		switch {
		case f.number == smgRemovedHashes:
			c.hashes = appendUints(&f, smgRemovedHashes, c.hashes, maxBlocks)
		case f.varint(smgRemovedLevel):
			level = f.n
		case f.varint(smgRemovedTier):
			place.tier = f.n
		case f.bytes(smgRemovedMedium):
			f.text(&place.medium)
		case f.varint(smgRemovedGroup):
			e.GroupIdx, e.HasGroupIdx = int64(uint32(f.n)), true
		case f.varint(smgRemovedLocality):
			place.locality = f.n
		case f.bytes(smgRemovedOwnership):
			f.text(&place.rare.Ownership)
		}
	}
	if f.err != nil {
		return f.err
	}
	e.BlockHashes, e.Medium, e.Rare = c.hashes[first:len(c.hashes):len(c.hashes)], place.mediumOf(level), place.rareFields()
	return c.add(e)
}

// smgCleared adds a KvCacheCleared.
func (c *converter) smgCleared(message []byte) error {
	var place smgPlace
	f := fields{rest: message}
	for f.next() {
		if f.bytes(smgClearedOwnership) {
			f.text(&place.rare.Ownership)
		}
	}
	if f.err != nil {
		return f.err
	}
	return c.add(wire.Event{Kind: wire.KindCleared, Rare: place.rareFields()})
}
