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

// ScanTokens is the loop that reads tokens.
var ScanTokens = scanTokens

// ReadValue reads any value, ReadHeader nearly all by their first byte.
func ReadValue(p []byte, i int) (class, n, end, fault int) {
	v, f := readValue(p, i)
	return int(v.class), v.n, v.end, int(f)
}

// ReadHeader is readHeader with plain results.
func ReadHeader(p []byte, i int) (class, n, end, fault int) {
	c, n, end, f := readHeader(p, i)
	return int(c), n, end, int(f)
}

// ShortText and ReadFixed64 read some values by their first byte.
var (
	ShortText   = shortText
	ReadFixed64 = readFixed64
)

// ClassStr is the class of strings.
const ClassStr = int(classStr)
