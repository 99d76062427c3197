package wire

import "github.com/kvcast/kvcast/internal/core/kvblock"

// MaxSaltedBlocks bounds the scoped blocks of a source.
const MaxSaltedBlocks = maxScopedBlocks

// LimitSaltedBlocks sets the bound of salted blocks.
func (r *Rules) LimitSaltedBlocks(most int) { r.scopes.maxBlocks = most }

// Salted returns the numbers of salted ranks, salted blocks and salts, and the accounted bytes
// of the salts.
func (r *Rules) Salted() (ranks, blocks, salts, bytes int) {
	return len(r.scopes.ranks), r.scopes.blocks, len(r.scopes.ids), r.scopes.bytes
}

// ScanTokens is scanTokens.
var ScanTokens = scanTokens

// ReadValue is readValue with plain results.
func ReadValue(p []byte, i int) (class, n, end, fault int) {
	v, f := readValue(p, i)
	return int(v.class), v.n, v.end, int(f)
}

// ReadBits returns the number that readValue reads.
func ReadBits(p []byte, i int) uint64 {
	v, _ := readValue(p, i)
	return v.bits
}

// ReadHeader is readHeader with plain results.
func ReadHeader(p []byte, i int) (class, n, end, fault int) {
	c, n, end, f := readHeader(p, i)
	return int(c), n, end, int(f)
}

// Functions that read some values by their first byte.
var (
	ShortText   = shortText
	ReadFixed64 = readFixed64
)

// ClassStr is the class of strings.
const ClassStr = int(classStr)

// TierOf is tierOf.
var TierOf = tierOf

// Tiers returns the tiers that the reason concerns; 0: the event's tier.
func (r Reason) Tiers() kvblock.Tiers { return reasons[r].tiers }
