// Package wire decodes and encodes the KV-cache events that LLM engines publish.
//
// In: the MessagePack payload of a ZeroMQ message. Out: a Batch of events, in memory that the Decoder reuses. Rules then drop the events
// that do not concern prefix reuse, and set tier, raw event id and tokens hashes of the others. The Encoder is the inverse of the Decoder
// for vLLM's form.
//
// Guarantee: the Decoder reads the forms of all known engines, and detects the form of the batch and of each event. Invalid input yields an
// Error for the batch or a Reason for the event, never a panic. Memory use is proportional to the payload's size.
//
// To add a field of events, declare it in Event (wire.go) and in the table fields (fields.go). If array events have the field, add its
// position to forms.go. rules.go has the rules that use fields.
//
// Package msgp writes MessagePack. The Decoder reads it itself: all values in value.go, keys in events.go, and lists of hashes and tokens
// in lists.go. With msgp for the values, decoding a batch of 16 blocks would be 10 % slower, and a batch of one block 38 % (array) or 52 %
// (map) slower.
//
// It has more than 15 files: Decoder, Encoder and Rules share the fields of Event that other packages do not need, and each form, cache and
// limit has a file.
package wire

import (
	"math"
	"strings"

	"github.com/kvcast/kvcast/internal/core/kvblock"
	kvcastv1 "github.com/kvcast/kvcast/proto/kvcast/v1"
)

// Batch is one decoded payload of an engine. The Batch and everything it points to, except
// strings, is the Decoder's memory, valid until the next Decode.
type Batch struct {
	// Time is the engine's time of the batch in seconds since the Unix epoch, valid if HasTime.
	Time    float64
	HasTime bool
	// Rank is the dp rank that the batch names, valid if HasRank.
	Rank    uint32
	HasRank bool
	// PublisherID identifies the engine's incarnation, in PublisherIDBytes bytes. It is a
	// view of the payload, or nil if the batch has no publisher id.
	PublisherID []byte
	// Form is how the batch itself was encoded. Each event may have either form.
	Form Form
	// Events are the valid events, in their order in the batch. A batch without events is a heartbeat.
	Events []Event
	// Skipped are the events that were left out, in their order in the batch.
	Skipped []Skip
	// GroupsOmitted reports whether the batch had events of other attention groups than the main group, or of parts of blocks.
	GroupsOmitted bool
	// Groups describes the attention groups of the rank after the batch; nil if a main group decides alone which prefixes are reused, or
	// if Rules do not follow other groups. It does not change.
	Groups *kvcastv1.Groups
	// Doubts are the tiers whose blocks may differ from the engine's because of events that Rules.Admit has left out or
	// does not understand.
	Doubts Doubts
	// UnknownTag is the first unknown tag of the events; cut to maxTagBytes.
	UnknownTag string
}

// maxTagBytes is the length of Batch.UnknownTag, in bytes.
const maxTagBytes = 64

const (
	// MaxEvents is how many events a batch may have. A decoded event takes many times the bytes of the smallest encoded one. The largest batches
	// of engines are those of SGLang with pages of one token, which have an event for each token: a step stores and evicts some 10,000 tokens.
	MaxEvents = 1 << 17
	// MaxBlocks is how many block hashes the events of a batch may have.
	MaxBlocks = 1 << 20
)

// PublisherIDBytes is the length of a publisher id.
const PublisherIDBytes = 16

// Skip is an event of a batch that was left out.
type Skip struct {
	// Index counts all events of the batch from 0.
	Index  int
	Reason Reason
}

// Event is one event of a batch.
//
// The fields are as in the payload, except for Tier, TokensHashes, ReplacesBlockSize, HashesOnly, Inputs, Group and RawID, which Rules.Admit sets.
// Admit also cuts BlockHashes and Tokens to whole blocks, and sets CacheSalt where an extra key holds it or the store continues a salted
// block.
type Event struct {
	// Index counts all events of the batch from 0, the skipped ones included.
	Index int

	// An Event must be small, because a payload may have an event in every 15 bytes. So the
	// small fields come first, and the fields that few events have are in Raw and Rare.

	Kind Kind
	// Tier is where the blocks are. It is 0 for a KindCleared that clears all tiers.
	Tier kvblock.Tier
	// HasParent, HasLoRAID and HasGroupIdx report whether the event has that field.
	HasParent   bool
	HasLoRAID   bool
	HasGroupIdx bool
	// OpaqueTokens reports whether the tokens included placeholders that are not token ids. Tokens is then empty.
	OpaqueTokens bool
	// Eagle reports whether the tokens were encoded as pairs: each block has one token more
	// than BlockSize, which is the first token of the next block.
	Eagle bool
	// ReplacesBlockSize reports whether a store has another block size than the learned
	// block size, and replaces it: earlier stores were of partial blocks.
	ReplacesBlockSize bool
	// HashesOnly reports whether a store names hashes without tokens. The content of its blocks is that of the blocks with
	// these hashes in other tiers.
	HashesOnly bool
	// Inputs is what a store says of the inputs of its blocks beside their tokens, adapter and cache salt.
	Inputs Inputs
	// Origin is how the engine came by a store's blocks.
	Origin Origin
	// Group is set in events of an attention group that Rules follow beside the main group, and in a store of a part of a block of
	// the main group: 1 + GroupIdx. Of the blocks, the hashes alone are known.
	Group uint8
	// BlockSize is the number of tokens in each of a store's blocks.
	BlockSize uint32

	// BlockHashes are the engine's 64-bit names of the blocks.
	BlockHashes []uint64
	// Parent is the hash of the block that a store's first block continues.
	Parent uint64
	// Tokens are a store's tokens, block after block.
	Tokens []uint32
	LoRAID int64
	// LoRAName, Medium and the other strings are empty where absent or nil. They are
	// valid UTF-8, except for a CacheSalt set by Admit: an extra key may hold any bytes.
	LoRAName  string
	Medium    string
	SpecKind  string
	CacheSalt string
	GroupIdx  int64
	// Raw and Rare are nil where the event has none of their fields.
	Raw  *Raw
	Rare *Rare

	// TokensHashes identify the contents of the blocks: one hash for each block, or none if the contents are unknown.
	TokensHashes []uint64
	// RawID is the raw event id. It counts the events of the source from 1, except for ignored events. Dropped events are counted as well,
	// so that admitted events may have gaps between them. The count stops at MaxRawID.
	RawID uint64
}

