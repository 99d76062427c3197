package ingest

import (
	"math"
	"slices"
	"time"

	"github.com/kvcast/kvcast/feed"
)

// What a publisher tells its lane.

// begin makes a batch the first of an incarnation, and returns what has to be reported
// as lost of it. At first contact that is nothing: what the engine published before is
// not lost, as nobody was listening. Its ranks joined late instead, since they may hold
// what it stored then.
func (p *publisher) begin(now time.Time, seq uint64, missing seqRange) seqRange {
	p.seq.open()
	p.lossy = missing.count > 0
	args := []any{"source", p.source, "rank", p.rank, "seq", seq, "incomplete", p.lossy}
	if seq == feed.EngineLLMDSim.FirstSeq() && p.lossy {
		args = append(args, "hint", "the engine's first batch, 0, was not heard; if it is an llm-d simulator, whose first is 1, set engine to llm-d-sim")
	}
	p.worker.log.Info("first batch read", args...)
	if !p.lossy {
		return seqRange{}
	}
	if p.reborn {
		return missing
	}
	p.unheard = missing
	for _, r := range p.ranks {
		p.joinedLate(now, r)
	}
	p.seq.lose(missing.last)
	return seqRange{}
}

// restart tells that the engine began anew, as a batch shows.
func (p *publisher) restart(now time.Time, a *arrival) {
	p.worker.warn(noticeRestart, now, "engine restarted", "source", p.source, "rank", p.rank, "seq", a.seq)
	p.restarted(now)
}

// restarted tells that the engine began anew.
func (p *publisher) restarted(now time.Time) {
	p.worker.blockSize.Forget() // the engine may have been configured anew
	p.worker.metrics.restarts.Inc()
	for _, r := range p.ranks {
		p.rules.Reset(r)
		p.worker.lane.Restarted(feed.Restart{Source: p.source, Rank: r, At: now.UnixNano()})
	}
	p.rivals.succeed(p.seq.last, p.identity)
	p.held.dropBefore(p.connection)
	p.owes, p.owed = false, 0
	p.forgetLife()
}

// lose tells of batches that are lost, and makes the last of them the last read.
// Without any, something may be.
func (p *publisher) lose(now time.Time, missing seqRange, why feed.GapReason) {
	if len(p.ranks) == 0 {
		p.know(now, p.rank) // the Gap is of some rank
	}
	p.lossy = true
	p.rules.SkipRaw(missing.count)
	p.worker.metrics.gap(missing.count)
	p.worker.warn(noticeGap, now, "batches lost", "source", p.source, "rank", p.rank, "reason", why.String(),
		"missed", missing.count, "first_seq", missing.first, "last_seq", missing.last)
	for _, r := range p.ranks {
		p.worker.lane.Gap(feed.Gap{
			Source:   p.source,
			Rank:     r,
			Reason:   why,
			FirstSeq: missing.first,
			LastSeq:  missing.last,
			Missed:   missing.count,
			At:       now.UnixNano(),
		})
	}
	if missing.count > 0 {
		p.seq.lose(missing.last)
	}
}

// accept makes a batch the last one read, and hands it on. One that does not
// decode was told as lost.
func (p *publisher) accept(in *intake, now time.Time, a *arrival) {
	p.seq.take(a.seq, a.print)
	p.doubted = false
	p.endOverrun()
	p.identity.learn(a)
	p.note(a.seq)
	if a.err != nil {
		return
	}
	rank := p.rankOf(now, a)
	if !p.know(now, rank) {
		p.rules.SkipRaw(1)
		p.worker.refuse(refusedRanks, now)
		return
	}
	p.batch(in, now, rank, a)
}

// note posts the last seq.
func (p *publisher) note(seq uint64) {
	if p.lastSeq == nil {
		p.lastSeq = p.worker.metrics.lastSeq(p.source, p.rank)
	}
	p.lastSeq.Set(float64(seq))
	p.posted.lastSeq.Store(seq)
	p.posted.started.Store(true)
}

// rankOf returns the dp rank of a batch.
func (p *publisher) rankOf(now time.Time, a *arrival) uint32 {
	switch {
	case a.err != nil && len(p.ranks) > 0:
		return p.ranks[0]
	case a.err != nil || !a.batch.HasRank:
		return p.rank
	}
	if rank := a.batch.Rank; rank != p.rank && !p.rankTold {
		p.otherRank(now, rank)
	}
	return a.batch.Rank
}

// know remembers a rank as one of this publisher's, and tells whether the
// worker may have it.
func (p *publisher) know(now time.Time, rank uint32) bool {
	if slices.Contains(p.ranks, rank) {
		return true
	}
	if !p.worker.admitRank(rank) {
		return false
	}
	p.ranks = append(p.ranks, rank)
	if p.lossy {
		p.joinedLate(now, rank)
	}
	return true
}

// joinedLate reports that a rank may hold blocks of batches that nobody read.
func (p *publisher) joinedLate(now time.Time, rank uint32) {
	p.worker.lane.Gap(feed.Gap{
		Source: p.source, Rank: rank, Reason: feed.GapJoinedLate,
		FirstSeq: p.unheard.first, LastSeq: p.unheard.last, At: now.UnixNano(),
	})
}

// otherRank warns of a batch that names another rank than its endpoint is said to
// be of. The batch is believed, but engines that name the same rank are taken
// for one cache.
func (p *publisher) otherRank(now time.Time, rank uint32) {
	p.rankTold = p.worker.warn(noticeRank, now, "batch names another dp rank than its endpoint", "source", p.source,
		"rank", p.rank, "batch_rank", rank, "hint", "caches of engines that name the same rank are mixed: check dp_size and the endpoint")
}

// reject counts a batch that does not decode.
func (p *publisher) reject(now time.Time, a *arrival) {
	p.worker.metrics.reject(rejection(a.err))
	p.worker.warn(noticeRejected, now, "batch rejected", "source", p.source, "rank", p.rank, "seq", a.seq, "error", a.err)
}

// batch hands a batch on.
func (p *publisher) batch(in *intake, now time.Time, rank uint32, a *arrival) {
	b := a.batch
	p.rules.Admit(b, rank, &in.counts)
	p.worker.metrics.batch(b.Events, &in.counts)
	if size := p.rules.ForeignHostBlockSize(); size != 0 {
		p.worker.warn(noticeForeignHost, now, "stores in host memory skipped: not the worker's block size", "source", p.source, "rank", rank,
			"block_size", size, "want", p.worker.blockSize.Tokens, "hint", "LMCache stores chunks: set its chunk_size to the worker's block size")
	}
	in.out = feed.Batch{
		Source:     p.source,
		Rank:       rank,
		Seq:        a.seq,
		CopyRule:   p.copyRule,
		IngestTime: now.UnixNano(),
		Events:     b.Events,
	}
	if b.HasTime {
		in.out.EngineTime = unixNano(b.Time)
	}
	p.worker.lane.Batch(&in.out)
	in.out.Events = nil // they are the decoder's, which may be about to let go of them
}

// unixNano returns a time in nanoseconds; 0 for one that has none.
func unixNano(seconds float64) int64 {
	whole, fraction := math.Modf(seconds)
	if math.Abs(whole) >= math.MaxInt64/1e9-1 {
		return 0
	}
	return int64(whole)*1e9 + int64(math.Round(fraction*1e9))
}
