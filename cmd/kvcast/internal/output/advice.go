package output

import (
	"cmp"
	"fmt"
	"slices"
	"strings"
	"time"

	kvcastv1 "github.com/kvcast/kvcast/proto/kvcast/v1"
)

const (
	sourceDown        = kvcastv1.DegradedReason_DEGRADED_REASON_SOURCE_DOWN
	eventsSkipped     = kvcastv1.DegradedReason_DEGRADED_REASON_EVENTS_SKIPPED
	blockSizeMismatch = kvcastv1.DegradedReason_DEGRADED_REASON_BLOCK_SIZE_MISMATCH
	unknownContent    = kvcastv1.DegradedReason_DEGRADED_REASON_UNKNOWN_CONTENT
	replayForeign     = kvcastv1.DegradedReason_DEGRADED_REASON_REPLAY_FOREIGN
	stale             = kvcastv1.DegradedReason_DEGRADED_REASON_STALE
	overpredicted     = kvcastv1.DegradedReason_DEGRADED_REASON_OVERPREDICTED
)

// advice says what each reason means for the blocks of a rank, and after the semicolon what to do. docs/troubleshooting.md has more.
var advice = map[kvcastv1.DegradedReason]string{
	kvcastv1.DegradedReason_DEGRADED_REASON_JOINED_LATE:      "blocks from before the first batch read are missing; give the engine a replay socket and kvcast its endpoint (replay), raise buffer_steps, or reset the engine's prefix cache",
	kvcastv1.DegradedReason_DEGRADED_REASON_GAP:              "batches were lost: blocks may be missing or gone; give the engine a replay socket or raise buffer_steps, then reset its prefix cache",
	kvcastv1.DegradedReason_DEGRADED_REASON_POSSIBLE_RESTART: "the engine may have restarted unnoticed: all blocks may be gone; give it a replay socket, then reset its prefix cache",
	kvcastv1.DegradedReason_DEGRADED_REASON_CONFLICT:         "two publishers use one topic and rank, and their blocks are mixed; give each its own topic or rank",
	sourceDown: "changes since then are unknown; start the engine, or check connect and the network",
	kvcastv1.DegradedReason_DEGRADED_REASON_BLOCKS_OMITTED: "the engine has more blocks, adapters or salts than the limits; raise the limit that the log names (ingest.max_blocks_per_rank, max_blocks, max_attribute_bytes)",
	kvcastv1.DegradedReason_DEGRADED_REASON_SHARED_TIER:    "a source was cleared in a tier that it shares: blocks may be gone; set consolidate: dedup",
	eventsSkipped:     "events were not understood: blocks may be missing or gone; check the engine's version and its events (kvcast decode), then reset its prefix cache",
	blockSizeMismatch: "blocks of another size are skipped; set the worker's block_size to the engine's, or remove it, then reset the engine's prefix cache",
	unknownContent:    "no prompt matches blocks whose content is unknown; let the engine name its LoRA adapters, or report its events (kvcast decode)",
	kvcastv1.DegradedReason_DEGRADED_REASON_TIER_NOT_CLEARED: "the engine cleared its device memory, and perhaps this tier; rely on the device, or set clear: all if the engine clears all tiers",
	kvcastv1.DegradedReason_DEGRADED_REASON_REPLAY_UNPROVED:  "the engine has published nothing since its replay was read, so that the replay socket may be another engine's; send it a request",
	replayForeign: "the replay socket belongs to another engine: blocks are missing; set the worker's replay to that of its own engine",
	kvcastv1.DegradedReason_DEGRADED_REASON_COPIES_UNSURE:  "the engine announces blocks that it reuses (kv_cache_report_mode full), so that copies cannot be counted: blocks may be missing; use report mode incremental",
	kvcastv1.DegradedReason_DEGRADED_REASON_CONNECTOR_TIER: "a connector keeps blocks in this tier, and may not tell all of their content, or which it removes; rely on the device",
	kvcastv1.DegradedReason_DEGRADED_REASON_RELAYED:        "a relay (smg://) leaves events out without telling: blocks may be missing or gone; read the engine's own ZeroMQ publisher instead",
	overpredicted: "routers report that the engine reuses less than its events tell; see whether they predict without the prompt's last token, and the engine's options for EAGLE, connectors and caches",
	stale:         "the blocks may have changed since; check that a server reads the worker (kvcast status), and that the journal accepts entries",
}

// laterReason is the advice for a reason of a later version.
const laterReason = "blocks may be missing or gone; see the documentation of the server's version"

// Notes returns a line for each reason for which a dp rank is degraded, and for each source that is not live or whose replay
// socket does not answer, with what to do.
func Notes(workers []*kvcastv1.WorkerStatus) (lines []string) {
	for _, w := range workers {
		for _, r := range Ranks(w) {
			add := func(format string, args ...any) {
				lines = append(lines, fmt.Sprintf("%s rank %d: ", Printable(w.GetName()), r.GetDpRank())+fmt.Sprintf(format, args...))
			}
			detail, hasDetail := Printable(r.GetDetail()), detailReason(r)
			for _, reason := range r.GetReasons() {
				text := cmp.Or(advice[reason], laterReason)
				if down := downEndpoints(w, r); reason == sourceDown && down != "" {
					text = "no connection to " + down + ": " + text
				}
				if reason == hasDetail {
					text = detail + ": " + text
				}
				if why := Printable(r.GetAccuracy().GetDetail()); reason == overpredicted && why != "" {
					text = why + ": " + text
				}
				add("%s%s: %s", ReasonName(reason, r.GetDownNano(), r.GetAgeNano()), tiersOf(r, reason), text)
			}
			if detail != "" && hasDetail == 0 {
				add("the last detail: %s", detail)
			}
			for _, s := range RankSources(w, r.GetDpRank()) {
				if note := sourceNote(r, s); note != "" {
					add("%s", note)
				}
			}
		}
	}
	return lines
}

