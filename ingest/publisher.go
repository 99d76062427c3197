package ingest

import (
	"bytes"
	"context"
	"net/netip"
	"slices"
	"time"

	"github.com/kvcast/kvcast/ingest/config"
	"github.com/kvcast/kvcast/ingest/internal/sequence"
	"github.com/kvcast/kvcast/internal/budget"
	"github.com/kvcast/kvcast/internal/feed"
	"github.com/kvcast/kvcast/internal/wire"
)

// publisher runs the sequence.Machine of a source at one dp rank: it passes inputs to the machine and
// executes the machine's actions. Batches, gaps and restarts go to the worker's lane.
//
// All its methods except tick are called with the worker's mutex held.
type publisher struct {
	worker *worker
	source int
	// rank is the dp rank of batches that have no rank.
	rank     uint32
	copyRule feed.CopyRule
	relayed  bool   // by a server that leaves events out without telling
	unsure   string // why its blocks may not be held; empty if they are
	machine  *sequence.Machine
	// rules are shared by the publishers of the source's ranks.
	rules *wire.Rules

	// ranks are the ranks of its batches, usually one. If there are more, a gap is reported for each of them.
	ranks []uint32
	// rankMismatchLogged reports whether no log line is needed when a batch names another rank than rank.
	rankMismatchLogged bool
	// connectorLogged has the doubts that have been logged of connectors.
	connectorLogged wire.Doubts
	// incomplete reports whether batches of this incarnation are missing. A rank that is named later is then reported as joined late.
	incomplete bool
	// before are the seqs that were published before first contact.
	before struct{ first, last uint64 }

	storedState
	peerOrigin
	// reconnect closes the connection and opens another, or opens a replacement first. It is nil if the engine opens the connections.
	reconnect func(replacement bool)
	// attempt makes the next attempt to connect begin at once, unless one is in progress, and calls failed with the worker's mutex
	// held if it fails. It is nil if the engine opens the connections.
	attempt func(failed func())
	// cancelReplay ends the replay request in progress; nil if there is none.
	cancelReplay context.CancelFunc

	replayOutcome
	// tooLong is the transport.ErrTooLong since the last loss was reported or a repair brought everything; nil if there was none.
	tooLong error

	// timer calls tick at timerAt, which is not after the machine's deadline. timerAt is zero if the timer is not running.
	timer   *time.Timer
	timerAt time.Time

	shown
}

// storedState is what the journal has of a publisher.
type storedState struct {
	// cursor is the machine's after the last action. encoded is the cursor of the last complete call of the lane; empty before the first.
	// described reports whether the stored state says where the publisher comes from. They are used if the journal is durable.
	cursor    sequence.Cursor
	encoded   []byte
	described bool
}

// peerOrigin is where the batches of an engine come from that connects to a listener.
type peerOrigin struct {
	// address is where the first batch came from, and topic its topic, if the engine connects to a listener.
	address netip.Addr
	topic   string
	// namesPod reports whether a topic had llm-d's form.
	namesPod bool
	// replayOf returns the replay endpoint of a listener's peer; empty if it has none. It is nil unless the engine connects to a listener.
	replayOf func(*peer) string
}

// replayOutcome is how the last request to the replay socket ended.
type replayOutcome struct {
	// replayErr is the error of the last request; nil if it succeeded. repairEnded, if not nil, is
	// called when a repair ends: with nil after success, and with replayErr otherwise.
	replayErr   error
	repairEnded func(error)
}

// shown is what SourceStatus has. The endpoint and the state of the replay socket are the machine's.
type shown struct {
	replayEndpoint string
	replayState    ReplayState
	status         *sourceEntry
}

// podTopic begins topics that name a pod, as those of llm-d do.
var podTopic = []byte("kv@")

