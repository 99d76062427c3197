package ingest

import (
	"context"
	"slices"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/kvcast/kvcast/feed"
	"github.com/kvcast/kvcast/ingest/sequence"
	"github.com/kvcast/kvcast/ingest/wire"
)

// publisher runs the sequence.Machine of a source's engine at one dp rank: it gives the
// machine what arrives, and does what its actions demand. Batches, gaps and restarts go to
// the worker's lane.
//
// All its methods are called with the worker's mutex held.
type publisher struct {
	worker *worker
	source int
	// rank is that of batches that name none.
	rank     uint32
	copyRule feed.CopyRule
	machine  *sequence.Machine
	// rules are the source's, shared by the publishers of its ranks.
	rules *wire.Rules

	// ranks are those of its batches: one as a rule. Where there are more, a gap may
	// concern each of them.
	ranks []uint32
	// otherRankLogged reports whether batches may name another rank than rank, or it was
	// logged that they do.
	otherRankLogged bool
	// incomplete reports whether batches of this incarnation are missing. They may be of a
	// rank that is yet to be named.
	incomplete bool
	// before are the seqs that were published before first contact.
	before struct{ first, last uint64 }

	// peer is a listener's connection that batches arrive by, and otherPeer another one
	// that they arrived by before, and that is still open; nil where there is none.
	peer, otherPeer *peer
	// replayOf returns the replay endpoint behind a listener's peer; empty where there is
	// none.
	replayOf func(*peer) string
	// renew has the connection made anew: in the place of the present one, or beside it.
	// It is nil where the engine makes the connections.
	renew func(beside bool)
	// cancelReplay ends the replay request in progress; nil where there is none.
	cancelReplay context.CancelFunc

	// replayErr is why the last request failed; nil if it did not. repairEnded is called
	// with it when a repair ends that failed, and with nil when one is done; nil where
	// nobody wants to know.
	replayErr   error
	repairEnded func(error)

	// timer calls the machine's Tick. It is due at timerAt, or not before the machine's
	// deadline.
	timer   *time.Timer
	timerAt time.Time

	state   SourceState
	status  *sourceEntry
	lastSeq prometheus.Gauge // nil until a batch was read
}

// newPublisher adds the publisher of a source at a dp rank to a worker. renew is nil
// where the engine makes the connections.
func newPublisher(w *worker, source int, about SourceStatus, renew func(beside bool)) *publisher {
	about.Worker = w.desc.Name
	p := &publisher{
		worker: w,
		source: source,
		rank:   about.Rank,
		status: w.shared.sources.add(about),
		rules:  w.rulesOf(source),
		renew:  renew,
		machine: sequence.New(sequence.Config{
			FirstSeq: about.Engine.FirstSeq(), Silence: w.shared.silence, Grace: w.shared.grace,
			CanReconnect: renew != nil, Budget: w.shared.budgets.reordered, Jitter: jitter,
		}),
	}
	p.updateState()
	w.publishers = append(w.publishers, p)
	return p
}

// connect gives the machine a new connection. It adds the worker to the stream.
func (p *publisher) connect(in *intake, id sequence.ConnectionID, replay string) {
	p.worker.enter()
	now := time.Now()
	p.apply(in, now, p.machine.Connect(now, sequence.Connection{ID: id, Replay: replay}))
	p.status.setReplay(p.machine.ReplayEndpoint())
}

func (p *publisher) disconnect(in *intake, id sequence.ConnectionID) {
	now := time.Now()
	p.apply(in, now, p.machine.Disconnect(now, id))
	p.status.setReplay(p.machine.ReplayEndpoint())
}

// arrive gives the machine the batch that the intake has decoded.
func (p *publisher) arrive(in *intake, now time.Time, via sequence.ConnectionID) {
	p.apply(in, now, p.machine.Arrival(now, via, &in.arrival))
}

// connectedBy notes the connection of a listener's message, before its batch arrives; nil
// is one that is closed.
func (p *publisher) connectedBy(in *intake, c *peer) {
	switch c {
	case nil:
		if !p.machine.Connected() {
			p.worker.reached = true
			p.worker.updateConnections()
		}
	case p.peer:
	case p.otherPeer:
		p.peer, p.otherPeer = p.otherPeer, p.peer
	default:
		if p.otherPeer != nil {
			delete(p.otherPeer.publishers, p)
		}
		c.publishers[p] = struct{}{}
		p.peer, p.otherPeer = c, p.peer
		p.connect(in, c.id, p.replayOf(c))
		p.worker.updateConnections()
	}
}

