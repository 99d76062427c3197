package ingest

import (
	"math"
	"slices"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/zeebo/xxh3"

	"github.com/kvcast/kvcast/ingest/wire"
)

// publisher is what gives batches one run of seqs: a source's engine of one dp
// rank. Batches flow in as they come; into the worker's lane they go in the
// engine's order, each once, and with them what the engine's life and losses
// mean.
//
// A rule that holds throughout: for every seq of an engine's life up to the
// last one read, the lane gets the batch, a Gap that covers it, or, for those
// before first contact, Incomplete. Only batches of a rank beyond what the
// worker may have are dropped without, as there is no one to tell.
type publisher struct {
	worker *worker
	source int
	// rank is that of batches that name none.
	rank uint32
	// rankTold tells that batches may name another, or that it was logged that they
	// do.
	rankTold bool
	// ranks are those of its batches. There is one, as a rule; where there are
	// more, a loss may concern any.
	ranks []uint32
	state SourceState
	seq   sequencer
	// lossy tells that batches of this life of the engine are missing, which are
	// as likely to be of a rank that is yet to be heard of.
	lossy bool
	// rules are the source's, shared by the publishers of its ranks.
	rules *wire.Rules
	// epoch names the engine's life; empty where the engine does not say.
	epoch string

	posted  *posted
	metrics *metrics
	lastSeq prometheus.Gauge // nil until live
}

// newPublisher makes the publisher of a source at a dp rank, which posts how it
// is doing.
func newPublisher(w *worker, source int, on *board, about SourceStatus, m *metrics) *publisher {
	about.Worker = w.name
	p := &publisher{
		worker:  w,
		source:  source,
		rank:    about.Rank,
		posted:  on.post(about),
		seq:     sequencer{start: about.Engine.firstSeq()},
		rules:   w.rulesOf(source),
		metrics: m,
	}
	p.become(SourceConnecting)
	return p
}

// become enters a state.
func (p *publisher) become(s SourceState) {
	p.metrics.move(p.state, s)
	p.state = s
	p.posted.state.Store(uint32(s))
}

// message takes a message of a socket that only this publisher sends to.
func (p *publisher) message(in *intake, m *message) {
	a, why, ok := m.open(&in.decoder)
	if !ok {
		p.worker.refuse(why, in.now())
		return
	}
	p.take(in, &a)
}

// take takes the next batch, or what does not decode in its place.
//
//  1. What the sequencer says of it is told: a duplicate ends here; of a restart
//     each rank that was heard of is told first.
//  2. What is missing is told as one Gap: the batches before it, and it as well
//     if it does not decode, since no replay would give it in another form.
//     After a restart the Gap is from the first seq of the new life, and the
//     ranks are incomplete as at first contact, where only that is told.
//  3. What is left of it goes to the lane.
func (p *publisher) take(in *intake, a *arrival) {
	now := in.now()
	rank := p.rank
	fp := fingerprint{hash: xxh3.Hash(a.payload)}
	if a.err == nil {
		fp.time = math.Float64bits(a.batch.Time)
		if a.batch.HasRank {
			rank = a.batch.Rank
		}
		if rank != p.rank && !p.rankTold {
			p.otherRank(now, rank)
		}
	} else if len(p.ranks) > 0 {
		rank = p.ranks[0]
	}
	v, missing := p.seq.admit(a.seq, fp, p.newEpoch(a.epoch))
	switch v {
	case verdictDuplicate:
		p.worker.metrics.duplicates.Inc()
		return
	case verdictFirst:
		p.begin(a.seq, missing)
		missing = seqRange{}
	case verdictRestart:
		p.restart(now, a.seq, missing)
	case verdictNext, verdictGap:
	}
	p.lastSeq.Set(float64(a.seq))
	p.posted.lastSeq.Store(a.seq)
	known := p.know(rank)
	if a.err != nil {
		missing = missing.through(a.seq)
		p.reject(now, a.seq, a.err)
	}
	if missing.count > 0 {
		p.gap(now, missing)
	}
	switch {
	case a.err != nil:
	case !known:
		p.rules.SkipRaw(1)
		p.worker.refuse(refusedRanks, now)
	default:
		p.batch(in, now, rank, a)
	}
}

// stop ends the reading of the publisher.
func (p *publisher) stop() { p.become(SourceStopped) }

