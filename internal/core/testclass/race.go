//go:build race

package testclass

// RaceEnabled reports whether the race detector is on.
const RaceEnabled = true