// closedBy notes that a listener's connection is closed.
func (p *publisher) closedBy(in *intake, c *peer) {
	switch c {
	case p.otherPeer:
		p.otherPeer = nil
	case p.peer:
		p.peer, p.otherPeer = p.otherPeer, nil
	default:
		return
	}
	p.disconnect(in, c.id)
	p.worker.updateConnections()
}

// updateState publishes the state for Ingest.Sources and the metrics.
func (p *publisher) updateState() {
	p.setState(sourceState(p.machine))
}

// sourceState returns what a machine's state is called outside.
func sourceState(m *sequence.Machine) SourceState {
	switch s := m.State(); {
	case s == sequence.Suspect:
		return SourceSuspect
	case !m.Connected():
		return SourceConnecting
	case s == sequence.Starting && m.Replaying():
		return SourceCatchingUp
	case s == sequence.Repairing:
		return SourceRepairing
	default:
		return SourceLive
	}
}

func (p *publisher) setState(s SourceState) {
	if p.state == s || p.state == SourceStopped {
		return
	}
	p.worker.shared.metrics.move(p.state, s)
	p.state = s
	p.status.state.Store(uint32(s))
}

// schedule sets the timer for the machine's deadline. A timer that is due earlier is left:
// most deadlines move with every batch.
func (p *publisher) schedule(now time.Time) {
	at := p.machine.Deadline()
	if at.IsZero() || !p.timerAt.IsZero() && !at.Before(p.timerAt) {
		return
	}
	p.timerAt = at
	if p.timer == nil {
		p.timer = time.AfterFunc(at.Sub(now), p.tick)
	} else {
		p.timer.Reset(at.Sub(now))
	}
}

// tick is called by the timer, without the worker's mutex.
func (p *publisher) tick() {
	in := p.worker.shared.intake()
	defer p.worker.shared.giveBack(in)
	p.worker.mu.Lock()
	defer p.worker.mu.Unlock()
	p.timerAt = time.Time{}
	if p.worker.closed || p.worker.lane == nil {
		return
	}
	now := time.Now()
	p.apply(in, now, p.machine.Tick(now, p.worker.connected()))
}

// reset forgets the engine, whose worker has left the stream.
func (p *publisher) reset() {
	p.machine.Reset()
	p.endReplay()
	for _, r := range p.ranks {
		p.rules.Reset(r)
	}
	p.ranks = nil
	p.forgetIncarnation()
	p.status.started.Store(false)
	p.updateState()
}

func (p *publisher) forgetIncarnation() {
	p.incomplete = false
	p.before.first, p.before.last = 0, 0
}

// stop ends the reading of the publisher.
func (p *publisher) stop() {
	p.machine.Reset()
	p.endReplay()
	if p.timer != nil {
		p.timer.Stop()
	}
	p.setState(SourceStopped)
}

// forget removes a stopped publisher from what is counted and listed.
func (p *publisher) forget() {
	p.worker.shared.metrics.move(p.state, 0)
	p.worker.shared.sources.remove(p.status)
	p.worker.shared.budgets.sources.Release(1)
}

func (p *publisher) endReplay() {
	if p.cancelReplay != nil {
		p.cancelReplay()
		p.cancelReplay = nil
	}
}

// rankOf returns the dp rank of the intake's batch.
func (p *publisher) rankOf(in *intake, now time.Time) uint32 {
	switch {
	case in.err != nil && len(p.ranks) > 0:
		return p.ranks[0]
	case in.err != nil || !in.batch.HasRank:
		return p.rank
	}
	rank := in.batch.Rank
	if rank != p.rank && !p.otherRankLogged {
		// The batch is believed, but engines that name the same rank count as one cache.
		p.otherRankLogged = p.worker.warn(logRank, now, "batch names another dp rank than its endpoint", "source", p.source,
			"rank", p.rank, "batch_rank", rank, "hint", "caches of engines that name the same rank are mixed: check dp_size and the endpoint")
	}
	return rank
}

// addRank adds a rank to those of the publisher. It reports false where the worker may
// have no more.
func (p *publisher) addRank(now time.Time, rank uint32) bool {
	if slices.Contains(p.ranks, rank) {
		return true
	}
	if !p.worker.admitRank(rank) {
		return false
	}
	p.ranks = append(p.ranks, rank)
	if p.incomplete {
		p.joinedLate(now, rank)
	}
	return true
}

// joinedLate reports that a rank may hold blocks of batches that were not read.
func (p *publisher) joinedLate(now time.Time, rank uint32) {
	p.worker.lane.Gap(feed.Gap{
		Source: p.source, Rank: rank, Reason: feed.GapJoinedLate,
		FirstSeq: p.before.first, LastSeq: p.before.last, At: now.UnixNano(),
	})
}
