package engineclient

import (
	"github.com/kvcast/kvcast/internal/core/kvblock"
	"github.com/kvcast/kvcast/internal/feed"
)

// The types of fields in Config and Event that other packages of kvcast define.
type (
	// Engine is the kind of an engine, which decides how its events are read.
	Engine = feed.Engine
	// Tier is where a block is in the engine's memory hierarchy. It has the values of kvcast.v1.Tier.
	Tier = kvblock.Tier
	// Gap is a loss that cannot be repaired.
	Gap = feed.Gap
	// GapReason is why batches are missing. It has the values of kvcast.v1.Gap.Reason.
	GapReason = feed.GapReason
)

// The engines.
const (
	EngineVLLM    = feed.EngineVLLM
	EngineSGLang  = feed.EngineSGLang
	EngineTRTLLM  = feed.EngineTRTLLM
	EngineKVBM    = feed.EngineKVBM
	EngineLLMDSim = feed.EngineLLMDSim
)

// The tiers, nearest first.
const (
	TierDevice     = kvblock.TierDevice
	TierHostPinned = kvblock.TierHostPinned
	TierDisk       = kvblock.TierDisk
	TierExternal   = kvblock.TierExternal
)

// The reasons of gaps.
const (
	GapReplayUnavailable  = feed.GapReplayUnavailable
	GapReplayIncomplete   = feed.GapReplayIncomplete
	GapReplayForgotten    = feed.GapReplayForgotten
	GapPossibleRestart    = feed.GapPossibleRestart
	GapAmbiguousPublisher = feed.GapAmbiguousPublisher
	GapJoinedLate         = feed.GapJoinedLate
	GapEventsSkipped      = feed.GapEventsSkipped
	GapBlockSizeMismatch  = feed.GapBlockSizeMismatch
	GapUnknownContent     = feed.GapUnknownContent
	GapTierNotCleared     = feed.GapTierNotCleared
	GapReplayUnproved     = feed.GapReplayUnproved
	GapReplayForeign      = feed.GapReplayForeign
	GapCopiesUnsure       = feed.GapCopiesUnsure
	GapConnectorTier      = feed.GapConnectorTier
	GapRelayed            = feed.GapRelayed
)
