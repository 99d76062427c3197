// Package sequence puts the batches of one publisher in order.
//
// Inputs of a Machine are the live batches of one dp rank of an engine, the replies of its replay socket, changes of its connections, and
// the time. Outputs are actions: deliver a batch, report a gap, a restart or a conflict, request a replay, reconnect.
//
// A batch is read when it is delivered, or reported as lost because it is malformed. For every seq of an incarnation up to the last seq
// read, exactly one Deliver or ReportGap covers it, in order; for the seqs before first contact, ReportBegin does, and for those that a
// snapshot includes, EndRestore. No batch is reported as lost that the replay socket still has, or a snapshot that can be had in time. If a
// restart of the engine can be neither confirmed nor excluded, a possible restart is reported.
//
// A Cursor, which follows from the actions, is what another Machine needs to continue where one ended, with the same guarantees over both.
//
// A Machine is pure: it uses no socket, clock, lock, log or metric, and its inputs determine its
// outputs. It is not safe for concurrent use.
package sequence

import (
	"time"

	"github.com/kvcast/kvcast/internal/feed"
)

// State is how a Machine handles the next live batch.
type State uint8

// The states.
const (
	// Starting: no batch of the incarnation has been read. If there is a replay socket, a full
	// replay is in progress, and live batches are buffered.
	Starting State = iota
	// Live: batches are delivered as they arrive.
	Live
	// Repairing: a replay from the last batch read is in progress, and live batches are buffered.
	Repairing
	// Verifying: after a silence the last batch is requested, to find out whether the
	// connection or the engine is silent. Live batches are buffered.
	Verifying
	// Conflicted: two publishers share the topic and rank. Batches are delivered as they arrive, in no order.
	Conflicted
	// Suspect: the connection was silent, and the engine did not reply. Live batches are
	// buffered while the engine is asked again, and delivered as they arrive otherwise.
	Suspect
)

// String returns the state's name.
func (s State) String() string {
	return [...]string{"starting", "live", "repairing", "verifying", "conflicted", "suspect"}[s]
}

// Config configures a Machine.
type Config struct {
	// FirstSeq is the seq of an incarnation's first batch.
	FirstSeq uint64
	// FromFirst makes FirstSeq the first seq to read: if it is missing, it is reported as lost.
	// Otherwise the first batch that arrives is the first to read.
	FromFirst bool
	// Silence is how long a connection may be silent before it is verified; 0 disables the check.
	Silence time.Duration
	// Grace is how long a publisher may have no connection before its absence is reported.
	Grace time.Duration
	// CanReconnect reports whether the caller can open connections. Otherwise the engine opens them.
	CanReconnect bool
	// Budget limits this machine's reorder buffer together with others; nil means unlimited.
	Budget Budget
	// Patience is how long a replay socket that does not answer is asked before the batches that it may have count as lost.
	// Until it has answered once, it is not waited for where nothing was read yet, or after it was waited for in vain: see loss.
	Patience time.Duration
	// Jitter varies the wait before a request is repeated; nil means no jitter.
	Jitter func(time.Duration) time.Duration
}

// overrunTimeout is how long after an overrun the next batch may arrive, which shows the seqs that
// were dropped. After it a gap of unknown seqs is reported.
const overrunTimeout = 5 * time.Second

// ReplayState is how a replay socket has answered so far.
type ReplayState uint8

// The states of replay sockets, with the numbers of the gRPC contract.
const (
	// ReplayNone: there is no replay socket.
	ReplayNone ReplayState = iota + 1
	// ReplayNeverAnswered: it has not answered yet.
	ReplayNeverAnswered
	// ReplayAnswers: it has answered the last request.
	ReplayAnswers
	// ReplayUnanswered: it has answered before, but not the last request.
	ReplayUnanswered
	// ReplayForeign: it belongs to another engine.
	ReplayForeign
)

// Machine orders the batches of one publisher. Use New to create one.
type Machine struct {
	cfg         Config
	state       State
	order       order
	incarnation incarnation
	restarts    uint64 // number of incarnations before the current one
	// former is the incarnation before the current one, or the seqs before a gap.
	former former

	presence
	sockets
	repair    *repair // nil if none is in progress
	requestID uint64  // of the last request
	buffer    reorderBuffer
	// unbuffered is the highest seq that arrived and is neither read nor buffered.
	unbuffered    uint64
	hasUnbuffered bool

	proof proof
	loss  loss
	// begun is the first seq read of the incarnation, valid if order.reading.
	begun uint64

	conflict conflict
	// snapshotSeq is the last seq that the snapshot includes with which the incarnation began, if hasSnapshot.
	snapshotSeq uint64
	hasSnapshot bool
	resumed
	overrun
	// possibleRestartReported reports whether a possible restart was reported since the last batch that was read.
	possibleRestartReported bool

	actions []Action
}

