//go:build race

package wire_test

// raceEnabled reports whether the race detector is on, which allocates.
const raceEnabled = true
