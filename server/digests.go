package server

import (
	"context"
	"errors"

	"google.golang.org/protobuf/proto"

	"github.com/kvcast/kvcast/journal"
	kvcastv1 "github.com/kvcast/kvcast/proto/kvcast/v1"
)

// digests are what workers hold at a position, to be told when the stream is there.
type digests struct {
	at      uint64
	workers []*kvcastv1.WorkerDigest
}

// until is up to where the stream may be read before they are told; 0, where there
// are none, is the newest.
func (d *digests) until() uint64 {
	if d == nil {
		return 0
	}
	return d.at
}

// takeDigests finds out what workers hold at one position, without holding up any
// for another:
//
//  1. Each worker's digests are of its last entry, at a moment of its own.
//  2. The position is the newest of these entries, or the newest of all before, if
//     that is later: it is at or after where the stream stands.
//  3. A worker that had another entry up to there is left out. Only what was
//     appended since the beginning has to be looked at.
//
// The stream then reads up to that position, which may take a while where it is
// behind, and tells of them there.
func (c *cursor) takeDigests(ctx context.Context) (*digests, error) {
	j := c.server.journal
	begin := j.Bounds().Newest
	all, err := c.server.state.Digests(ctx, c.filter.worker, c.filter.tierSet())
	if err != nil {
		return nil, err
	}
	at := begin
	last := make(map[string]uint64) // by worker, the entry that its digests are of
	for _, d := range all {
		last[d.GetWorker()] = d.GetSeq()
		at = max(at, d.GetSeq())
	}
	forget := func(seq uint64, s *journal.Source, _ journal.Tiers) journal.Match {
		if of, ok := last[s.Worker]; ok && seq > of {
			delete(last, s.Worker)
		}
		return journal.MatchNone
	}
	for after := begin; after < at; {
		chunk, err := j.Read(journal.Query{After: after, Until: at, Filter: forget}, nil)
		if errors.Is(err, journal.ErrCompacted) {
			return &digests{at: c.seq}, nil // nothing is known for sure
		}
		if err != nil {
			return nil, err
		}
		after = chunk.Last
	}
	out := &digests{at: at}
	for _, d := range all {
		if _, ok := last[d.GetWorker()]; ok {
			out.workers = append(out.workers, d)
		}
	}
	return out, nil
}

// tell sends them, in a Progress or as many as it takes for each to be about as
// large as a response, a worker whole. There is always one.
func (d *digests) tell(c *cursor) error {
	for {
		n, bytes := 0, 0
		for n < len(d.workers) {
			size := proto.Size(d.workers[n]) + 4 // tag and length
			if first := n == 0 || d.workers[n-1].GetWorker() != d.workers[n].GetWorker(); first && n > 0 && bytes+size > c.server.cfg.ResponseBytes {
				break
			}
			bytes += size
			n++
		}
		if err := c.sendProgress(d.workers[:n]); err != nil {
			return err
		}
		if d.workers = d.workers[n:]; len(d.workers) == 0 {
			return nil
		}
	}
}
