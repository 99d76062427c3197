package hybrid

// HolderFunc is a Holder that calls a function for each prefix: whether a group, by its index, holds the prefix of a number of
// tokens.
type HolderFunc func(group, tokens int) bool

// Held calls the function n times.
func (f HolderFunc) Held(group, from, step, n int) (held uint64) {
	for i := range n {
		if f(group, from+(i+1)*step) {
			held |= 1 << i
		}
	}
	return held
}