// Raw are the fields of a store that are kept encoded: each is a well-formed MessagePack
// list, and nil if it is absent or nil. They are views of the payload.
type Raw struct {
	ExtraKeys    []byte
	BlockMMInfos []byte
	MMKeys       []byte
}

// Rare are fields that few producers send.
type Rare struct {
	Locality  string
	Ownership string
	// Note is the session id of a store, or why the blocks of a remove are gone, by the engine.
	Note      string
	ModelName string
	// RemainingCopies are the numbers of copies that the engine still has of each of a
	// remove's blocks: as long as BlockHashes, or nil if they are unknown.
	RemainingCopies []uint32
	// Time is the event's own time in seconds since the Unix epoch.
	Time float64
	// SlidingWindow is the window of the attention group, in tokens.
	SlidingWindow    int64
	HasTime          bool
	HasSlidingWindow bool
	// HasObjectKey reports whether the event names an object of a store.
	HasObjectKey bool
}

func (r *Rare) empty() bool {
	return r.Locality == "" && r.Ownership == "" && r.Note == "" && r.ModelName == "" &&
		r.RemainingCopies == nil && !r.HasTime && !r.HasSlidingWindow && !r.HasObjectKey
}

var (
	noRaw  Raw
	noRare Rare
)

// raw returns ev.Raw, or an empty Raw if ev.Raw is nil. The caller must not change it.
func (ev *Event) raw() *Raw {
	if ev.Raw == nil {
		return &noRaw
	}
	return ev.Raw
}

// rare returns ev.Rare, or an empty Rare if ev.Rare is nil. The caller must not change it.
func (ev *Event) rare() *Rare {
	if ev.Rare == nil {
		return &noRare
	}
	return ev.Rare
}

// objectKeyOnly reports whether an event names an object of a store, and no block. Mooncake's master has published such events
// since version 0.3.14. Which blocks they are of cannot be read from the keys: each connector makes its own, and a key may name a
// part of a block.
func (ev *Event) objectKeyOnly() bool { return len(ev.BlockHashes) == 0 && ev.rare().HasObjectKey }

// hashOnly reports whether a store has block hashes without tokens. Some engines send the block size nevertheless.
func (ev *Event) hashOnly() bool {
	return len(ev.Tokens) == 0 && !ev.OpaqueTokens
}

// MaxRawID is the largest raw event id. It can still be incremented.
const MaxRawID = math.MaxUint64 - 1

// Kind is the kind of an event.
type Kind uint8

// The kinds of events.
const (
	KindStored Kind = iota + 1
	KindRemoved
	KindCleared
)

// Origin is how an engine came by the blocks of a store. It decides whether the store adds a copy of a block that is already stored.
type Origin uint8

// The origins.
const (
	// OriginUnknown is a store without an origin, or with an unknown origin.
	OriginUnknown Origin = iota
	// OriginNew is a store of blocks that the engine has just computed.
	OriginNew
	// OriginReused is a store that announces blocks which the engine already had.
	OriginReused
)

// originNames are the origins as engines write them.
var originNames = [...]string{OriginUnknown: "UNKNOWN", OriginNew: "NEW", OriginReused: "REUSED"}

// originOf returns the origin with a name. Any other value is OriginUnknown.
func originOf(name value) Origin {
	for o, s := range originNames {
		if name.class == classStr && string(name.bytes) == s {
			return Origin(o)
		}
	}
	return OriginUnknown
}

// Inputs are the inputs of a store's blocks beside their tokens, adapter and cache salt, such as images.
type Inputs uint8

