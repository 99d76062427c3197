package client

// Indexed returns how many sequence hashes are in a View's index.
func Indexed(v *View) int { return v.now.held.n }
