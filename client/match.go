package client

import (
	"slices"
	"sync"
	"time"

	"github.com/kvcast/kvcast/internal/core/index"
	"github.com/kvcast/kvcast/internal/core/kvblock"
	kvcastv1 "github.com/kvcast/kvcast/proto/kvcast/v1"
)

// Prompt is a prompt to match, given by its tokens or by the hashes of its blocks. A View and a server match it in the same way.
type Prompt struct {
	// Model restricts the match to workers of the model; empty: all workers. It should be set if there are
	// several models, since equal token ids of different models are different text.
	Model string
	// Tokens are the token ids. Tokens after the last full block are ignored.
	Tokens []uint32
	// BlockSize is the number of tokens per block: only workers with this block size match. 0: each worker's block size.
	BlockSize int
	// LoRA is the name of the LoRA adapter, and Salt the cache salt; empty: none.
	LoRA, Salt string
	// Eagle must be set for SGLang engines with EAGLE decoding: the hash of a block then includes the next token.
	Eagle bool
	// ExcludeLastToken must be set to find what an engine reuses, which computes the last token of a prompt always. It applies to Tokens.
	ExcludeLastToken bool
	// TokensHashes are the tokens hashes of the blocks. If set, only TokensHashes, Model and BlockSize are used.
	TokensHashes []uint64
	// BlockHashes are the engine's own hashes of the blocks, which only workers with the same hashes hold. If set,
	// and TokensHashes is not, only BlockHashes, Model and BlockSize are used.
	BlockHashes []uint64
}

// TokensHashes returns the tokens hashes of a prompt's full blocks, as Stored.tokens_hashes of the contract
// describes. An empty lora or salt means none.
func TokensHashes(tokens []uint32, blockSize int, lora, salt string) []uint64 {
	return kvblock.AppendTokensHashes(nil, tokens, blockSize, kvblock.Seed(lora, salt), false, nil)
}

// Match is the longest prefix of a prompt that one dp rank of a worker holds.
type Match struct {
	// Worker is the worker's name, Model its model, and Endpoint the configured address for requests.
	Worker, Model, Endpoint string
	// Rank is the dp rank.
	Rank uint32
	// Blocks is the number of blocks in the longest prefix. Each block is held in at least one tier.
	Blocks int
	// Expected is the number of blocks in the prefix that the rank is expected to hold soon, because prompts were routed to it, if that is more than
	// Blocks; else 0. Nothing else depends on it. Only the server knows it: see Client.NoteRouted. ExpectedTokens is the number of tokens in them; 0 if the
	// block size is unknown.
	Expected, ExpectedTokens int
	// TierBlocks is the number of blocks in the longest prefix held in one tier, by kvcastv1.Tier. The engine
	// does not need to load the blocks of TierBlocks[kvcastv1.Tier_TIER_DEVICE].
	TierBlocks [numTiers + 1]int
	// Tokens is the number of tokens in the prefix, and TierTokens in TierBlocks; 0 if the worker's block size is unknown. With several
	// attention groups, a prefix may end within a block, so that there are more tokens than in Blocks.
	Tokens     int
	TierTokens [numTiers + 1]int
	// BlockHashes are the engine's own hashes of the first blocks of the prefix: at most MatchRequest.BlockHashes. FetchEndpoint is the address from which
	// other engines can fetch these blocks; empty if it is not known. See NewFetchHint. Matches of a View have neither.
	BlockHashes   []uint64
	FetchEndpoint string
	// Trust is how far the match can be trusted. If it is TRUST_DEGRADED, Reasons are why, ascending.
	// It is that of the tier that can be trusted least: TierTrust has the trust of the prefix in each tier, by kvcastv1.Tier.
	Trust     kvcastv1.Trust
	Reasons   []kvcastv1.DegradedReason
	TierTrust [numTiers + 1]kvcastv1.Trust
	// Down is how long a source of the rank has had no connection; 0: each has one. Only the server knows it.
	Down time.Duration
	// Age is the time since the rank was known to be up to date with its engine. The server tells it; for a View it is the time since the last message of
	// its stream whose newest entry the View has reached. After a message that was not behind, it is 0 for two progress intervals of the server
	// (--subscribers-progress, 1 s by default). A View's ranks are degraded (STALE) when Age exceeds StaleAfter, and at once when its digests differ from the
	// server's, or the server says that it is outdated.
	Age time.Duration
	// TierEndedBy is the attention group because of which the prefix in a tier is not longer, by kvcastv1.Tier. It is not set if the prompt
	// ends the prefix, if the rank has a main group alone, and if its other groups are not followed.
	TierEndedBy [numTiers + 1]OptionalGroup
	// Pools are the longest prefixes in the pools from which the worker can load blocks, of those that hold some: by tokens, descending, then by
	// name. An engine reuses the longest of its own prefix and these. Nothing else depends on them: if only a pool holds a part of the prompt, Blocks is 0.
	Pools []PoolPrefix
}

