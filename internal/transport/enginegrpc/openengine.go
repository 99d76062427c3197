package enginegrpc

import (
	"fmt"
	"strconv"

	"github.com/tinylib/msgp/msgp"
	"github.com/zeebo/xxh3"
	"google.golang.org/protobuf/encoding/protowire"

	"github.com/kvcast/kvcast/internal/wire"
)

// openEngine is the protocol of the package openengine.v1, as of July 2026. Its service was named OpenEngine before.
var openEngine = protocol{
	methods:       []string{"/openengine.v1.Control/SubscribeKvEvents", "/openengine.v1.OpenEngine/SubscribeKvEvents"},
	appendRequest: appendOpenRequest,
	read:          readOpen,
	event:         (*converter).openEvent,
}

// Field numbers of openengine.v1, by message.
const (
	openRequestRanks, openRequestSnapshot, openRequestStart = 1, 2, 3

	openResponseBatch, openResponseError = 1, 2

	openErrorCode, openErrorMessage = 1, 2

	openBatchSeq, openBatchTime, openBatchRank, openBatchEvents = 1, 2, 3, 4

	openEventStored, openEventRemoved, openEventCleared = 10, 11, 12

	openStoredHashes, openStoredParent, openStoredTokens, openStoredSize = 1, 2, 3, 4
	openStoredLoRAID, openStoredLoRA, openStoredMedium, openStoredKeys   = 5, 6, 7, 20
	openStoredGroup, openStoredKind, openStoredWindow                    = 21, 22, 23

	openRemovedHashes, openRemovedMedium, openRemovedGroup = 1, 2, 3

	openHashValue, openHashEncoding = 1, 2

	openKeyValues = 1
)

// appendOpenRequest appends a SubscribeKvEventsRequest. The schema does not say whether a server begins at the seq that it has, or
// after it, and no server announces whether it has snapshots: the seq is the one before the first wanted, and no snapshot is requested.
func appendOpenRequest(b []byte, rank uint32, from uint64) []byte {
	b = protowire.AppendTag(b, openRequestRanks, protowire.BytesType)
	b = protowire.AppendBytes(b, protowire.AppendVarint(nil, uint64(rank)))
	if from > 0 {
		b = protowire.AppendVarint(protowire.AppendTag(b, openRequestStart, protowire.VarintType), from-1)
	}
	return b
}

// readOpen reads a SubscribeKvEventsResponse.
func readOpen(response []byte) (h header, err error) {
	h.ignored = true
	f := fields{rest: response}
	for f.next() {
		switch {
		case f.bytes(openResponseBatch):
			h, f.err = readOpenBatch(f.data)
		case f.bytes(openResponseError):
			h, f.err = readOpenError(f.data)
		}
	}
	return h, f.err
}

func readOpenBatch(message []byte) (h header, err error) {
	f := fields{rest: message}
	for f.next() {
		switch {
		case f.varint(openBatchSeq):
			h.seq = f.n
		case f.varint(openBatchTime):
			h.time = float64(f.n) / 1e9
		case f.varint(openBatchRank):
			h.rank = uint32(f.n)
		case f.bytes(openBatchEvents) && len(h.events) <= maxEvents:
			h.events = append(h.events, f.data)
		}
	}
	return h, f.err
}

// readOpenError reads an EngineError, which ends the call.
func readOpenError(message []byte) (h header, err error) {
	var code uint64
	var text string
	f := fields{rest: message}
	for f.next() {
		switch {
		case f.varint(openErrorCode):
			code = f.n
		case f.bytes(openErrorMessage):
			f.text(&text)
		}
	}
	const invalidArgument, unsupportedFeature = 1, 2
	h.cannotResume = code == invalidArgument || code == unsupportedFeature
	h.ended = fmt.Errorf("the engine ended the call: error code %d: %.256s", code, text)
	return h, f.err
}

// openEvent adds a KvEvent.
func (c *converter) openEvent(event []byte) error {
	f := fields{rest: event}
	for f.next() {
		switch {
		case f.bytes(openEventStored):
			f.err = c.openStored(f.data)
		case f.bytes(openEventRemoved):
			f.err = c.openRemoved(f.data)
		case f.bytes(openEventCleared):
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
		case f.bytes(openStoredHashes):
			var h uint64
			if h, f.err = openHash(f.data); f.err == nil {
				f.err = c.addHash(h)
			}
		case f.bytes(openStoredParent):
			e.HasParent = true
			e.Parent, f.err = openHash(f.data)
		case f.number == openStoredTokens:
			c.tokens = appendUints(&f, openStoredTokens, c.tokens, maxTokens)
		case f.varint(openStoredSize):
			e.BlockSize = uint32(f.n)
		case f.varint(openStoredLoRAID):
			e.LoRAID, e.HasLoRAID = int64(f.n), f.n != 0
		case f.bytes(openStoredLoRA):
			f.text(&e.LoRAName)
		case f.varint(openStoredMedium):
			e.Medium = openMedium(f.n)
		case f.bytes(openStoredKeys):
			var tuple []string
			if tuple, f.err = c.openKey(f.data); f.err == nil {
				f.err = c.countKeys(1) // an empty one takes memory too
			}
			keys = append(keys, tuple)
		case f.varint(openStoredGroup):
			e.GroupIdx = int64(uint32(f.n))
		case f.bytes(openStoredKind):
			f.text(&e.SpecKind)
		case f.varint(openStoredWindow):
			window = uint32(f.n)
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
		case f.bytes(openRemovedHashes):
			var h uint64
			if h, f.err = openHash(f.data); f.err == nil {
				f.err = c.addHash(h)
			}
		case f.varint(openRemovedMedium):
			e.Medium = openMedium(f.n)
		case f.varint(openRemovedGroup):
			e.GroupIdx = int64(uint32(f.n))
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
		case f.bytes(openHashValue):
			value = f.data
		case f.bytes(openHashEncoding):
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
		var n uint64
		for _, b := range value[max(0, len(value)-8):] {
			n = n<<8 | uint64(b)
		}
		return n, nil
	}
	return xxh3.Hash(value), nil
}

// openKey returns the values of an OpaqueKeyTuple.
func (c *converter) openKey(message []byte) (values []string, err error) {
	f := fields{rest: message}
	for f.next() {
		if !f.bytes(openKeyValues) {
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
