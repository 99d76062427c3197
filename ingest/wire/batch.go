package wire

import "math"

// Batch is one payload of an engine, decoded. It and everything it points to
// but strings are the Decoder's memory, and good until its next Decode.
type Batch struct {
	// Time is the engine's time of the batch in seconds since the Unix epoch;
	// HasTime tells whether there was one.
	Time    float64
	HasTime bool
	// Rank is the dp rank the batch names; HasRank tells whether it named one.
	Rank    uint32
	HasRank bool
	// PublisherID names the run of the engine that published the batch, in
	// PublisherIDBytes bytes, and is nil where the batch names none. It is a view of
	// the payload.
	PublisherID []byte
	// Form is how the batch itself was encoded; its events may be of either
	// form.
	Form Form
	// Events are those that decode, in their order in the batch. A batch without
	// events is a heartbeat.
	Events []Event
	// Skipped are the others, in their order in the batch.
	Skipped []Skip
}

// PublisherIDBytes is the length of a publisher id.
const PublisherIDBytes = 16

// Skip is an event of a batch that was left out.
type Skip struct {
	// Index counts all events of the batch from 0.
	Index int
	// Reason is why.
	Reason Reason
}

// Event is one event of a batch.
//
// The fields are as they stood in the payload, except for Tier, TokensHashes,
// ReplacesBlockSize and RawID, which Rules.Admit sets. It also cuts BlockHashes and Tokens to whole
// blocks, and sets CacheSalt where an extra key held it or the store continues a
// salted block.
type Event struct {
	// Index counts all events of the batch from 0, the skipped ones included.
	Index int

	// A batch may have very many events, of 15 bytes each. So the small fields stand
	// together, and those that few events have apart.

	Kind Kind
	// Tier is where the blocks lie; 0 for KindCleared, which is about all tiers.
	Tier Tier
	// HasParent and the like tell whether the event holds the field.
	HasParent   bool
	HasLoRAID   bool
	HasGroupIdx bool
	// OpaqueTokens tells that the tokens held placeholders that are no token
	// ids, so that Tokens is empty though there were some.
	OpaqueTokens bool
	// Eagle tells that tokens came as pairs, each block one token wider than its
	// stride.
	Eagle bool
	// ReplacesBlockSize tells that a store has another block size than the one that was
	// learned, and is right: what was stored before it was partial blocks.
	ReplacesBlockSize bool
	// Origin tells whether a store's blocks are new to the engine.
	Origin    Origin
	BlockSize uint32

	// BlockHashes are the engine's 64-bit names of the blocks.
	BlockHashes []uint64
	// Parent is the block that a store's first one continues.
	Parent uint64
	// Tokens are a store's tokens, those of one block after those of another.
	Tokens []uint32
	LoRAID int64
	// LoRAName, Medium and the other strings are empty where absent or nil. They
	// are valid UTF-8, but for a CacheSalt that Admit sets: an extra key may hold
	// any bytes.
	LoRAName  string
	Medium    string
	SpecKind  string
	CacheSalt string
	GroupIdx  int64
	// Raw and Rare are nil where the event has none of their fields.
	Raw  *Raw
	Rare *Rare

	// TokensHashes are the contents of the blocks: as long as BlockHashes, or
	// empty where they are unknown.
	TokensHashes []uint64
	// RawID is the event's number among those of its source that were not
	// ignored, contiguous from 1; events that were dropped leave holes. It never
	// falls: at MaxRawID it stays.
	RawID uint64
}

// Raw are the fields of a store that are kept as they stood in the payload: each a
// well-formed MessagePack list, nil where absent or nil.
type Raw struct {
	ExtraKeys    []byte
	BlockMMInfos []byte
	MMKeys       []byte
}

// Rare are fields that few producers send.
type Rare struct {
	Locality  string
	Ownership string
	SessionID string
	ModelName string
	// RemainingCopies are how many copies of each of a remove's blocks the engine
	// still holds: as many as BlockHashes, or nil where they are unknown.
	RemainingCopies []uint32
	// Time is the event's own time in seconds since the Unix epoch.
	Time float64
	// SlidingWindow is the window of the attention group, in tokens.
	SlidingWindow    int64
	HasTime          bool
	HasSlidingWindow bool
}

