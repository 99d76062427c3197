package server

import (
	"sync/atomic"
	"time"
)

// stall notices a send that does not return: gRPC waits for as long as the
// client takes nothing, and a client's transport answers pings however little
// its program reads. It is one stream's.
type stall struct {
	since atomic.Int64 // when the send under way began, after processStart; 0 for none
}

// processStart is what times are taken from, by a clock that nobody sets.
var processStart = time.Now()

func (s *stall) begin() { s.since.Store(int64(time.Since(processStart))) }
func (s *stall) end()   { s.since.Store(0) }

// longer tells whether a send has been under way for longer than d.
func (s *stall) longer(d time.Duration) bool {
	since := s.since.Load()
	return since != 0 && time.Since(processStart)-time.Duration(since) > d
}