// downEndpoints returns the endpoints of a rank's sources that have no connection.
func downEndpoints(w *kvcastv1.WorkerStatus, r *kvcastv1.RankStatus) string {
	var all []string
	for _, s := range RankSources(w, r.GetDpRank()) {
		if s.GetState() == kvcastv1.SourceState_SOURCE_STATE_CONNECTING {
			all = append(all, Printable(s.GetEndpoint()))
		}
	}
	return strings.Join(all, ", ")
}

// ReasonName returns the name of a reason, such as gap or, for a source that has been down for some time, source_down 12s.
func ReasonName(reason kvcastv1.DegradedReason, downNano, ageNano uint64) string {
	name := EnumName(reason, "DEGRADED_REASON_")
	switch {
	case reason == sourceDown:
		name += " " + time.Duration(downNano).Round(time.Second).String()
	case reason == stale && ageNano <= uint64(maxAge):
		name += " " + time.Duration(ageNano).Round(time.Second).String()
	}
	return name
}

// maxAge is the age from which on a rank is taken for one that was never known to be up to date.
const maxAge = 10 * 365 * 24 * time.Hour

// tiersOf returns the tiers that a reason concerns, such as " in disk"; empty if it concerns all.
func tiersOf(r *kvcastv1.RankStatus, reason kvcastv1.DegradedReason) string {
	var tiers []string
	for _, t := range r.GetTierReasons() {
		if slices.Contains(t.GetReasons(), reason) {
			tiers = append(tiers, TierName(t.GetTier()))
		}
	}
	if len(tiers) == 0 || len(tiers) == int(kvcastv1.Tier_TIER_EXTERNAL) {
		return ""
	}
	return " in " + strings.Join(tiers, ", ")
}

// detailed are the reasons that have a detail.
var detailed = []kvcastv1.DegradedReason{eventsSkipped, blockSizeMismatch, unknownContent, replayForeign}

// detailReason returns the reason that the rank's detail is of; 0 if there is no detail, or several reasons may have it.
func detailReason(r *kvcastv1.RankStatus) (found kvcastv1.DegradedReason) {
	for _, reason := range detailed {
		switch has := slices.Contains(r.GetReasons(), reason); {
		case has && found != 0, r.GetDetail() == "":
			return 0
		case has:
			found = reason
		}
	}
	return found
}

// sourceNote returns what is wrong with a source and what to do; empty if nothing is, or the rank's reasons say so.
func sourceNote(r *kvcastv1.RankStatus, s *kvcastv1.SourceStatus) string {
	state, endpoint, replay := EnumName(s.GetState(), "SOURCE_STATE_"), Printable(s.GetEndpoint()), Printable(s.GetReplayEndpoint())
	switch s.GetState() {
	case kvcastv1.SourceState_SOURCE_STATE_CONNECTING:
		if slices.Contains(r.GetReasons(), sourceDown) {
			return ""
		}
		return fmt.Sprintf("%s: no connection to %s; start the engine, or check that it publishes there", state, endpoint)
	case kvcastv1.SourceState_SOURCE_STATE_SUSPECT:
		return fmt.Sprintf("%s: %s is silent and does not reply; see whether the engine hangs, or restart it", state, endpoint)
	case kvcastv1.SourceState_SOURCE_STATE_REPAIRING, kvcastv1.SourceState_SOURCE_STATE_CATCHING_UP:
		return fmt.Sprintf("%s: the replay of %s is being read; wait", state, endpoint)
	default:
	}
	switch s.GetReplayState() {
	case kvcastv1.ReplayState_REPLAY_STATE_NEVER_ANSWERED:
		return fmt.Sprintf("replay never answered: %s; check the endpoint, and open its port to kvcast", replay)
	case kvcastv1.ReplayState_REPLAY_STATE_UNANSWERED:
		return fmt.Sprintf("replay does not answer: %s; see whether the engine is overloaded, or its port closed", replay)
	default:
		return ""
	}
}

// ReplayState returns how a source's replay socket has answered so far.
func ReplayState(s *kvcastv1.SourceStatus) string {
	switch s.GetReplayState() {
	case kvcastv1.ReplayState_REPLAY_STATE_UNSPECIFIED:
		return "-"
	case kvcastv1.ReplayState_REPLAY_STATE_UNANSWERED:
		return "does not answer"
	case kvcastv1.ReplayState_REPLAY_STATE_FOREIGN:
		return "another engine's"
	default:
		return strings.ReplaceAll(EnumName(s.GetReplayState(), "REPLAY_STATE_"), "_", " ")
	}
}
