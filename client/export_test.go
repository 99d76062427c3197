package client

// Indexed returns how many sequence hashes are in a View's index.
func Indexed(v *View) int { return v.state.index.Len() }

// Holders returns the largest number of ranks that a View had at a time, including retired
// ranks that were not swept yet.
func Holders(v *View) int { return len(v.state.ranks) }