// presence is whether there is a connection, and when something was heard.
type presence struct {
	// current is the connection on which batches arrive. other is an earlier connection that is still open, if any. connections numbers the
	// times with one current connection, and the times without any. The number before a time without any is of the batches that arrive in it.
	current, other Connection
	connections    uint32
	heardAt        time.Time // of the last message or connection
	absentUntil    time.Time // end of the grace time; zero while it does not run
	lastAttempt    bool      // the grace time has ended, and the attempt of AttemptConnection has not
}

// sockets are those that replay batches and that send snapshots.
type sockets struct {
	replayEndpoint   string
	snapshotEndpoint string
	snapshotsBegin   bool        // see Connection
	answered         ReplayState // neither ReplayNone nor ReplayForeign
	// gaveUp reports whether a replay socket that has never answered was waited for in vain.
	gaveUp    bool
	restUntil time.Time // no request because of a gap is sent to the replay socket before
	// snapshotRestUntil is the time before which no snapshot is requested.
	snapshotRestUntil time.Time
}

// overrun is a loss of messages between the connection and the machine.
type overrun struct {
	// overrunPending reports whether messages were dropped since the last batch that was read.
	// At overrunUntil a gap is reported, unless a batch shows before which seqs were dropped.
	overrunPending bool
	overrunUntil   time.Time
}

// resumed is what happened before Resume, or before the connection that resumes.
type resumed struct {
	// resumedRestore reports whether a part of a snapshot was delivered before Resume, until the next input.
	resumedRestore bool
	// resumedConflict reports whether there was a conflict before Resume, until the next connection.
	resumedConflict bool
	// resumeUntil is when the last batch read, with which the connection begins, is no longer waited for;
	// zero if it is not. A possible restart is then reported.
	resumeUntil time.Time
}

// New returns a Machine in state Starting.
func New(c Config) *Machine {
	m := &Machine{cfg: c}
	m.order.first = c.FirstSeq
	m.answered = ReplayNeverAnswered
	if c.FromFirst {
		m.order.progress = progressEmpty
	}
	m.buffer.budget = c.Budget
	if m.cfg.Jitter == nil {
		m.cfg.Jitter = func(d time.Duration) time.Duration { return d }
	}
	return m
}

// State returns the current state.
func (m *Machine) State() State { return m.state }

// Connected reports whether there is a connection.
func (m *Machine) Connected() bool { return m.current.ID != 0 }

// Connections returns the connection on which batches arrive, and an earlier connection that is still open. Each is 0 if there is none.
func (m *Machine) Connections() (current, other ConnectionID) { return m.current.ID, m.other.ID }

// Replaying reports whether a replay is in progress, and live batches are buffered.
func (m *Machine) Replaying() bool { return m.repair != nil && !m.probing() }

// Last returns the last seq read. ok is false if no batch of the incarnation was read.
func (m *Machine) Last() (seq uint64, ok bool) { return m.order.last, m.order.reading() }

// Epoch returns the epoch of the incarnation that is read; empty if it is unknown, or has none.
func (m *Machine) Epoch() string { return m.incarnation.epoch }

// ReplayEndpoint returns the endpoint of the replay socket; empty if there is none.
func (m *Machine) ReplayEndpoint() string { return m.replayEndpoint }

// ReplayState returns how the replay socket has answered so far.
func (m *Machine) ReplayState() ReplayState {
	switch {
	case m.replayEndpoint == "":
		return ReplayNone
	case m.proof.origin == originForeign:
		return ReplayForeign
	default:
		return m.answered
	}
}

// begin discards the actions of the previous input.
func (m *Machine) begin() {
	if len(m.actions) > 1 { // release the batches, and the memory of a long flush
		m.actions = nil
	}
	m.actions = m.actions[:0]
}

func (m *Machine) emit(a Action) { m.actions = append(m.actions, a) }