// begin makes the first batch the beginning. What the engine said before is
// no gap, as nobody was listening, but its rank may hold what it stored then.
func (p *publisher) begin(seq uint64, missing seqRange) {
	p.lossy = missing.count > 0
	p.lastSeq = p.worker.metrics.lastSeq(p.source, p.rank)
	p.become(SourceLive)
	p.posted.started.Store(true)
	args := []any{"source", p.source, "rank", p.rank, "seq", seq, "incomplete", p.lossy}
	if seq == EngineLLMDSim.firstSeq() && p.lossy {
		args = append(args, "hint", "an llm-d simulator starts at 1: set engine to llm-d-sim if it is one")
	}
	p.worker.log.Info("first batch read", args...)
}

// restart begins a new life of the engine.
func (p *publisher) restart(now time.Time, seq uint64, missing seqRange) {
	p.worker.forgetBlockSize()
	p.worker.metrics.restarts.Inc()
	p.worker.warn(noticeRestart, now, "engine restarted", "source", p.source, "rank", p.rank, "seq", seq)
	p.lossy = missing.count > 0
	for _, r := range p.ranks {
		p.rules.Reset(r)
		p.worker.lane.Restarted(Restart{Source: p.source, Rank: r, At: now.UnixNano()})
		if p.lossy {
			p.worker.lane.Incomplete(r)
		}
	}
}

// know remembers a rank as one of this publisher's, and tells whether the
// worker may have it.
func (p *publisher) know(rank uint32) bool {
	if slices.Contains(p.ranks, rank) {
		return true
	}
	if !p.worker.admitRank(rank) {
		return false
	}
	p.ranks = append(p.ranks, rank)
	if p.lossy {
		p.worker.lane.Incomplete(rank)
	}
	return true
}

// otherRank warns of a batch that names another rank than its endpoint is said to
// be of. The batch is believed, but engines that name the same rank are taken
// for one cache.
func (p *publisher) otherRank(now time.Time, rank uint32) {
	p.rankTold = p.worker.warn(noticeRank, now, "batch names another dp rank than its endpoint", "source", p.source,
		"rank", p.rank, "batch_rank", rank, "hint", "caches of engines that name the same rank are mixed: check dp_size and the endpoint")
}

// reject counts a batch that does not decode.
func (p *publisher) reject(now time.Time, seq uint64, err error) {
	p.worker.metrics.reject(rejection(err))
	p.worker.warn(noticeRejected, now, "batch rejected", "source", p.source, "rank", p.rank, "seq", seq, "error", err)
}

// gap tells of batches that are lost. Nothing can be asked for them, so the
// reason is always that.
func (p *publisher) gap(now time.Time, missing seqRange) {
	p.lossy = true
	p.rules.SkipRaw(missing.count)
	p.worker.metrics.gap(missing.count)
	p.worker.warn(noticeGap, now, "batches lost", "source", p.source, "rank", p.rank,
		"first_seq", missing.first, "last_seq", missing.last)
	for _, r := range p.ranks {
		p.worker.lane.Gap(Gap{
			Source:   p.source,
			Rank:     r,
			Reason:   GapReplayUnavailable,
			FirstSeq: missing.first,
			LastSeq:  missing.last,
			Missed:   missing.count,
			At:       now.UnixNano(),
		})
	}
}

// batch hands a batch on.
func (p *publisher) batch(in *intake, now time.Time, rank uint32, a *arrival) {
	b := a.batch
	p.rules.Admit(b, rank, &in.counts)
	p.worker.metrics.batch(b.Events, &in.counts)
	in.out = Batch{
		Source:     p.source,
		Rank:       rank,
		Seq:        a.seq,
		IngestTime: now.UnixNano(),
		Events:     b.Events,
	}
	if b.HasTime {
		in.out.EngineTime = unixNano(b.Time)
	}
	p.worker.lane.Batch(&in.out)
	in.out.Events = nil // they are the decoder's, which may be about to let go of them
}

// newEpoch tells whether this is another life of the engine than the last batch
// was of. Engines that name none are of one epoch, the empty one.
func (p *publisher) newEpoch(epoch []byte) bool {
	if string(epoch) == p.epoch {
		return false
	}
	p.epoch = string(epoch)
	return true
}

// unixNano returns a time in nanoseconds; 0 for one that has none.
func unixNano(seconds float64) int64 {
	whole, fraction := math.Modf(seconds)
	if math.Abs(whole) >= math.MaxInt64/1e9-1 {
		return 0
	}
	return int64(whole)*1e9 + int64(math.Round(fraction*1e9))
}