// empty reports whether the event had none of the fields.
func (r *Rare) empty() bool {
	return r.Locality == "" && r.Ownership == "" && r.SessionID == "" && r.ModelName == "" &&
		r.RemainingCopies == nil && !r.HasTime && !r.HasSlidingWindow
}

var (
	noRaw  Raw
	noRare Rare
)

// raw returns the raw fields, to be read.
func (ev *Event) raw() *Raw {
	if ev.Raw == nil {
		return &noRaw
	}
	return ev.Raw
}

// rare returns the rare fields, to be read.
func (ev *Event) rare() *Rare {
	if ev.Rare == nil {
		return &noRare
	}
	return ev.Rare
}

// MaxRawID is the largest raw event id. Another can be added to it.
const MaxRawID = math.MaxUint64 - 1

// Kind is what an event says.
type Kind uint8

// The kinds of events.
const (
	KindStored Kind = iota + 1
	KindRemoved
	KindCleared
)

// Origin is how an engine came by the blocks of a store. It decides whether the
// store adds a copy of a block that is held already.
type Origin uint8

// The origins.
const (
	// OriginUnknown is a store that does not say, or says what is not known here.
	OriginUnknown Origin = iota
	// OriginNew is a store of blocks that the engine has just filled.
	OriginNew
	// OriginReused is a store that announces blocks which the engine held before.
	OriginReused
)

// String returns the origin's name, as engines write it.
func (o Origin) String() string {
	switch o {
	case OriginNew:
		return "NEW"
	case OriginReused:
		return "REUSED"
	default:
		return "UNKNOWN"
	}
}

// originOf returns the origin that engines call so.
func originOf(name []byte) Origin {
	switch string(name) {
	case "NEW":
		return OriginNew
	case "REUSED":
		return OriginReused
	default:
		return OriginUnknown
	}
}

// Form is how a batch or an event was encoded.
type Form uint8

// The forms.
const (
	FormArray Form = iota + 1
	FormMap
)

// Tier is where a block lies in the engine's memory hierarchy. The values are
// those of kvcast.v1.Tier.
type Tier uint8

// The tiers, nearest first.
const (
	TierDevice Tier = iota + 1
	TierHostPinned
	TierDisk
	TierExternal

	// NumTiers is one more than the largest tier, for arrays indexed by tier.
	NumTiers = iota + 1
)

// Reason is why an event was left out.
type Reason uint8

// The reasons. Those up to ReasonNonMainAttentionGroup mean that the event is
// none of ours: it is ignored, and uses up no raw event id. The others mean
// that something is wrong with it: it uses one.
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
	// 1,024 bytes: each event made of the store would carry it.
	ReasonNameTooLong

	NumReasons = iota
)

var reasonNames = [NumReasons]string{
	ReasonNone:                  "none",
	ReasonUnknownTag:            "unknown_tag",
	ReasonUnknownMedium:         "unknown_medium",
	ReasonNonLocalLocality:      "non_local_locality",
	ReasonUnsupportedOwnership:  "unsupported_ownership",
	ReasonNonMainAttentionGroup: "non_main_attention_group",
	ReasonBadEventShape:         "bad_event_shape",
	ReasonBadTag:                "bad_tag",
	ReasonMissingField:          "missing_field",
	ReasonBadType:               "bad_type",
	ReasonBadUTF8:               "bad_utf8",
	ReasonBlockSizeMismatch:     "block_size_mismatch",
	ReasonTokensShort:           "tokens_short",
	ReasonRepeatedHash:          "repeated_hash",
	ReasonNameTooLong:           "name_too_long",
}

// String returns the reason's name, as metrics label it.
func (r Reason) String() string { return reasonNames[r] }

// Ignored tells whether an event left out for this reason uses up no raw event
// id.
func (r Reason) Ignored() bool {
	return r >= ReasonUnknownTag && r <= ReasonNonMainAttentionGroup
}
