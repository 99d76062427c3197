//go:build race

package ingest

// raceEnabled tells that the race detector is on, which allocates by itself.
const raceEnabled = true
