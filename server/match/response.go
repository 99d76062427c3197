package match

import (
	"math/bits"
	"slices"

	"google.golang.org/protobuf/encoding/protowire"

	"github.com/kvcast/kvcast/internal/core/encode"
	"github.com/kvcast/kvcast/internal/core/index"
	kvcastv1 "github.com/kvcast/kvcast/proto/kvcast/v1"
)

// Response is the answer to a request, and the memory for it. The zero value is ready for use.
type Response struct {
	// Matches are the matches of the request's prompts, at the position Epoch and Seq.
	Matches index.Matches
	Epoch   string
	Seq     uint64
	// WithHashes reports whether matches have block hashes and the endpoint to fetch the blocks from.
	WithHashes bool
	// WithModel reports whether each match has the worker's model.
	WithModel bool
	// Standing returns the standing of a rank; nil: that of each is the zero value.
	Standing func(worker string, rank uint32) Standing

	matchSizes  []int      // of all matches
	promptSizes []int      // of all prompts
	standing    []Standing // of all matches
	pools       []pool     // of all matches
	appended    int        // of pools, by Append
}

// maxReusedMatches bounds the matches of a response whose memory is kept for reuse: some 250 bytes each.
const maxReusedMatches = 16 << 10

// IsLarge reports whether the memory of the response is not worth keeping for others.
func (r *Response) IsLarge() bool { return max(cap(r.matchSizes), cap(r.pools)) > maxReusedMatches }

// Standing is what the trust of a dp rank depends on besides its entries. The zero value is of one that is up to date with its engine.
type Standing struct {
	// Down is how long a source has been down, in nanoseconds; 0: none is.
	Down uint64
	// Age is the time since the rank was known to be up to date, in nanoseconds.
	Age uint64
	// Stale reports whether that is too long.
	Stale bool
	// Overpredicted reports whether predictions are too long again and again.
	Overpredicted bool
}

// reasons returns the reasons that follow, as index.Reasons.
func (s Standing) reasons() (all index.Reasons) {
	if s.Down > 0 {
		all |= 1 << kvcastv1.DegradedReason_DEGRADED_REASON_SOURCE_DOWN
	}
	if s.Stale {
		all |= 1 << kvcastv1.DegradedReason_DEGRADED_REASON_STALE
	}
	if s.Overpredicted {
		all |= 1 << kvcastv1.DegradedReason_DEGRADED_REASON_OVERPREDICTED
	}
	return all
}

// Degrade adds to a trust and its reasons, ascending, what follows from the standing.
func (s Standing) Degrade(t *kvcastv1.Trust, all *[]kvcastv1.DegradedReason) {
	reasons := s.reasons()
	*t = s.trust(*t)
	*all = append(*all, reasons.List()...)
	slices.Sort(*all)
}

func (s Standing) trust(t kvcastv1.Trust) kvcastv1.Trust {
	if s.reasons() != 0 {
		return kvcastv1.Trust_TRUST_DEGRADED
	}
	return t
}

// tagSize is the encoded size of a field's tag, in bytes: all field numbers here are below 16, but for that of pools.
const tagSize = 1

// Size returns the encoded size of the MatchPrefixResponse, in bytes. It must be called before Append, after all fields are set.
func (r *Response) Size() int {
	r.matchSizes, r.promptSizes, r.standing, r.pools = r.matchSizes[:0], r.promptSizes[:0], r.standing[:0], r.pools[:0]
	size := encode.SizeLength(r.positionSize())
	for _, matches := range r.Matches.Prompts {
		prompt := 0
		for i := range matches {
			m := &matches[i]
			var standing Standing
			if r.Standing != nil {
				standing = r.Standing(m.Worker, m.Rank)
			}
			n := matchSize(m, standing)
			if m.HasPools() {
				n += r.poolsSize(m)
			}
			if r.WithModel {
				n += encode.SizeString(m.Model)
			}
			if r.WithHashes {
				n += encode.SizeHashes(r.Matches.BlockHashes(m)) + encode.SizeString(fetchEndpoint(m))
			}
			r.matchSizes, r.standing = append(r.matchSizes, n), append(r.standing, standing)
			prompt += encode.SizeLength(n)
		}
		r.promptSizes = append(r.promptSizes, prompt)
		size += encode.SizeLength(prompt)
	}
	return size
}

func (r *Response) positionSize() int {
	return encode.SizeString(r.Epoch) + tagSize + 8
}

// Append appends the encoded MatchPrefixResponse. It never omits the seq of the position.
func (r *Response) Append(b []byte) []byte {
	b = encode.AppendLength(b, kvcastv1.MatchPrefixResponsePositionField, r.positionSize())
	b = encode.AppendString(b, kvcastv1.PositionEpochField, r.Epoch)
	b = encode.AppendOptionalFixed64(b, kvcastv1.PositionSeqField, r.Seq)
	next := 0
	r.appended = 0
	for i, matches := range r.Matches.Prompts {
		b = encode.AppendLength(b, kvcastv1.MatchPrefixResponsePromptsField, r.promptSizes[i])
		for j := range matches {
			b = encode.AppendLength(b, kvcastv1.PromptMatchesMatchesField, r.matchSizes[next])
			b = appendMatch(b, &matches[j], r.standing[next])
			if r.WithModel {
				b = encode.AppendString(b, kvcastv1.PrefixMatchModelField, matches[j].Model)
			}
			if r.WithHashes {
				b = encode.AppendHashes(b, kvcastv1.PrefixMatchBlockHashesField, r.Matches.BlockHashes(&matches[j]))
				b = encode.AppendString(b, kvcastv1.PrefixMatchFetchEndpointField, fetchEndpoint(&matches[j]))
			}
			if matches[j].HasPools() {
				b = r.appendPools(b, &matches[j])
			}
			next++
		}
	}
	return b
}

