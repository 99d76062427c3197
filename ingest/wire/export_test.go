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

// Value is what readValue makes of the value at i.
func Value(p []byte, i int) (class, n, at, fault int) {
	v, f := readValue(p, i)
	return int(v.class), v.n, v.at, int(f)
}

// Nest is what readNest makes of the value at i.
func Nest(p []byte, i int) (class, n, at, fault int) {
	c, n, at, f := readNest(p, i)
	return int(c), n, at, int(f)
}

// GlanceString and Glance64 tell some values by their first byte.
var (
	GlanceString = glanceString
	Glance64     = glance64
)

// ClassStr is the class of strings.
const ClassStr = int(classStr)
