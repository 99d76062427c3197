package server

import (
	"errors"
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

// paceBytes is how much of a snapshot must be read in the stall time: at 30 s some
// 280 KB/s, which is far below what any network between a router and a server of
// its own gives.
const paceBytes = 8 << 20

// errSlowPace means that a snapshot is read too slowly.
var errSlowPace = errors.New("the snapshot is read too slowly")

// pace bounds how long a snapshot takes. A reader that takes a little just before
// each stall time is over would otherwise keep others from their turn, and the copy
// of a table in memory, for hours.
type pace struct {
	stall   time.Duration
	bytes   int
	waiting time.Duration // for the reader
}

// sent notes a send, and tells whether the snapshot may go on.
func (p *pace) sent(bytes int, took time.Duration) error {
	p.bytes += bytes
	p.waiting += took
	if allowed := float64(p.stall) * (1 + float64(p.bytes)/paceBytes); float64(p.waiting) > allowed {
		return errSlowPace
	}
	return nil
}

func (s *stall) begin() { s.since.Store(int64(time.Since(processStart))) }

// end returns how long the send took.
func (s *stall) end() time.Duration {
	return time.Since(processStart) - time.Duration(s.since.Swap(0))
}

// longer tells whether a send has been under way for longer than d.
func (s *stall) longer(d time.Duration) bool {
	since := s.since.Load()
	return since != 0 && time.Since(processStart)-time.Duration(since) > d
}