// PoolPrefix is the longest prefix of a prompt that a pool holds: a store from which several workers load blocks.
type PoolPrefix struct {
	// Pool is the pool's name.
	Pool string
	// Tokens is the number of tokens in the prefix, and Blocks of the pool's blocks, which may have another size than the worker's.
	Tokens, Blocks int
	// Trust is how far the prefix can be trusted. If it is TRUST_DEGRADED, Reasons are why, ascending.
	Trust   kvcastv1.Trust
	Reasons []kvcastv1.DegradedReason
}

// OptionalGroup is the index of an attention group, if one is set; of several with the same kind, block size and window the first.
type OptionalGroup struct {
	Index uint32
	Set   bool
}

// matchesPool reuses the memory of matches.
var matchesPool = sync.Pool{New: func() any { return new(index.Matches) }}

// Match returns the dp ranks that hold at least the first block of a prompt, ordered by the length of the prefix,
// then by the length of the prefix in the device tier, both descending, then by worker and rank. After them are those of which only a pool
// holds it.
//
// Blocks are matched by the contents of the block and of all blocks before it, or by block hash. Blocks with unknown
// content are matched by block hash only. A prefix ends at the first missing block, even if later blocks are held.
func (v *View) Match(p Prompt) []Match { return v.AppendMatches(nil, p) }

// AppendMatches appends what Match returns to out. It allocates nothing if out has room, except for the reasons and the pools of a match that has some.
func (v *View) AppendMatches(out []Match, p Prompt) []Match {
	q := index.Query{Model: p.Model, Pools: true, Prompts: []index.Prompt{{BlockSize: uint32(p.BlockSize)}}}
	switch to := &q.Prompts[0]; {
	case p.TokensHashes != nil:
		to.TokensHashes = p.TokensHashes
	case p.BlockHashes != nil:
		to.BlockHashes = p.BlockHashes
	default:
		to.TokenIDs, to.LoRA, to.Salt, to.Eagle = p.Tokens, p.LoRA, p.Salt, p.Eagle
		to.ExcludeLastToken = p.ExcludeLastToken
	}
	found := matchesPool.Get().(*index.Matches)
	defer matchesPool.Put(found)
	age := v.age() // before the state, which a newer one may replace
	v.state.Load().Match(&q, found)
	out = slices.Grow(out, len(found.Prompts[0]))
	for i := range found.Prompts[0] {
		m := exportMatch(&found.Prompts[0][i])
		m.Pools = exportPools(found.Pools(&found.Prompts[0][i]))
		if m.Age = age; age > StaleAfter {
			m.setStale()
		}
		out = append(out, m)
	}
	return out
}

// age returns the time since the state was known to be up to date; 0: it is.
func (v *View) age() time.Duration {
	known := v.known.Load()
	if known == nil {
		return 0
	}
	if age := time.Since(known.at); age > known.quiet {
		return age
	}
	return 0
}

// StaleAfter is the Age beyond which the ranks of a View are degraded: the default of the servers' cluster.ttl.
const StaleAfter = 3 * time.Second

// setStale adds the reason STALE, which concerns all tiers and is the last one.
func (m *Match) setStale() {
	m.Reasons = append(m.Reasons, kvcastv1.DegradedReason_DEGRADED_REASON_STALE)
	m.Trust = kvcastv1.Trust_TRUST_DEGRADED
	for tier := range numTiers {
		m.TierTrust[tier+1] = m.Trust
	}
	for i := range m.Pools {
		p := &m.Pools[i]
		p.Trust, p.Reasons = m.Trust, append(p.Reasons, kvcastv1.DegradedReason_DEGRADED_REASON_STALE)
	}
}

func exportPools(all []index.PoolPrefix) (out []PoolPrefix) {
	for _, p := range all {
		out = append(out, PoolPrefix{Pool: p.Pool, Tokens: p.Tokens, Blocks: p.Blocks, Trust: p.Trust(), Reasons: p.Reasons.List()})
	}
	return out
}

func exportMatch(m *index.Match) Match {
	out := Match{
		Worker: m.Worker, Model: m.Model, Endpoint: m.Endpoint, Rank: m.Rank,
		Blocks: m.Blocks, Tokens: m.Tokens(),
		Trust: m.Trust(), Reasons: m.Reasons.List(),
	}
	copy(out.TierBlocks[1:], m.TierBlocks[:])
	for tier := range m.TierBlocks {
		out.TierTokens[tier+1], out.TierTrust[tier+1] = m.TierTokens(tier), m.TierTrust(tier)
		if group, ok := m.EndedBy(tier); ok {
			out.TierEndedBy[tier+1] = OptionalGroup{Index: uint32(group), Set: true}
		}
	}
	return out
}
