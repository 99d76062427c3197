package vllm

import (
	"testing"
	"time"
)

// DisableTimeouts lets a consumer read nothing, and answer no heartbeat, until the test ends. Nothing may be connected yet.
func DisableTimeouts(t *testing.T) {
	t.Helper()
	timeout, beat := writeTimeout, heartbeat
	writeTimeout, heartbeat = time.Hour, -1
	t.Cleanup(func() { writeTimeout, heartbeat = timeout, beat })
}

// Omitted returns how many blocks were omitted since the last call, by reason.
func (s *Stream) Omitted() (all map[string]uint64) {
	all = make(map[string]uint64)
	for reason, n := range s.omitted {
		if n > 0 {
			all[omissionNames[reason]] = n
		}
	}
	clear(s.omitted[:])
	return all
}

// Positions returns the position of the oldest batch, and that after the last one.
func (l *Log) Positions() (first, end uint64) { return l.first, l.End() }
