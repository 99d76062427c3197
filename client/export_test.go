package client

// Indexed returns how many sequence hashes are in a View's index.
func Indexed(v *View) int { return v.now.held.n }

// Holders returns how many ranks a View had at most at a time, those included that were
// retired and not yet swept.
func Holders(v *View) int { return len(v.now.ranks) }
