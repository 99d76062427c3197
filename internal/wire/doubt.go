package wire

import (
	"github.com/kvcast/kvcast/internal/core/kvblock"
	kvcastv1 "github.com/kvcast/kvcast/proto/kvcast/v1"
)

// reasons are the rows of the table of all that Decoder and Rules leave out, or do not understand. Nothing is left out without a row.
//
// An event without a gap leaves the blocks the engine's. Of those that Batch.GroupsOmitted reports, other attention groups decide as well
// which prefix the engine reuses.
var reasons = [NumReasons]struct {
	name  string // metric label
	gap   kvcastv1.Gap_Reason
	tiers kvblock.Tiers // that the gap concerns; 0: the event's tier
}{
	ReasonNone:                  {"none", 0, 0},
	ReasonUnknownTag:            {"unknown_tag", kvcastv1.Gap_REASON_EVENTS_SKIPPED, kvblock.AllTiers},
	ReasonUnknownMedium:         {"unknown_medium", kvcastv1.Gap_REASON_EVENTS_SKIPPED, kvblock.LowerTiers},
	ReasonNonLocalLocality:      {"non_local_locality", 0, 0},
	ReasonUnsupportedOwnership:  {"unsupported_ownership", kvcastv1.Gap_REASON_EVENTS_SKIPPED, 0},
	ReasonNonMainAttentionGroup: {"non_main_attention_group", 0, 0},
	ReasonBadEventShape:         {"bad_event_shape", kvcastv1.Gap_REASON_EVENTS_SKIPPED, kvblock.AllTiers},
	ReasonBadTag:                {"bad_tag", kvcastv1.Gap_REASON_EVENTS_SKIPPED, kvblock.AllTiers},
	ReasonMissingField:          {"missing_field", kvcastv1.Gap_REASON_EVENTS_SKIPPED, kvblock.AllTiers},
	ReasonBadType:               {"bad_type", kvcastv1.Gap_REASON_EVENTS_SKIPPED, kvblock.AllTiers},
	ReasonBadUTF8:               {"bad_utf8", kvcastv1.Gap_REASON_EVENTS_SKIPPED, kvblock.AllTiers},
	ReasonBlockSizeMismatch:     {"block_size_mismatch", kvcastv1.Gap_REASON_BLOCK_SIZE_MISMATCH, 0},
	ReasonTokensShort:           {"tokens_short", kvcastv1.Gap_REASON_EVENTS_SKIPPED, 0},
	ReasonRepeatedHash:          {"repeated_hash", kvcastv1.Gap_REASON_EVENTS_SKIPPED, 0},
	ReasonNameTooLong:           {"name_too_long", kvcastv1.Gap_REASON_EVENTS_SKIPPED, 0},
	ReasonUnknownContent:        {"unknown_content", kvcastv1.Gap_REASON_UNKNOWN_CONTENT, 0},
	ReasonPartialBlock:          {"partial_block", 0, 0},
	ReasonObjectKey:             {"object_key_only", kvcastv1.Gap_REASON_EVENTS_SKIPPED, 0},
	ReasonChunks:                {"chunks", kvcastv1.Gap_REASON_CONNECTOR_TIER, 0},
	ReasonNoExtraKeys:           {"no_extra_keys", kvcastv1.Gap_REASON_EVENTS_SKIPPED, 0},
	ReasonNoRemoves:             {"no_removes", kvcastv1.Gap_REASON_CONNECTOR_TIER, 0},
}

// String returns the reason's metric label.
func (r Reason) String() string { return reasons[r].name }

// Gap returns why the rank's blocks may differ from the engine's, in the tiers of Doubts; 0: they do not.
func (r Reason) Gap() kvcastv1.Gap_Reason { return reasons[r].gap }

// Doubts are the tiers of a rank whose blocks may differ from the engine's after a batch, by reason.
type Doubts [NumReasons]kvblock.Tiers

// doubt counts an event that is left out, or whose content is unknown, and records which blocks may differ for it. tier is
// the event's; 0 if it has none.
func (r *Rules) doubt(reason Reason, tier kvblock.Tier, counts *Counts) {
	counts[reason]++
	row := &reasons[reason]
	if row.gap == 0 {
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
}

// resolve forgets the doubts about tiers that are cleared.
func (r *Rules) resolve(tiers kvblock.Tiers) {
	for reason := range r.doubts {
		r.doubts[reason] &^= tiers
	}
}
