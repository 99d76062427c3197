package enginegrpc

import (
	"fmt"
	"strconv"

	"github.com/tinylib/msgp/msgp"
	"github.com/zeebo/xxh3"

	openenginev1 "github.com/kvcast/kvcast/internal/peer/openengine/v1"
	"github.com/kvcast/kvcast/internal/wire"
)

// openEngine is the protocol of the package openengine.v1, as of July 2026. Its service was named OpenEngine before.
var openEngine = protocol{
	methods: []string{"/openengine.v1.Control/SubscribeKvEvents", "/openengine.v1.OpenEngine/SubscribeKvEvents"},
	request: newOpenRequest,
	refuses: refusesHeader,
	read:    readOpen,
	event:   (*converter).openEvent,
}

// newOpenRequest returns a SubscribeKvEventsRequest. The schema does not say whether a server begins at the seq that it has, or
// after it, and no server announces whether it has snapshots: the seq is the one before the first wanted, and no snapshot is requested.
func newOpenRequest(c *call) []byte {
	return encoded(&openenginev1.SubscribeKvEventsRequest{DpRanks: []uint32{c.rank}, StartSequenceNumber: max(c.from, 1) - 1})
}

// readOpen reads a SubscribeKvEventsResponse.
func readOpen(response []byte) (h header, err error) {
	h.ignored = true
	f := fields{rest: response}
	for f.next() {
		switch {
		case f.IsBytes(openenginev1.SubscribeKvEventsResponseBatchField):
			h, f.err = readOpenBatch(f.Bytes)
		case f.IsBytes(openenginev1.SubscribeKvEventsResponseErrorField):
			h, f.err = readOpenError(f.Bytes)
		}
	}
	return h, f.err
}

func readOpenBatch(message []byte) (h header, err error) {
	f := fields{rest: message}
	for f.next() {
		switch {
		case f.IsVarint(openenginev1.KvEventBatchSequenceNumberField):
			h.seq = f.Value
		case f.IsVarint(openenginev1.KvEventBatchTimeUnixNanoField):
			h.time = float64(f.Value) / 1e9
		case f.IsVarint(openenginev1.KvEventBatchDpRankField):
			h.rank = uint32(f.Value)
		case f.IsBytes(openenginev1.KvEventBatchEventsField) && len(h.events) <= maxEvents:
			h.events = append(h.events, f.Bytes)
		}
	}
	return h, f.err
}

// readOpenError reads an EngineError, which ends the call.
func readOpenError(message []byte) (h header, err error) {
	e := new(openenginev1.EngineError)
	err = decode(message, e)
	const invalidArgument, unsupportedFeature = 1, 2
	h.cannotResume = e.GetCode() == invalidArgument || e.GetCode() == unsupportedFeature
	h.ended = fmt.Errorf("the engine ended the call: error code %d: %.256s", e.GetCode(), e.GetMessage())
	return h, err
}

// openEvent adds a KvEvent.
func (c *converter) openEvent(event []byte) error {
	f := fields{rest: event}
	for f.next() {
		switch {
		case f.IsBytes(openenginev1.KvEventStoredField):
			f.err = c.openStored(f.Bytes)
		case f.IsBytes(openenginev1.KvEventRemovedField):
			f.err = c.openRemoved(f.Bytes)
		case f.IsBytes(openenginev1.KvEventClearedField):
			f.err = c.add(wire.Event{Kind: wire.KindCleared})
		}
	}
	return f.err
}

// openMedia are the media of StorageMedium.
var openMedia = [...]string{"", "GPU", "CPU_PINNED", "DISK", "EXTERNAL"}

func openMedium(n uint64) string {
	if n >= uint64(len(openMedia)) {
		return fmt.Sprintf("medium %d", n)
	}
	return openMedia[n]
}

// openStored adds a BlockStored. A field that is 0 is one that the engine does not set.
func (c *converter) openStored(message []byte) error {
	e := wire.Event{Kind: wire.KindStored}
	hashes, tokens := len(c.hashes), len(c.tokens)
	var window uint32
	var keys [][]string
	f := fields{rest: message}
	for f.next() {
		switch {
		case f.IsBytes(openenginev1.BlockStoredBlockHashesField):
			var h uint64
			if h, f.err = openHash(f.Bytes); f.err == nil {
				f.err = c.addHash(h)
			}
		case f.IsBytes(openenginev1.BlockStoredParentHashField):
			e.HasParent = true
			e.Parent, f.err = openHash(f.Bytes)
		case f.Number == openenginev1.BlockStoredTokenIDsField:
			c.tokens = appendUints(&f, openenginev1.BlockStoredTokenIDsField, c.tokens, maxTokens)
		case f.IsVarint(openenginev1.BlockStoredBlockSizeField):
			e.BlockSize = uint32(f.Value)
		case f.IsVarint(openenginev1.BlockStoredLoraIDField):
			e.LoRAID, e.HasLoRAID = int64(f.Value), f.Value != 0
		case f.IsBytes(openenginev1.BlockStoredLoraNameField):
			f.text(&e.LoRAName)
		case f.IsVarint(openenginev1.BlockStoredMediumField):
			e.Medium = openMedium(f.Value)
		case f.IsBytes(openenginev1.BlockStoredExtraKeysField):
			var tuple []string
			if tuple, f.err = c.openKey(f.Bytes); f.err == nil {
				f.err = c.countKeys(1) // an empty one takes memory too
			}
			keys = append(keys, tuple)
		case f.IsVarint(openenginev1.BlockStoredGroupIdxField):
			e.GroupIdx = int64(uint32(f.Value))
		case f.IsBytes(openenginev1.BlockStoredKvCacheSpecKindField):
			f.text(&e.SpecKind)
		case f.IsVarint(openenginev1.BlockStoredSlidingWindowField):
			window = uint32(f.Value)
		}
	}
	if f.err != nil {
		return f.err
	}
	e.BlockHashes, e.Tokens = c.hashes[hashes:len(c.hashes):len(c.hashes)], c.tokens[tokens:len(c.tokens):len(c.tokens)]
	if len(e.Tokens) == 0 {
		e.BlockSize = 0 // the contents are unknown
	}
	if e.GroupIdx != 0 && e.SpecKind == "" {
		// The engine publishes one group, which has no kind. Removes name it, too.
		e.SpecKind = "full_attention"
	}
	e.HasGroupIdx = e.SpecKind != ""
	if window != 0 {
		e.Rare = &wire.Rare{SlidingWindow: int64(window), HasSlidingWindow: true}
	}
	if len(keys) > 0 {
		e.Raw = openRaw(keys, len(e.BlockHashes))
	}
	return c.add(e)
}

