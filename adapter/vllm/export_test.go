package vllm

import (
	"testing"
	"time"
)

// SetWriteTimeout changes how long a consumer may read nothing until the test ends. Nothing may be connected yet.
func SetWriteTimeout(t *testing.T, timeout time.Duration) {
	t.Helper()
	before := writeTimeout
	writeTimeout = timeout
	t.Cleanup(func() { writeTimeout = before })
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
