//go:build !race

package harness

// RaceEnabled reports whether the race detector is on.
const RaceEnabled = false
