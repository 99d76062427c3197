// Package sequence puts the batches of one publisher in order.
//
// Into a Machine flow the batches of an engine's dp rank as they arrive, the replies of
// its replay socket, what happens to its connections, and the time. Out of it flow
// actions: deliver a batch, report a gap, a restart or a conflict, request a replay,
// renew the connection.
//
// The guarantee: for every seq of an incarnation up to the last one read there is a
// Deliver or a ReportGap that covers it, in order and once; for those before first
// contact the ReportBegin. What can be had from the replay socket is not reported as
// lost. Where it cannot be known whether the engine restarted, that is reported.
//
// A Machine is pure: it uses no socket, clock, lock, log or metric, and its inputs decide
// everything. It is not safe for concurrent use.
package sequence

import (
	"time"

	"github.com/kvcast/kvcast/feed"
)

// State is what a Machine does with the next live batch.
type State uint8

// The states.
const (
	// Starting: nothing of the incarnation has been read. With a replay socket a full
	// replay is in progress, and live batches are buffered.
	Starting State = iota
	// Live: batches are delivered as they arrive.
	Live
	// Repairing: a replay is in progress from the last batch read, and live batches are
	// buffered.
	Repairing
	// Verifying: after a silence the last batch is requested, to find out whether the
	// connection or the engine is silent. Live batches are buffered.
	Verifying
	// Conflicted: two publishers share the topic and rank. Batches are delivered as they
	// arrive, in no order.
	Conflicted
	// Suspect: the connection was silent, and the engine did not answer. Otherwise as
	// Live, or as Verifying while it is asked again.
	Suspect
)

// String returns the state's name.
func (s State) String() string {
	return [...]string{"starting", "live", "repairing", "verifying", "conflicted", "suspect"}[s]
}

// Config is what a Machine needs to know.
type Config struct {
	// FirstSeq is the seq of an incarnation's first batch.
	FirstSeq uint64
	// FromFirst reports whether the first batch to read is that of FirstSeq: those missing
	// from there on are lost. Otherwise it is the first one that arrives.
	FromFirst bool
	// Silence is how long a connection may be silent before it is verified; 0 means for
	// ever.
	Silence time.Duration
	// Grace is how long a publisher may have no connection before that is reported.
	Grace time.Duration
	// Renews reports whether connections can be renewed; otherwise the engine makes them.
	Renews bool
	// Budget bounds the reorder buffer together with others; nil means unlimited.
	Budget Budget
	// Jitter varies the wait before a request is repeated; nil leaves it.
	Jitter func(time.Duration) time.Duration
}

// overrunPatience is how long the next batch has to show what was dropped before it.
const overrunPatience = 5 * time.Second

// replayHealth is how a replay socket has answered so far.
type replayHealth uint8

const (
	// replayUntried: it has never answered.
	replayUntried replayHealth = iota
	// replayResponsive: it answered when it was asked last.
	replayResponsive
	// replayUnresponsive: it has answered before, and did not when it was asked last.
	replayUnresponsive
)

// Machine orders the batches of one publisher. The zero Machine is not ready: see New.
type Machine struct {
	cfg         Config
	state       State
	order       order
	incarnation incarnation
	// restarts counts the incarnations before the present one.
	restarts uint64
	// former is the incarnation before the present one, or the seqs before a gap.
	former former

	// current is the connection on which batches arrive. other is an earlier connection that
	// is still open, if any. connections is the number of connections so far.
	current, other Connection
	connections    uint32
	heardAt        time.Time // of the last message or connection
	absentUntil    time.Time // end of the grace time; zero while it does not run

	replayEndpoint string
	replayHealth   replayHealth
	restUntil      time.Time // before then the replay socket is not asked
	repair         *repair   // nil where none is in progress
	requestID      uint64    // of the last request
	buffer         reorderBuffer
	// unbuffered is the highest seq that arrived and is neither read nor buffered.
	unbuffered    uint64
	hasUnbuffered bool

	conflict conflict
	// overrunPending reports whether messages were dropped since the last batch that was
	// read; overrunUntil is when that is reported, unless a batch shows what they were.
	overrunPending bool
	overrunUntil   time.Time
	// possibleRestartReported reports whether a possible restart was reported since the
	// last batch that was read.
	possibleRestartReported bool

	actions []Action
}

// New returns a Machine that knows nothing of its engine.
func New(c Config) *Machine {
	m := &Machine{cfg: c}
	m.order.first = c.FirstSeq
	if c.FromFirst {
		m.order.beginEmpty()
	}
	m.buffer.budget = c.Budget
	if m.cfg.Jitter == nil {
		m.cfg.Jitter = func(d time.Duration) time.Duration { return d }
	}
	return m
}

// State returns the present state.
func (m *Machine) State() State { return m.state }

// Connected reports whether there is a connection.
func (m *Machine) Connected() bool { return m.current.ID != 0 }

// Replaying reports whether a replay is in progress, so that live batches are buffered.
func (m *Machine) Replaying() bool { return m.repair != nil }

// ReplayEndpoint returns the endpoint of the replay socket; empty where there is none.
func (m *Machine) ReplayEndpoint() string { return m.replayEndpoint }

// begin starts an input.
func (m *Machine) begin() {
	const keep = 64 // a long flush must not keep its memory
	if cap(m.actions) > keep {
		m.actions = nil
	}
	clear(m.actions)
	m.actions = m.actions[:0]
}

func (m *Machine) emit(a Action) { m.actions = append(m.actions, a) }

