package client

// Indexed returns the number of sequence hashes in a View's index.
func Indexed(v *View) int { return v.state.index.Len() }

// Holders returns the maximum number of ranks that a View has had, including retired ranks until they are swept.
func Holders(v *View) int { return len(v.state.ranks) }
