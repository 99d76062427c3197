package simulator

import (
	"maps"

	"github.com/kvcast/kvcast/internal/simulator/blockpool"
	"github.com/kvcast/kvcast/internal/wire"
)

// Summary contains an engine's statistics and the state of its pool.
type Summary struct {
	// Batches and Events are the numbers of published batches and events, including batches that faults affected.
	Batches uint64 `json:"batches"`
	Events  uint64 `json:"events"`
	// Stored and Removed count the blocks in those events.
	Stored  uint64 `json:"stored_blocks"`
	Removed uint64 `json:"removed_blocks"`
	// Cleared is the number of resets.
	Cleared uint64 `json:"-"`
	// Blocks is the number of distinct block hashes that the pool holds.
	Blocks int `json:"blocks"`
	// Digest is the XOR of splitmix64 over the hashes. It is a string because not every JSON parser
	// preserves 64-bit numbers.
	Digest uint64 `json:"digest,string"`
	// NextSeq is the seq of the next batch.
	NextSeq uint64 `json:"-"`
	// Stats are the statistics of all requests so far, across restarts.
	blockpool.Stats
	// Rejected is the number of requests whose prompt exceeds the pool. CutShort is the number of
	// requests that ended before they had generated all their tokens, because the pool was full or
	// the engine restarted. Both are 0 without a trace.
	Rejected uint64 `json:"refused_requests,omitempty"`
	CutShort uint64 `json:"cut_requests,omitempty"`
	// Faults is the number of times each fault has occurred; nil if none has.
	Faults map[Fault]uint64 `json:"faults,omitempty"`
}

// count adds a batch.
func (s *Summary) count(events []wire.Event) {
	s.NextSeq++
	s.Batches++
	s.Events += uint64(len(events))
	for i := range events {
		switch n := uint64(len(events[i].BlockHashes)); events[i].Kind {
		case wire.KindStored:
			s.Stored += n
		case wire.KindRemoved:
			s.Removed += n
		case wire.KindCleared:
			s.Cleared++
		}
	}
}

// Add adds the Summary of another engine. The digests are combined by XOR, and NextSeq is the maximum.
func (s *Summary) Add(other Summary) {
	s.Batches += other.Batches
	s.Events += other.Events
	s.Stored += other.Stored
	s.Removed += other.Removed
	s.Cleared += other.Cleared
	s.Blocks += other.Blocks
	s.Digest ^= other.Digest
	s.NextSeq = max(s.NextSeq, other.NextSeq)
	s.Requests += other.Requests
	s.PromptTokens += other.PromptTokens
	s.HitTokens += other.HitTokens
	s.Rejected += other.Rejected
	s.CutShort += other.CutShort
	faults := maps.Clone(s.Faults)
	for fault, n := range other.Faults {
		if faults == nil {
			faults = make(map[Fault]uint64)
		}
		faults[fault] += n
	}
	s.Faults = faults
}
