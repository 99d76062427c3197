package radix

import "github.com/kvcast/kvcast/internal/hashtable"

// recent has the places of the last blocks of a rank's latest stores. Most stores continue one of them, and then do not
// search the table for their parent. A block that another one replaces is found in the table only.
type recent [64]struct {
	hash uint64
	at   position // the zero value if there is no block
}

// slotOf returns the index of a block hash. Engines choose block hashes; Hash depends on the process's seed.
func (*recent) slotOf(hash uint64) uint64 { return hashtable.Hash(hash) % uint64(len(recent{})) }

// add adds a block that has a place.
func (c *recent) add(hash uint64, at position) {
	e := &c[c.slotOf(hash)]
	e.hash, e.at = hash, at
}

// find returns the place of a block.
func (c *recent) find(hash uint64) (_ position, ok bool) {
	e := &c[c.slotOf(hash)]
	return e.at, e.hash == hash && e.at != position{}
}

// forget removes a block, before it is removed from a tier or its place changes.
func (c *recent) forget(hash uint64) {
	if e := &c[c.slotOf(hash)]; e.hash == hash {
		e.at = position{}
	}
}