// AppendID appends a MatchPrefixesResponse up to its response, which has size bytes and follows.
func AppendID(b []byte, id uint64, size int) []byte {
	b = AppendOnlyID(b, id)
	return encode.AppendLength(b, kvcastv1.MatchPrefixesResponseResponseField, size)
}

// AppendOnlyID appends a MatchPrefixesResponse without a response.
func AppendOnlyID(b []byte, id uint64) []byte {
	return encode.AppendUint(b, kvcastv1.MatchPrefixesResponseIDField, id)
}

// MaxIDSize is the maximum number of bytes that AppendID appends.
const MaxIDSize = 2 * (tagSize + 10)

// matchSize returns the encoded size of a PrefixMatch.
func matchSize(m *index.Match, s Standing) int {
	size := encode.SizeString(m.Worker) + encode.SizeString(m.Endpoint) + encode.SizeUint(uint64(m.Rank)) +
		encode.SizeUint(uint64(m.Blocks)) + encode.SizeUint(tokens(m.Tokens())) +
		encode.SizeUint(uint64(s.trust(m.Trust()))) + encode.SizeUint(s.Down) + encode.SizeUint(s.Age) +
		encode.SizeUint(uint64(m.Expected)) + encode.SizeUint(uint64(m.Expected*m.BlockSize))
	for tier := range m.TierBlocks {
		if m.HasTier(tier) {
			size += encode.SizeLength(tierSize(m, tier, s))
		}
	}
	return size + reasonsSize(uint32(m.Reasons|s.reasons()))
}

func tierSize(m *index.Match, tier int, s Standing) int {
	blocks := m.TierBlocks[tier]
	size := encode.SizeUint(uint64(tier+1)) + encode.SizeUint(uint64(blocks)) + encode.SizeUint(tokens(m.TierTokens(tier)))
	if m.TiersDiffer() {
		size += tagSize + 1 + reasonsSize(uint32(m.TierReasons[tier]|s.reasons())) // the trust takes a byte
	}
	if _, ok := m.EndedBy(tier); ok {
		size += tagSize + 1 // a group takes a byte
	}
	return size
}

// reasonsSize returns the encoded size of a list of reasons, of which each takes a byte.
func reasonsSize(all uint32) int {
	if n := bits.OnesCount32(all); n > 0 {
		return tagSize + 1 + n
	}
	return 0
}

// appendReasons appends a list of reasons, unless it is empty.
func appendReasons(b []byte, field protowire.Number, all uint32) []byte {
	if all == 0 {
		return b
	}
	b = protowire.AppendTag(b, field, protowire.BytesType)
	b = append(b, byte(bits.OnesCount32(all)))
	for ; all != 0; all &= all - 1 {
		b = append(b, byte(bits.TrailingZeros32(all)))
	}
	return b
}

// appendMatch appends the body of a PrefixMatch.
func appendMatch(b []byte, m *index.Match, s Standing) []byte {
	b = encode.AppendString(b, kvcastv1.PrefixMatchWorkerField, m.Worker)
	b = encode.AppendString(b, kvcastv1.PrefixMatchEndpointField, m.Endpoint)
	b = encode.AppendUint(b, kvcastv1.PrefixMatchDpRankField, uint64(m.Rank))
	b = encode.AppendUint(b, kvcastv1.PrefixMatchBlocksField, uint64(m.Blocks))
	b = encode.AppendUint(b, kvcastv1.PrefixMatchTokensField, tokens(m.Tokens()))
	for tier := range m.TierBlocks {
		if m.HasTier(tier) {
			b = encode.AppendLength(b, kvcastv1.PrefixMatchTiersField, tierSize(m, tier, s))
			b = encode.AppendUint(b, kvcastv1.TierPrefixTierField, uint64(tier+1))
			b = encode.AppendUint(b, kvcastv1.TierPrefixBlocksField, uint64(m.TierBlocks[tier]))
			b = encode.AppendUint(b, kvcastv1.TierPrefixTokensField, tokens(m.TierTokens(tier)))
			if m.TiersDiffer() {
				b = encode.AppendUint(b, kvcastv1.TierPrefixTrustField, uint64(s.trust(m.TierTrust(tier))))
				b = appendReasons(b, kvcastv1.TierPrefixReasonsField, uint32(m.TierReasons[tier]|s.reasons()))
			}
			if group, ok := m.EndedBy(tier); ok {
				b = encode.AppendOptional(b, kvcastv1.TierPrefixEndedByGroupField, uint64(group))
			}
		}
	}
	b = encode.AppendUint(b, kvcastv1.PrefixMatchTrustField, uint64(s.trust(m.Trust())))
	b = appendReasons(b, kvcastv1.PrefixMatchReasonsField, uint32(m.Reasons|s.reasons()))
	b = encode.AppendUint(b, kvcastv1.PrefixMatchDownNanoField, s.Down)
	b = encode.AppendUint(b, kvcastv1.PrefixMatchAgeNanoField, s.Age)
	b = encode.AppendUint(b, kvcastv1.PrefixMatchExpectedBlocksField, uint64(m.Expected))
	return encode.AppendUint(b, kvcastv1.PrefixMatchExpectedTokensField, uint64(m.Expected*m.BlockSize))
}

// tokens returns a number of tokens modulo 2^32, as in the field.
func tokens(n int) uint64 { return uint64(uint32(n)) }