// openRemoved adds a BlockRemoved. It names its attention group even if that is 0, since stores of that group may have said that it
// is not the main one.
func (c *converter) openRemoved(message []byte) error {
	e := wire.Event{Kind: wire.KindRemoved, HasGroupIdx: true}
	first := len(c.hashes)
	f := fields{rest: message}
	for f.next() {
		switch {
		case f.IsBytes(openenginev1.BlockRemovedBlockHashesField):
			var h uint64
			if h, f.err = openHash(f.Bytes); f.err == nil {
				f.err = c.addHash(h)
			}
		case f.IsVarint(openenginev1.BlockRemovedMediumField):
			e.Medium = openMedium(f.Value)
		case f.IsVarint(openenginev1.BlockRemovedGroupIdxField):
			e.GroupIdx = int64(uint32(f.Value))
		}
	}
	if f.err != nil {
		return f.err
	}
	e.BlockHashes = c.hashes[first:len(c.hashes):len(c.hashes)]
	return c.add(e)
}

// openHash returns a KvBlockHash as 64 bits. Numbers in decimal digits, as TensorRT-LLM sends them, keep their value. So do up to 8
// bytes, in big-endian order. Of a longer digest the last 8 bytes are taken, as vLLM does. Other values are hashed.
func openHash(message []byte) (uint64, error) {
	var value []byte
	var encoding string
	f := fields{rest: message}
	for f.next() {
		switch {
		case f.IsBytes(openenginev1.KvBlockHashValueField):
			value = f.Bytes
		case f.IsBytes(openenginev1.KvBlockHashEncodingField):
			f.text(&encoding)
		}
	}
	if f.err != nil {
		return 0, f.err
	}
	switch encoding {
	case "string", "decimal_int64":
		if n, err := strconv.ParseInt(string(value), 10, 64); err == nil {
			return uint64(n), nil
		}
		if n, err := strconv.ParseUint(string(value), 10, 64); err == nil {
			return n, nil
		}
	case "int64", "bytes":
		return hashOf(value), nil
	}
	return xxh3.Hash(value), nil
}

// hashOf returns the last 8 bytes of a digest, in big-endian order.
func hashOf(digest []byte) (n uint64) {
	for _, b := range digest[max(0, len(digest)-8):] {
		n = n<<8 | uint64(b)
	}
	return n
}

// openKey returns the values of an OpaqueKeyTuple.
func (c *converter) openKey(message []byte) (values []string, err error) {
	f := fields{rest: message}
	for f.next() {
		if !f.IsBytes(openenginev1.OpaqueKeyTupleValuesField) {
			continue
		}
		if err := c.countKeys(1); err != nil {
			return nil, err
		}
		values = append(values, "")
		f.text(&values[len(values)-1])
	}
	return values, f.err
}

// openRaw returns extra keys as the lists of vLLM's form: the multimodal inputs of TensorRT-LLM, which are tuples of a tag, the
// block's index, the hash of the input and its offset, or else a tuple of texts for each block.
func openRaw(keys [][]string, blocks int) *wire.Raw {
	const tag = "trt_mm_v1"
	lists := make([][][]byte, blocks)
	multimodal := false
	for i, tuple := range keys {
		if len(tuple) == 4 && tuple[0] == tag {
			block, err := strconv.ParseUint(tuple[1], 10, 32)
			hash, hashErr := strconv.ParseUint(tuple[2], 10, 64)
			if err == nil && hashErr == nil && block < uint64(blocks) {
				multimodal = true
				lists[block] = append(lists[block], msgp.AppendUint64(msgp.AppendArrayHeader(nil, 1), hash))
			}
			continue
		}
		for _, text := range tuple {
			if i < blocks {
				lists[i] = append(lists[i], msgp.AppendString(nil, text))
			}
		}
	}
	encoded := make([][]byte, blocks)
	for i, list := range lists {
		switch {
		case list == nil:
		case multimodal:
			encoded[i] = msgp.AppendArrayHeader(nil, 1) // a block's info has one list of inputs
			encoded[i] = appendLists(encoded[i], list)
		default:
			encoded[i] = appendLists(nil, list)
		}
	}
	if multimodal {
		return &wire.Raw{BlockMMInfos: appendLists(nil, encoded)}
	}
	return &wire.Raw{ExtraKeys: appendLists(nil, encoded)}
}
