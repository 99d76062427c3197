package wire

import "github.com/kvcast/kvcast/internal/core/kvblock"

// Effect is how an event that is left out, or whose content is unknown, concerns the trust in the blocks of its rank.
type Effect uint8

// The effects.
const (
	// EffectNone: the blocks are the engine's nevertheless.
	EffectNone Effect = iota
	// EffectUpperBound: other attention groups decide as well which prefix the engine reuses; see Batch.GroupsOmitted.
	EffectUpperBound
	// EffectSkipped: blocks may be missing, and the known ones may be gone.
	EffectSkipped
	// EffectBlockSize: blocks of another size are missing.
	EffectBlockSize
	// EffectUnknownContent: the engine may reuse blocks that no tokens match.
	EffectUnknownContent
	// EffectConnector: a connector keeps the blocks of the tier, and may not tell which it removes.
	EffectConnector
)

// reasons are the rows of the table of all that Decoder and Rules leave out, or do not understand. Nothing is left out
// without a row.
var reasons = [NumReasons]struct {
	name   string // metric label
	effect Effect
	tiers  kvblock.Tiers // that the effect concerns; 0: the event's tier
}{
	ReasonNone:                  {"none", EffectNone, 0},
	ReasonUnknownTag:            {"unknown_tag", EffectSkipped, kvblock.AllTiers},
	ReasonUnknownMedium:         {"unknown_medium", EffectSkipped, kvblock.LowerTiers},
	ReasonNonLocalLocality:      {"non_local_locality", EffectNone, 0},
	ReasonUnsupportedOwnership:  {"unsupported_ownership", EffectSkipped, 0},
	ReasonNonMainAttentionGroup: {"non_main_attention_group", EffectUpperBound, 0},
	ReasonBadEventShape:         {"bad_event_shape", EffectSkipped, kvblock.AllTiers},
	ReasonBadTag:                {"bad_tag", EffectSkipped, kvblock.AllTiers},
	ReasonMissingField:          {"missing_field", EffectSkipped, kvblock.AllTiers},
	ReasonBadType:               {"bad_type", EffectSkipped, kvblock.AllTiers},
	ReasonBadUTF8:               {"bad_utf8", EffectSkipped, kvblock.AllTiers},
	ReasonBlockSizeMismatch:     {"block_size_mismatch", EffectBlockSize, 0},
	ReasonTokensShort:           {"tokens_short", EffectSkipped, 0},
	ReasonRepeatedHash:          {"repeated_hash", EffectSkipped, 0},
	ReasonNameTooLong:           {"name_too_long", EffectSkipped, 0},
	ReasonUnknownContent:        {"unknown_content", EffectUnknownContent, 0},
	ReasonPartialBlock:          {"partial_block", EffectUpperBound, 0},
	ReasonObjectKey:             {"object_key_only", EffectSkipped, 0},
	ReasonChunks:                {"chunks", EffectConnector, 0},
	ReasonNoExtraKeys:           {"no_extra_keys", EffectSkipped, 0},
}

// String returns the reason's metric label.
func (r Reason) String() string { return reasons[r].name }

// Effect returns what the reason means for the trust in the rank's blocks, in the tiers of Doubts.
func (r Reason) Effect() Effect { return reasons[r].effect }

// Doubts are the tiers of a rank whose blocks may differ from the engine's after a batch, by reason.
type Doubts [NumReasons]kvblock.Tiers

// doubt counts an event that is left out, or whose content is unknown, and records which blocks may differ for it. tier is
// the event's; 0 if it has none.
func (r *Rules) doubt(reason Reason, tier kvblock.Tier, counts *Counts) {
	counts[reason]++
	row := &reasons[reason]
	if row.effect < EffectSkipped {
		return
	}
	tiers := row.tiers
	if tiers == 0 {
		tiers = 1 << tier
	}
	if tier == 0 && row.tiers == 0 {
		tiers = kvblock.AllTiers
	}
	r.doubts[reason] |= tiers
	r.hasDoubts = true
}

// resolve forgets the doubts about tiers that are cleared.
func (r *Rules) resolve(tiers kvblock.Tiers) {
	for reason := range r.doubts {
		r.doubts[reason] &^= tiers
	}
}