// Connect is the input for a new connection, before its first batch. The previous connection stays
// open until Disconnect. Batches may have been lost in between, and the engine may be another one.
func (m *Machine) Connect(now time.Time, c Connection) []Action {
	m.begin()
	m.endProbe()
	m.other, m.current = m.current, c
	m.resetProof()
	replayKnown := m.replayEndpoint != ""
	m.useEndpoints(c)
	m.absentUntil, m.resumeUntil, m.lastAttempt = time.Time{}, time.Time{}, false
	first := m.connections == 0
	m.connections++
	m.heardAt = now
	m.conflict = conflict{}
	m.former = former{}
	m.snapshotRestUntil = time.Time{}
	if m.proof.origin != originForeign {
		m.restUntil = time.Time{}
	}
	if m.resumedRestore {
		m.abortRestore()
	}
	if m.state == Suspect || m.state == Conflicted {
		m.state = m.settledState()
	}
	if !m.order.reading() {
		m.hasUnbuffered = false // the batch may be of another incarnation
	}
	if m.resumedConflict && m.replayEndpoint != "" {
		// The blocks of the two publishers cannot be distinguished.
		m.restart(EvidenceConflict, m.order.last)
		m.former = former{}
	}
	m.resumedConflict = false
	switch {
	case m.replayEndpoint != "" && m.proof.origin == originForeign:
		m.endProofRequest(now)
		if m.order.reading() {
			m.reportPossibleRestart() // the socket is not asked
		}
	case m.replayEndpoint != "" && first:
		m.startRepair(now, CauseStart)
	case m.replayEndpoint != "":
		if !replayKnown && m.order.reading() {
			m.reportPossibleRestart() // the batches read may be of several connections
		}
		m.startRepair(now, CauseReconnect)
	case !first && m.order.reading() && c.Resumes:
		m.resumeUntil = now.Add(resumeTimeout)
	case !first && m.order.reading():
		m.reportPossibleRestart()
	}
	return m.actions
}

// Replaced is the input for a connection of OpenReplacement that has replaced the silent one.
func (m *Machine) Replaced(now time.Time, c Connection) []Action {
	m.begin()
	m.current = c
	m.heardAt = now
	if m.state == Suspect {
		m.state = m.settledState()
	}
	return m.actions
}

// ReplacementFailed is the input when OpenReplacement led to no connection.
func (m *Machine) ReplacementFailed() []Action {
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
		m.disconnectPublisher(now)
	case m.current.ID:
		m.endProbe()
		m.current, m.other = m.other, Connection{}
		m.resetProof()
		m.endProofRequest(now)
		m.resumeUntil = time.Time{} // the next connection resumes, or a possible restart is reported
		m.connections++
		if m.current.ID == 0 {
			m.connections++ // for batches that arrive without a connection
			m.absentUntil = now.Add(m.cfg.Grace)
			break
		}
		m.useEndpoints(m.current)
		// The batches read may be of another incarnation than the remaining publisher, which may be of the former.
		m.former = former{}
		switch {
		case m.state == Conflicted:
		case m.replayEndpoint != "":
			m.startRepair(now, CauseReconnect)
		case m.order.reading():
			m.reportPossibleRestart()
		}
		m.disconnectPublisher(now)
	}
	return m.actions
}

// useEndpoints sets the endpoints of a connection's publisher.
func (m *Machine) useEndpoints(c Connection) {
	m.snapshotEndpoint, m.snapshotsBegin = c.Snapshot, c.SnapshotsBegin
	if c.Replay != m.replayEndpoint {
		m.replayEndpoint, m.answered, m.gaveUp = c.Replay, ReplayNeverAnswered, false
		m.proof.origin = originUnknown
	}
}

// Overrun is the input when messages may have been dropped after the last batch, because they arrived faster than they were processed.
func (m *Machine) Overrun(now time.Time) []Action {
	m.begin()
	m.endProbe()
	switch {
	case m.overrunPending, m.state == Conflicted:
	case m.repair != nil && m.repair.Cause == CauseProof:
		m.endRepair()
		m.startRepair(now, CauseGap)
	case m.repair != nil:
		m.repair.recheck = max(m.repair.recheck, recheckOverrun)
	case m.replayable(now):
		m.startRepair(now, CauseGap)
	case m.order.reading():
		m.overrunPending, m.overrunUntil = true, now.Add(overrunTimeout)
	}
	return m.actions
}

