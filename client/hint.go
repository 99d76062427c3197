package client

import kvcastv1 "github.com/kvcast/kvcast/proto/kvcast/v1"

// KVHints is what a router sends to an engine with a request, as JSON, in its field kv_hints: the envelope of vLLM 0.33, which SGLang and Dynamo have too.
type KVHints struct {
	// ProtocolVersion is "0.1".
	ProtocolVersion string `json:"protocol_version"`
	// MessageID and KVHintAction.ID are for logs.
	MessageID string         `json:"message_id"`
	Actions   []KVHintAction `json:"actions"`
}

// KVHintAction is an action of KVHints.
type KVHintAction struct {
	ID      string  `json:"action_id"`
	Type    string  `json:"action_type"`
	Version string  `json:"action_version"`
	Payload KVFetch `json:"payload"`
}

// KVFetch is the payload of the action kv.fetch, version 1.0: blocks that the engine at an endpoint has.
type KVFetch struct {
	Endpoint    string   `json:"source_control_endpoint"`
	BlockHashes []uint64 `json:"block_hashes"`
}

// NewFetchHint returns hints for an engine that is sent a prompt: to fetch blocks of the prompt from another engine, whose match is source. tiers are those
// that the source gives blocks of: TIER_HOST_PINNED for vLLM with KVCR; none: all. held is the number of first blocks that the engine has already. It
// returns false if the source has no FetchEndpoint, or no BlockHashes of more blocks than held.
//
// Engines ignore hints that they cannot use. Those of vLLM with VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES=0 cannot use any.
func NewFetchHint(id string, source *Match, held int, tiers ...kvcastv1.Tier) (hints *KVHints, ok bool) {
	blocks := source.Blocks
	if len(tiers) > 0 {
		blocks = 0
		for _, tier := range tiers {
			blocks = max(blocks, source.TierBlocks[tier])
		}
	}
	if blocks = min(blocks, len(source.BlockHashes)); source.FetchEndpoint == "" || blocks <= held {
		return nil, false
	}
	return &KVHints{ProtocolVersion: "0.1", MessageID: id, Actions: []KVHintAction{{
		ID: id, Type: "kv.fetch", Version: "1.0", Payload: KVFetch{Endpoint: source.FetchEndpoint, BlockHashes: source.BlockHashes[:blocks]},
	}}}, true
}
