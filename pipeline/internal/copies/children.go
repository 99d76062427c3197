package copies

// Children counts the children of blocks, by block hash. Counts of zero have no entry.
type Children map[uint64]uint32

// Add counts one more child of a block.
func (c Children) Add(parent uint64) { c[parent]++ }

// Remove counts one child less of a block that has one.
func (c Children) Remove(parent uint64) {
	if c[parent] == 1 {
		delete(c, parent)
	} else {
		c[parent]--
	}
}
