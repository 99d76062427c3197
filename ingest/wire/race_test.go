//go:build race

package wire_test

// raceEnabled tells that the race detector is on, which allocates by itself.
const raceEnabled = true
