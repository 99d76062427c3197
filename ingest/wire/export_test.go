package wire

// HashCopied is the implementation for big-endian machines and multimodal blocks.
var HashCopied = hashCopied

// MaxSaltedBlocks bounds the salted blocks remembered per source.
const MaxSaltedBlocks = maxSaltedBlocks

// LimitSaltedBlocks lowers the number of salted blocks that the rules remember.
func (r *Rules) LimitSaltedBlocks(most int) { r.salts.maxBlocks = most }

// Salted returns the numbers of remembered ranks, blocks and salts, and the accounted bytes
// of the salts.
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

// TierOf is tierOf.
var TierOf = tierOf