// Deadline returns when Tick is due; zero if no timeout is running.
func (m *Machine) Deadline() time.Time {
	first := m.silentAt()
	if m.repair == nil && m.absentUntil.IsZero() && m.overrunUntil.IsZero() && m.resumeUntil.IsZero() && !m.loss.known {
		return first // the common case
	}
	for _, t := range [...]time.Time{m.absentUntil, m.overrunUntil, m.resumeUntil, m.retryAt(), m.lossAt()} {
		if !t.IsZero() && (first.IsZero() || t.Before(first)) {
			first = t
		}
	}
	return first
}

// silentAt returns when the connection will have been silent for Config.Silence; zero if silence is not checked.
func (m *Machine) silentAt() time.Time {
	if m.cfg.Silence <= 0 || !m.Connected() || m.replayEndpoint == "" && !m.cfg.CanReconnect {
		return time.Time{}
	}
	return m.heardAt.Add(m.cfg.Silence)
}

// Tick is the input when the Deadline has passed. workerConnected reports whether any publisher of the worker has a connection. If none
// has, the worker will be removed, and the absence of this publisher is not reported.
func (m *Machine) Tick(now time.Time, workerConnected bool) []Action {
	m.begin()
	due := func(t time.Time) bool { return !t.IsZero() && !now.Before(t) }
	if due(m.overrunUntil) {
		m.overrunUntil = time.Time{}
		m.noteLoss()
		m.reportGap(seqRange{}, feed.GapReplayUnavailable, nil)
	}
	if due(m.resumeUntil) {
		m.resumeUntil = time.Time{}
		m.reportPossibleRestart()
	}
	if due(m.absentUntil) {
		m.endGrace(now, workerConnected)
	}
	if due(m.retryAt()) {
		m.sendRequest()
	}
	if due(m.lossAt()) {
		m.askForLoss(now)
	}
	if due(m.silentAt()) {
		m.heardAt = now
		switch {
		case m.state == Conflicted:
			m.endConflict(now, m.conflict.lastBy(m.current.ID)) // neither publisher is active
		case m.replayEndpoint != "":
			m.startRepair(now, CauseSilence)
		default:
			m.emit(Action{Kind: OpenReplacement})
		}
	}
	return m.actions
}

// endGrace ends the grace time. If the caller opens connections, an attempt must fail first, because the engine may have been back
// since the last one.
func (m *Machine) endGrace(now time.Time, workerConnected bool) {
	switch {
	case !workerConnected:
		m.absentUntil = now.Add(m.cfg.Grace) // others may reconnect while this publisher does not
	case m.cfg.CanReconnect && m.cfg.Grace > 0:
		m.absentUntil, m.lastAttempt = time.Time{}, true
		m.emit(Action{Kind: AttemptConnection})
	default:
		m.absent()
	}
}

// AttemptFailed is the input when the attempt of AttemptConnection has failed. workerConnected is as for Tick.
func (m *Machine) AttemptFailed(now time.Time, workerConnected bool) []Action {
	m.begin()
	switch {
	case !m.lastAttempt:
	case !workerConnected:
		m.absentUntil, m.lastAttempt = now.Add(m.cfg.Grace), false
	default:
		m.absent()
	}
	return m.actions
}

// absent reports that the engine may have restarted, because it has had no connection for the grace time.
func (m *Machine) absent() {
	m.absentUntil, m.lastAttempt = time.Time{}, false
	m.emit(Action{Kind: ReportAbsent})
	if m.resumedRestore {
		m.abortRestore()
	}
	if m.order.reading() {
		m.reportPossibleRestart()
	}
}

// Reset forgets everything except the connections. It is called when the worker is removed.
func (m *Machine) Reset() []Action {
	m.begin()
	m.endRepair()
	m.buffer.clear()
	m.absentUntil, m.resumeUntil, m.lastAttempt = time.Time{}, time.Time{}, false
	m.overrunPending, m.overrunUntil = false, time.Time{}
	m.hasUnbuffered = false
	m.conflict, m.former, m.resumedConflict, m.resumedRestore = conflict{}, former{}, false, false
	m.forgetIncarnation()
	m.restarts = 0
	m.state = Starting
	return m.actions
}

func (m *Machine) forgetIncarnation() {
	m.order.reset()
	m.incarnation = incarnation{}
	m.proof.unproved, m.proof.lastProved = false, false
	m.restarts++
	m.possibleRestartReported = false
	m.hasSnapshot = false
	m.loss = loss{}
}

// settledState returns the state that follows from the repair in progress and the order.
func (m *Machine) settledState() State {
	switch {
	case m.repair != nil && !m.probing():
		return m.repairState()
	case m.order.progress == progressUnknown:
		return Starting
	default:
		return Live
	}
}