// The inputs.
const (
	// InputsNone is a store of blocks without any.
	InputsNone Inputs = iota
	// InputsSent is a store of which some blocks have some, which it contains.
	InputsSent
	// InputsNotSent is a store of copies by a connector that does not send them: the blocks may have some.
	InputsNotSent
	// InputsWithoutField is a store that is an array which ends before the extra keys. Admit replaces it.
	InputsWithoutField
)

// Form is how a batch or an event is encoded.
type Form uint8

// The forms.
const (
	FormArray Form = iota + 1
	FormMap
)

// tierMedia are the media of each tier.
var tierMedia = [kvblock.TierEnd][]string{
	kvblock.TierDevice:     {"GPU", "DEVICE"},
	kvblock.TierHostPinned: {"CPU", "CPU_PINNED", "CPU_TIER1"},
	kvblock.TierDisk:       {"CPU_TIER2", "DISK", "NVME", "STORAGE", "FS", "OBJ"},
	kvblock.TierExternal:   {"EXTERNAL", "NETWORK", "REMOTE", "SHARED", "SHARED_STORAGE"},
}

// tierOf returns the tier of a medium, in any case, and whether the medium is known.
func tierOf(medium string) (kvblock.Tier, bool) {
	if medium == "" || medium == "GPU" {
		return kvblock.TierDevice, true
	}
	for tier := kvblock.TierDevice; tier < kvblock.TierEnd; tier++ {
		for _, name := range tierMedia[tier] {
			// EqualFold also folds letters that are not ASCII. They change the length.
			if len(name) == len(medium) && strings.EqualFold(name, medium) {
				return tier, true
			}
		}
	}
	return 0, false
}

// Error is why a whole batch is rejected. Compare it with errors.Is.
type Error uint8

// The reasons to reject a batch.
const (
	// ErrTruncated is a value that runs past the end of the payload.
	ErrTruncated Error = iota + 1
	// ErrBadBatchShape is a payload that is not a batch.
	ErrBadBatchShape
	// ErrBadTS is a batch time that is not finite.
	ErrBadTS
	// ErrTrailingBytes is a payload that continues after the batch.
	ErrTrailingBytes
	// ErrBadCode is 0xc1, which MessagePack never uses.
	ErrBadCode
	// ErrOversize is a length prefix larger than the whole payload.
	ErrOversize
	// ErrDepth is nesting beyond 16 arrays and maps.
	ErrDepth
	// ErrTooManyEvents is a batch of more than MaxEvents events.
	ErrTooManyEvents
	// ErrTooManyBlocks is a batch whose events name more than MaxBlocks blocks.
	ErrTooManyBlocks
)

var errorNames = [...]string{
	"unknown", "truncated", "bad_batch_shape", "bad_ts", "trailing_bytes", "bad_code", "oversize", "depth",
	"too_many_events", "too_many_blocks",
}

// Name returns the error's metric label.
func (e Error) Name() string { return errorNames[e] }

// Error describes the error.
func (e Error) Error() string { return "decode batch: " + e.Name() }

// Reason is why an event is left out of a batch, or what is unknown of it.
type Reason uint8

// The reasons. Events with a reason up to ReasonNonMainAttentionGroup are ignored: they
// have no raw event id. Events with one of the other reasons have one.
const (
	ReasonNone Reason = iota
	ReasonUnknownTag
	ReasonUnknownMedium
	ReasonNonLocalLocality
	ReasonUnsupportedOwnership
	ReasonNonMainAttentionGroup

	ReasonBadEventShape
	ReasonBadTag
	ReasonMissingField
	ReasonBadType
	ReasonBadUTF8

	ReasonBlockSizeMismatch
	ReasonTokensShort
	ReasonRepeatedHash
	// ReasonNameTooLong is a store whose LoRA name or cache salt is longer than
	// 1,024 bytes: every router event made from the store would have it.
	ReasonNameTooLong
	// ReasonUnknownContent is a store that is not left out, of blocks whose content cannot be told: its adapter has no
	// name, its tokens are no token ids, or its extra keys or cache salt are ambiguous.
	ReasonUnknownContent
	// ReasonPartialBlock is a store of a part of a block, of an engine with several attention groups.
	ReasonPartialBlock
	// ReasonObjectKey is an event that names an object of a store, and no block.
	ReasonObjectKey
	// ReasonChunks is a store that is not left out, of chunks of several blocks below device memory.
	ReasonChunks
	// ReasonNoExtraKeys is a store that is not left out, in a form that cannot tell the cache salt and other inputs of the engine.
	ReasonNoExtraKeys
	// ReasonNoRemoves is a store by a connector that sends no removes. It is not left out, but if it is in files on another machine, of a worker without pools.
	ReasonNoRemoves

	NumReasons = iota
)

// Ignored reports whether an event with this reason has no raw event id.
func (r Reason) Ignored() bool {
	return r >= ReasonUnknownTag && r <= ReasonNonMainAttentionGroup
}

// Counts are numbers of events, by reason.
type Counts [NumReasons]uint64