// Connect is the input for a new connection, before the first batch that arrives by it. The
// connection before stays open until Disconnect. Batches may have been lost in between, and
// the engine may be another one.
func (m *Machine) Connect(now time.Time, c Connection) []Action {
	m.begin()
	m.other, m.current = m.current, c
	m.useReplay(c.Replay)
	m.absentUntil = time.Time{}
	first := m.connections == 0
	m.connections++
	m.heardAt = now
	m.conflict = conflict{}
	m.former = former{}
	m.restUntil = time.Time{}
	if m.state == Suspect || m.state == Conflicted {
		m.state = m.settledState()
	}
	if !m.order.reading() {
		m.hasUnbuffered = false // it may be of another incarnation
	}
	switch {
	case m.replayEndpoint != "" && first:
		m.startRepair(now, CauseStart)
	case m.replayEndpoint != "":
		m.startRepair(now, CauseReconnect)
	case !first && m.order.reading():
		m.reportGap(seqRange{}, feed.GapPossibleRestart, nil)
	}
	return m.actions
}

// Renewed is the input for a connection that has replaced the silent one.
func (m *Machine) Renewed(now time.Time, c Connection) []Action {
	m.begin()
	m.current = c
	m.heardAt = now
	return m.actions
}

// RenewFailed is the input when no connection was made beside the silent one.
func (m *Machine) RenewFailed() []Action {
	m.begin()
	m.suspect()
	return m.actions
}

// Disconnect is the input for a connection that was closed.
func (m *Machine) Disconnect(now time.Time, id ConnectionID) []Action {
	m.begin()
	switch id {
	case 0:
	case m.other.ID:
		m.other = Connection{}
		m.endConflictWith(now)
	case m.current.ID:
		m.current, m.other = m.other, Connection{}
		if m.current.ID == 0 {
			m.absentUntil = now.Add(m.cfg.Grace)
			break
		}
		m.useReplay(m.current.Replay)
		m.endConflictWith(now)
	}
	return m.actions
}

// useReplay makes an endpoint the one that is asked.
func (m *Machine) useReplay(endpoint string) {
	if endpoint != m.replayEndpoint {
		m.replayEndpoint, m.replayHealth = endpoint, replayUntried
	}
}

// Overrun is the input when messages may have been dropped after the last batch, as they
// arrived faster than they were processed.
func (m *Machine) Overrun(now time.Time) []Action {
	m.begin()
	switch {
	case m.overrunPending, m.state == Conflicted:
	case m.repair != nil:
		m.repair.recheck = max(m.repair.recheck, recheckOverrun)
	case m.replayable(now):
		m.startRepair(now, CauseGap)
	case m.order.reading():
		m.overrunPending, m.overrunUntil = true, now.Add(overrunPatience)
	}
	return m.actions
}

// Deadline returns when Tick is due; zero where there is nothing to wait for.
func (m *Machine) Deadline() time.Time {
	first := m.silentAt()
	if m.repair == nil && m.absentUntil.IsZero() && m.overrunUntil.IsZero() {
		return first // as after most batches
	}
	for _, t := range [...]time.Time{m.absentUntil, m.overrunUntil, m.retryAt()} {
		if !t.IsZero() && (first.IsZero() || t.Before(first)) {
			first = t
		}
	}
	return first
}

// silentAt returns when the connection has been silent for too long; zero where it never
// has.
func (m *Machine) silentAt() time.Time {
	if m.cfg.Silence <= 0 || !m.Connected() || m.replayEndpoint == "" && !m.cfg.Renews {
		return time.Time{}
	}
	return m.heardAt.Add(m.cfg.Silence)
}

// Tick is the input for the time at the Deadline. workerConnected reports whether any publisher of the worker has a
// connection: a worker without any is removed, rather than each of its publishers
// reported.
func (m *Machine) Tick(now time.Time, workerConnected bool) []Action {
	m.begin()
	due := func(t time.Time) bool { return !t.IsZero() && !now.Before(t) }
	if due(m.overrunUntil) {
		m.overrunUntil = time.Time{}
		m.reportGap(seqRange{}, feed.GapReplayUnavailable, nil)
	}
	if due(m.absentUntil) {
		m.absent(now, workerConnected)
	}
	if due(m.retryAt()) {
		m.sendRequest()
	}
	if due(m.silentAt()) {
		m.heardAt = now
		if m.replayEndpoint != "" {
			m.startRepair(now, CauseSilence)
		} else {
			m.emit(Action{Kind: RenewBeside})
		}
	}
	return m.actions
}

// absent reports that the engine may have restarted, as it has had no connection for the
// grace time.
func (m *Machine) absent(now time.Time, workerConnected bool) {
	if !workerConnected {
		m.absentUntil = now.Add(m.cfg.Grace) // the other publishers may be connected again, and this one not
		return
	}
	m.absentUntil = time.Time{}
	m.emit(Action{Kind: ReportAbsent})
	if m.order.reading() {
		m.reportPossibleRestart()
	}
}

// Reset forgets the engine, whose worker left the stream. Its connections stay.
func (m *Machine) Reset() []Action {
	m.begin()
	m.endRepair()
	m.buffer.clear()
	m.absentUntil = time.Time{}
	m.overrunPending, m.overrunUntil = false, time.Time{}
	m.hasUnbuffered = false
	m.conflict, m.former = conflict{}, former{}
	m.forgetIncarnation()
	m.restarts = 0
	m.state = Starting
	return m.actions
}

func (m *Machine) forgetIncarnation() {
	m.order.reset()
	m.incarnation = incarnation{}
	m.restarts++
	m.possibleRestartReported = false
}

// settledState is the state while no replay is in progress.
func (m *Machine) settledState() State {
	switch {
	case m.repair != nil:
		return m.repairState()
	case m.order.progress == progressUnknown:
		return Starting
	default:
		return Live
	}
}