// newPublisher adds the publisher of a source at a dp rank to a worker. reconnect is nil if the engine opens the connections.
func newPublisher(w *worker, source int, status SourceStatus, reconnect func(replacement bool)) *publisher {
	status.Worker = w.desc.Name
	silence := w.shared.config.Silence
	// A server that is called is not tested by opening another connection: TCP notices the end of a call of gRPC, which is another subscriber of the
	// engine, and a list of objects is read again and again.
	if e, _ := config.ParseSource(status.Endpoint); e.Called() {
		silence = 0
	}
	p := &publisher{
		worker:    w,
		source:    source,
		rank:      status.Rank,
		shown:     shown{replayState: ReplayNone, status: w.shared.sources.add(source, status)},
		rules:     w.rulesOf(source),
		reconnect: reconnect,
		machine: sequence.New(sequence.Config{
			FirstSeq: status.Engine.FirstSeq(), Silence: silence, Grace: w.shared.config.Grace,
			Patience: w.shared.config.ReplayPatience, CanReconnect: reconnect != nil, Budget: w.budgets.reordered, Jitter: jitter,
		}),
	}
	p.updateStatus()
	w.publishers = append(w.publishers, p)
	return p
}

// connect passes a new connection to the machine. It adds the worker to the stream if needed.
func (p *publisher) connect(c sequence.Connection) {
	p.worker.enter()
	now := time.Now()
	p.apply(now, p.machine.Connect(now, c))
}

func (p *publisher) disconnect(id sequence.ConnectionID) {
	now := time.Now()
	p.apply(now, p.machine.Disconnect(now, id))
}

// arrive decodes the batch that the intake has opened, and passes it to the machine.
func (p *publisher) arrive(in *intake, now time.Time, via sequence.ConnectionID) {
	in.load()
	p.namesPod = p.namesPod || bytes.HasPrefix(in.topic, podTopic)
	p.applyWith(in, now, p.machine.Arrival(now, via, &in.arrival))
}

// updateStatus updates the state, and the endpoint and state of the replay socket, for Ingest.Sources and the metrics. Before
// the first connection they are those of the configuration.
func (p *publisher) updateStatus() {
	p.setState(sourceState(p.machine))
	if s, endpoint := p.machine.ReplayState(), p.machine.ReplayEndpoint(); s != p.replayState || endpoint != p.replayEndpoint {
		p.replayState, p.replayEndpoint = s, endpoint
		p.status.update(func(of *SourceStatus) { of.ReplayState, of.Replay = s, endpoint })
	}
}

// sourceState returns the SourceState of a machine.
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
	was, downSince := p.status.State, p.status.DownSince
	if was == s || was == SourceStopped {
		return
	}
	now := time.Now()
	p.worker.shared.metrics.changeState(was, s)
	p.status.update(func(of *SourceStatus) {
		of.State = s
		of.DownSince = since(of.DownSince, s.down(), now)
		of.BehindSince = since(of.BehindSince, s.behind(), now)
	})
	switch {
	case was.down() && !s.down():
		p.observeConnection(true, now.Sub(downSince))
	case was != 0 && !was.down() && s.down() && s != SourceStopped:
		p.observeConnection(false, 0)
	}
}

// since returns since when something is so, which was zero if it was not so before.
func since(before time.Time, is bool, now time.Time) time.Time {
	switch {
	case !is:
		return time.Time{}
	case before.IsZero():
		return now
	default:
		return before
	}
}

// observeConnection notifies the observer that there is a connection after some time without, or that it is lost.
func (p *publisher) observeConnection(up bool, after time.Duration) {
	if o := p.worker.shared.config.Observer; o != nil {
		o.ConnectionChanged(p.worker.desc.Name, p.rank, up, after)
	}
}

// schedule sets the timer for the machine's deadline. A timer that fires earlier is kept, because most deadlines move with every batch.
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
	p.worker.mu.Lock()
	defer p.worker.mu.Unlock()
	p.timerAt = time.Time{}
	if p.worker.inStream() && !p.worker.ending {
		now := time.Now()
		p.apply(now, p.machine.Tick(now, p.worker.connected()))
	}
}

// reset forgets everything about the engine except its connections, because the worker has left the stream.
func (p *publisher) reset() {
	p.machine.Reset()
	p.endReplay()
	for _, r := range p.ranks {
		p.rules.Reset(r)
	}
	p.setRanks(nil)
	p.forgetIncarnation()
	p.cursor, p.encoded, p.described = sequence.Cursor{}, nil, false
	p.status.update(func(s *SourceStatus) { s.Started = false })
	p.updateStatus()
}

