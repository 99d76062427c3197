package wire

// HashTokensPortable is the path that big-endian machines take.
var HashTokensPortable = hashTokensPortable

// MaxSaltedBlocks is how many salted blocks are remembered of a source.
const MaxSaltedBlocks = maxSaltedBlocks

// LimitSaltedBlocks has the rules remember fewer salted blocks.
func (r *Rules) LimitSaltedBlocks(most int) { r.salts.maxBlocks = most }

// Salted returns how many ranks, blocks and salts are remembered, and the bytes
// that the salts are counted for.
func (r *Rules) Salted() (ranks, blocks, salts, bytes int) {
	return len(r.salts.ranks), r.salts.blocks, len(r.salts.ids), r.salts.bytes
}
