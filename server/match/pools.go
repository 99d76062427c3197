package match

import (
	"google.golang.org/protobuf/encoding/protowire"

	"github.com/kvcast/kvcast/internal/core/encode"
	"github.com/kvcast/kvcast/internal/core/index"
	kvcastv1 "github.com/kvcast/kvcast/proto/kvcast/v1"
)

// pool is a PoolPrefix of the response.
type pool struct {
	trust   kvcastv1.Trust
	reasons uint32
	size    int // encoded
}

// poolsSize appends the pools of a match to r.pools, and returns the encoded size of PrefixMatch.pools.
func (r *Response) poolsSize(m *index.Match) (size int) {
	for _, p := range r.Matches.Pools(m) {
		var standing Standing
		if r.Standing != nil {
			standing = r.Standing(p.Pool, p.Rank)
		}
		out := pool{trust: standing.trust(p.Trust()), reasons: uint32(p.Reasons | standing.reasons())}
		out.size = encode.SizeString(p.Pool) + encode.SizeUint(tokens(p.Tokens)) + encode.SizeUint(uint64(p.Blocks)) +
			encode.SizeUint(uint64(out.trust)) + reasonsSize(out.reasons)
		r.pools = append(r.pools, out)
		size += protowire.SizeTag(kvcastv1.PrefixMatchPoolsField) + protowire.SizeBytes(out.size)
	}
	return size
}

// appendPools appends PrefixMatch.pools, which are the next of r.pools.
func (r *Response) appendPools(b []byte, m *index.Match) []byte {
	for _, p := range r.Matches.Pools(m) {
		out := &r.pools[r.appended]
		r.appended++
		b = encode.AppendLength(b, kvcastv1.PrefixMatchPoolsField, out.size)
		b = encode.AppendString(b, kvcastv1.PoolPrefixPoolField, p.Pool)
		b = encode.AppendUint(b, kvcastv1.PoolPrefixTokensField, tokens(p.Tokens))
		b = encode.AppendUint(b, kvcastv1.PoolPrefixBlocksField, uint64(p.Blocks))
		b = encode.AppendUint(b, kvcastv1.PoolPrefixTrustField, uint64(out.trust))
		b = appendReasons(b, kvcastv1.PoolPrefixReasonsField, out.reasons)
	}
	return b
}