func (p *publisher) forgetIncarnation() {
	p.incomplete = false
	p.before.first, p.before.last = 0, 0
}

// stop stops the reading of the publisher.
func (p *publisher) stop() {
	p.machine.Reset()
	p.endReplay()
	if p.timer != nil {
		p.timer.Stop()
	}
	p.setState(SourceStopped)
}

// release removes a stopped publisher from the metrics, Ingest.Sources and the budget.
func (p *publisher) release() {
	p.worker.shared.metrics.changeState(p.status.State, 0)
	p.worker.shared.sources.remove(p.status)
	p.worker.shared.budgets.sources.Release(1)
	if p.replayOf != nil {
		p.worker.shared.addresses.Release(budget.AddressOf(p.address), 1)
	}
}

func (p *publisher) endReplay() {
	if p.cancelReplay != nil {
		p.cancelReplay()
		p.cancelReplay = nil
	}
}

// rankOf returns the dp rank of the batch that the intake has decoded.
func (p *publisher) rankOf(in *intake) uint32 {
	switch {
	case in.err != nil && len(p.ranks) > 0:
		return p.ranks[0]
	case in.err != nil || !in.batch.HasRank:
		return p.rank
	}
	rank := in.batch.Rank
	if rank != p.rank && !p.rankMismatchLogged {
		// The rank in the batch is used, but engines that name the same rank count as one cache.
		p.rankMismatchLogged = true
		p.warn("batch names another dp rank than its endpoint",
			"batch_rank", rank, "hint", "caches of engines that name the same rank are mixed: check dp_size and the endpoint")
	}
	return rank
}

// addRank adds a rank to the publisher's. It returns false if the worker may not have more ranks.
func (p *publisher) addRank(now time.Time, rank uint32) bool {
	if slices.Contains(p.ranks, rank) {
		return true
	}
	if !p.worker.admitRank(rank) {
		return false
	}
	p.setRanks(append(p.ranks, rank))
	if p.incomplete {
		p.reportJoinedLate(now, rank)
	}
	if p.sharesRank(rank) {
		p.warn("two publishers of a source name the same dp rank: their caches are mixed", "batch_rank", rank,
			"hint", "check dp_size and first_rank; engines of different ranks that all name one are workers of their own")
		p.worker.metrics.inc(conflictsTotal)
		p.reportMixed(now, rank, false)
	}
	return true
}

// setRanks sets the ranks that batches have named.
func (p *publisher) setRanks(ranks []uint32) {
	p.ranks = ranks
	p.status.update(func(s *SourceStatus) { s.Named = slices.Clone(ranks) })
}

// sharesRank reports whether another publisher of the source has named the dp rank.
func (p *publisher) sharesRank(rank uint32) bool {
	return slices.ContainsFunc(p.worker.publishers, func(q *publisher) bool {
		return q != p && q.source == p.source && slices.Contains(q.ranks, rank)
	})
}

// mixed reports whether the batches of a rank are of two publishers.
func (p *publisher) mixed(rank uint32) bool {
	return p.machine.State() == sequence.Conflicted || p.sharesRank(rank)
}

// reportMixed reports that the batches of a rank are of two publishers. A clear or restart of one does not end it. last
// reports whether no batch follows.
func (p *publisher) reportMixed(now time.Time, rank uint32, last bool) {
	p.worker.lane.Gap(feed.Gap{
		Source: p.source, Rank: rank, Reason: feed.GapAmbiguousPublisher, At: now.UnixNano(), Progress: p.progress(last),
	})
}

// reportJoinedLate reports that a rank may have blocks of batches that were not read.
func (p *publisher) reportJoinedLate(now time.Time, rank uint32) {
	p.worker.lane.Gap(feed.Gap{
		Source: p.source, Rank: rank, Reason: feed.GapJoinedLate,
		FirstSeq: p.before.first, LastSeq: p.before.last, At: now.UnixNano(),
		Progress: p.progress(false), // the batch follows
	})
}

// warn logs a warning about the publisher.
func (p *publisher) warn(msg string, args ...any) {
	p.worker.log.Warn(msg, append([]any{"source", p.source, "rank", p.rank}, args...)...)
}
