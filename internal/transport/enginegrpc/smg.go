package enginegrpc

import (
	"fmt"
	"math"

	"github.com/tinylib/msgp/msgp"
	"google.golang.org/protobuf/encoding/protowire"

	smgv1 "github.com/kvcast/kvcast/internal/peer/smg/v1"
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
	request: newSMGRequest,
	refuses: refusesHeader,
	read:    readSMG,
	event:   (*converter).smgEvent,
}

// newSMGRequest returns a SubscribeKvEventsRequest. Some servers begin after the seq that it has, as the protocol says, and
// some at that seq: it is the one before the first wanted.
func newSMGRequest(c *call) []byte {
	return encoded(&smgv1.SubscribeKvEventsRequest{StartSequenceNumber: max(c.from, 1) - 1})
}

// readSMG reads a KvEventBatch.
func readSMG(response []byte) (h header, err error) {
	f := fields{rest: response}
	for f.next() {
		switch {
		case f.IsVarint(smgv1.KvEventBatchSequenceNumberField):
			h.seq = f.Value
		case f.Number == smgv1.KvEventBatchTimestampField && f.Type == protowire.Fixed64Type:
			h.time = math.Float64frombits(f.Value)
		case f.IsBytes(smgv1.KvEventBatchEventsField) && len(h.events) <= maxEvents:
			h.events = append(h.events, f.Bytes)
		case f.IsVarint(smgv1.KvEventBatchDpRankField):
			h.rank = uint32(f.Value)
		case f.IsBytes(smgv1.KvEventBatchSnapshotField):
			snapshot := new(smgv1.KvSnapshot)
			f.decode(snapshot)
			h.begins, h.partial = snapshot.GetIndex() == 0, snapshot.GetUnknownBefore() != 0
		case f.IsBytes(smgv1.KvEventBatchLoadField):
			load := new(smgv1.KvLoad)
			f.decode(load)
			h.ignored = load.GetLoadOnly()
		}
	}
	return h, f.err
}

// smgEvent adds a KvCacheEvent.
func (c *converter) smgEvent(event []byte) error {
	f := fields{rest: event}
	for f.next() {
		switch {
		case f.IsBytes(smgv1.KvCacheEventStoredField):
			f.err = c.smgStored(f.Bytes)
		case f.IsBytes(smgv1.KvCacheEventRemovedField):
			f.err = c.smgRemoved(f.Bytes)
		case f.IsBytes(smgv1.KvCacheEventClearedField):
			f.err = c.smgCleared(f.Bytes)
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
	if p.rare.Locality == "" && p.rare.Ownership == "" && p.rare.Note == "" && !p.rare.HasSlidingWindow {
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
		case f.IsVarint(smgv1.KvBlocksStoredParentBlockHashField):
			common.Parent, common.HasParent = f.Value, true
		case f.IsVarint(smgv1.KvBlocksStoredTierField):
			place.tier = f.Value
		case f.IsBytes(smgv1.KvBlocksStoredMediumField):
			f.text(&place.medium)
		case f.IsVarint(smgv1.KvBlocksStoredGroupIdxField):
			common.GroupIdx, common.HasGroupIdx = int64(uint32(f.Value)), true
		case f.IsBytes(smgv1.KvBlocksStoredKvCacheSpecKindField):
			f.text(&common.SpecKind)
		case f.IsVarint(smgv1.KvBlocksStoredSlidingWindowField):
			place.rare.SlidingWindow, place.rare.HasSlidingWindow = int64(uint32(f.Value)), true
		case f.IsVarint(smgv1.KvBlocksStoredLocalityField):
			place.locality = f.Value
		case f.IsBytes(smgv1.KvBlocksStoredOwnershipField):
			f.text(&place.rare.Ownership)
		case f.IsBytes(smgv1.KvBlocksStoredSessionIDField):
			f.text(&place.rare.Note)
		case f.IsBytes(smgv1.KvBlocksStoredLoraNameField):
			f.text(&common.LoRAName)
		case f.IsBytes(smgv1.KvBlocksStoredCacheSaltField):
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
		if !f.IsBytes(smgv1.KvBlocksStoredBlocksField) {
			continue
		}
		b, err := c.smgBlock(f.Bytes)
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
		case f.IsVarint(smgv1.KvBlockBlockHashField):
			b.hash = f.Value
		case f.Number == smgv1.KvBlockTokenIDsField:
			c.tokens = appendUints(&f, smgv1.KvBlockTokenIDsField, c.tokens, maxTokens)
		case f.IsVarint(smgv1.KvBlockBlockSizeField):
			b.size = uint32(f.Value)
		case f.IsVarint(smgv1.KvBlockLoraIDField):
			b.loraID, b.hasLoRAID = int64(f.Value), true
		case f.IsVarint(smgv1.KvBlockCacheLevelField):
			b.level = f.Value
		case f.IsBytes(smgv1.KvBlockExtraKeysField):
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
		if f.IsBytes(smgv1.KvBlockExtraKeysField) {
			b.keys, err = appendSMGKey(b.keys, f.Bytes)
		}
	}
	return b, err
}

// appendSMGKey appends a KvBlockExtraKey as vLLM sends it: a string, bytes, a number, or a list of an identifier and an offset.
func appendSMGKey(b, message []byte) ([]byte, error) {
	m := new(smgv1.KvBlockExtraKey)
	err := decode(message, m)
	switch key := m.GetKey().(type) {
	case *smgv1.KvBlockExtraKey_Text:
		return msgp.AppendString(b, key.Text), err
	case *smgv1.KvBlockExtraKey_Blob:
		return msgp.AppendBytes(b, key.Blob), err
	case *smgv1.KvBlockExtraKey_Number:
		return msgp.AppendInt64(b, key.Number), err
	case *smgv1.KvBlockExtraKey_Multimodal:
		return msgp.AppendInt64(msgp.AppendString(msgp.AppendArrayHeader(b, 2), key.Multimodal.GetIdentifier()), key.Multimodal.GetOffset()), err
	default:
		return msgp.AppendNil(b), err
	}
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
		case f.Number == smgv1.KvBlocksRemovedBlockHashesField:
			c.hashes = appendUints(&f, smgv1.KvBlocksRemovedBlockHashesField, c.hashes, maxBlocks)
		case f.IsVarint(smgv1.KvBlocksRemovedCacheLevelField):
			level = f.Value
		case f.IsVarint(smgv1.KvBlocksRemovedTierField):
			place.tier = f.Value
		case f.IsBytes(smgv1.KvBlocksRemovedMediumField):
			f.text(&place.medium)
		case f.IsVarint(smgv1.KvBlocksRemovedGroupIdxField):
			e.GroupIdx, e.HasGroupIdx = int64(uint32(f.Value)), true
		case f.IsVarint(smgv1.KvBlocksRemovedLocalityField):
			place.locality = f.Value
		case f.IsBytes(smgv1.KvBlocksRemovedOwnershipField):
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
	m := new(smgv1.KvCacheCleared)
	if err := decode(message, m); err != nil {
		return err
	}
	place := smgPlace{rare: wire.Rare{Ownership: m.GetOwnership()}}
	return c.add(wire.Event{Kind: wire.KindCleared, Rare: place.rareFields()})
}
