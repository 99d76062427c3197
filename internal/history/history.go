// Package history remembers the numbers of blocks over the last hour.
//
// In: the state of the index, every Interval. Out: the samples of a worker, or of all workers together. Guarantee: bounded
// memory: Samples samples of 16 bytes for each worker that the index has, and none of workers that were removed.
package history

import (
	"context"
	"math"
	"sync"
	"time"

	"github.com/kvcast/kvcast/internal/core/index"
	"github.com/kvcast/kvcast/internal/core/kvblock"
	kvcastv1 "github.com/kvcast/kvcast/proto/kvcast/v1"
)

const (
	// Interval is the time between two samples.
	Interval = 30 * time.Second
	// Samples is how many are kept: an hour's.
	Samples = 120
)

// Stream is the state of the stream that is sampled beside the blocks.
type Stream struct {
	NewestSeq, Subscribers, SubscriberLag uint64
}

// History has the samples of the last hour. New makes one. It is safe for concurrent use.
type History struct {
	index  *index.Index
	stream func() Stream

	mu      sync.Mutex // guards all below
	taken   uint64     // number of samples; the last is number taken - 1
	fleet   [Samples]sample
	workers map[string]*worker
}

// sample is what all workers together were, by its number modulo Samples.
type sample struct {
	at      int64 // nanoseconds since the Unix epoch
	blocks  [kvblock.NumTiers]uint64
	workers uint64
	stream  Stream
}

// worker has the blocks of a worker, by the number of the sample modulo Samples.
type worker struct {
	first  uint64 // number of its first sample
	last   uint64 // number of its last sample
	blocks [Samples][kvblock.NumTiers]uint32
}

// New returns a History of an index without samples. It calls stream for each sample.
func New(x *index.Index, stream func() Stream) *History {
	return &History{index: x, stream: stream, workers: make(map[string]*worker)}
}

// Run takes a sample now and every Interval, until ctx ends.
func (h *History) Run(ctx context.Context) {
	ticker := time.NewTicker(Interval)
	defer ticker.Stop()
	for {
		h.sample()
		select {
		case <-ticker.C:
		case <-ctx.Done():
			return
		}
	}
}

func (h *History) sample() {
	all, _ := h.index.Workers(nil)
	s := sample{at: time.Now().UnixNano(), workers: uint64(len(all)), stream: h.stream()}
	h.mu.Lock()
	defer h.mu.Unlock()
	for i := range all {
		name := all[i].Name
		w := h.workers[name]
		if w == nil {
			w = &worker{first: h.taken}
			h.workers[name] = w
		}
		w.last = h.taken
		blocks := tierBlocks(&all[i])
		for tier, n := range blocks {
			s.blocks[tier] += n
			w.blocks[h.taken%Samples][tier] = uint32(min(n, math.MaxUint32))
		}
	}
	for name, w := range h.workers {
		if w.last != h.taken { // it was removed
			delete(h.workers, name)
		}
	}
	h.fleet[h.taken%Samples] = s
	h.taken++
}

// tierBlocks returns the blocks of all ranks of a worker.
func tierBlocks(w *index.Worker) (blocks [kvblock.NumTiers]uint64) {
	for i := range w.Ranks {
		for tier, d := range w.Ranks[i].Blocks {
			blocks[tier] += d.Blocks
		}
	}
	return blocks
}

// Samples returns the samples of a worker, or of all workers if the name is empty, the oldest first.
func (h *History) Samples(name string) (all []*kvcastv1.HistorySample) {
	h.mu.Lock()
	defer h.mu.Unlock()
	first := h.taken - min(h.taken, Samples)
	w := h.workers[name]
	switch {
	case w != nil:
		first = max(first, w.first)
	case name != "":
		return nil
	}
	for n := first; n < h.taken; n++ {
		s := &h.fleet[n%Samples]
		out := &kvcastv1.HistorySample{
			TimeUnixNano: s.at, NewestSeq: s.stream.NewestSeq, Workers: s.workers,
			Subscribers: s.stream.Subscribers, SubscriberLag: s.stream.SubscriberLag,
		}
		for tier := range kvblock.NumTiers {
			blocks := s.blocks[tier]
			if w != nil {
				blocks = uint64(w.blocks[n%Samples][tier])
			}
			if blocks > 0 {
				out.Blocks = append(out.Blocks, &kvcastv1.TierBlocks{Tier: kvcastv1.Tier(tier + 1), Blocks: blocks})
			}
		}
		all = append(all, out)
	}
	return all
}
