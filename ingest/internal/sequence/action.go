package sequence

import (
	"time"

	"github.com/kvcast/kvcast/internal/feed"
)

// Batch is one engine batch, live or replayed.
type Batch struct {
	Seq         uint64
	Fingerprint Fingerprint
	// Epoch is the epoch in the topic, and Publisher the publisher id in the payload; each is
	// empty if the engine does not send it. The machine copies the bytes that it keeps.
	Epoch     []byte
	Publisher []byte
	// Payload is not interpreted by the machine.
	Payload []byte
	// Replayed reports whether the batch came from the replay socket or a snapshot, Restored whether it is a part of a snapshot.
	Replayed, Restored bool
	// Unproved reports whether the batch was replayed by a socket that has not been shown to be the publisher's. It is set by the machine.
	Unproved bool
	// Malformed reports whether the payload does not decode.
	Malformed bool
	// Empty reports whether the payload decodes and has no events.
	Empty bool
	// Partial reports whether the batch begins with a clear, after which the publisher does not list all blocks. That they
	// are not known is reported after it.
	Partial bool
	// ReceivedAt is set by the machine.
	ReceivedAt time.Time

	connection uint32 // number of the batch's connection: see Machine.connections
}

// ConnectionID identifies a connection; 0 means no connection.
type ConnectionID uint64

// Connection is a connection to a publisher.
type Connection struct {
	ID ConnectionID
	// Replay is the endpoint of the publisher's replay socket, and Snapshot that of its snapshots; empty if it has none.
	Replay, Snapshot string
	// Resumes reports whether the publisher was asked to begin with the last batch read. Only a connection without a replay socket resumes.
	Resumes bool
	// SnapshotsBegin reports whether snapshots are used to begin with only, because they lack what the batches have.
	SnapshotsBegin bool
}

// Cause is why batches are requested from the replay socket.
type Cause uint8

// The causes.
const (
	// CauseStart: no batch of this incarnation has been read.
	CauseStart Cause = iota + 1
	// CauseGap: a live batch shows that earlier batches are missing.
	CauseGap
	// CauseReconnect: batches may have been missed while there was no connection.
	CauseReconnect
	// CauseSilence: no message has arrived for Config.Silence.
	CauseSilence
	// CauseProof: it is not known whether the replay socket is the publisher's.
	CauseProof
	// CauseLoss: a loss was reported because the replay socket did not answer.
	CauseLoss
)

// String returns the cause's name in metrics.
func (c Cause) String() string {
	return [...]string{CauseStart: "start", CauseGap: "gap", CauseReconnect: "reconnect", CauseSilence: "silence", CauseProof: "proof", CauseLoss: "loss"}[c]
}

// Outcome is how a request to the replay socket ended.
type Outcome uint8

// The outcomes.
const (
	// OutcomeComplete: the end marker arrived, or Reply returned false.
	OutcomeComplete Outcome = iota + 1
	// OutcomeSilent: no reply, or no further reply, arrived in time.
	OutcomeSilent
	// OutcomeBusy: the request was not sent because too many others are in progress.
	OutcomeBusy
	// OutcomeYielded: the request was interrupted after some replies to let others proceed.
	OutcomeYielded
	// OutcomeFailed: any other failure.
	OutcomeFailed
)

// Evidence is how a restart was detected.
type Evidence uint8

// The kinds of evidence.
const (
	// EvidenceBatch: a live batch is of another incarnation.
	EvidenceBatch Evidence = iota + 1
	// EvidenceReplay: the replay socket has other batches under seqs that were read.
	EvidenceReplay
	// EvidenceConflict: a conflict of two publishers ended. The blocks of the publisher that
	// left cannot be distinguished from the remaining publisher's.
	EvidenceConflict
)

// Kind is what an Action requests or reports.
type Kind uint8

// The kinds. Their comments name the fields that are set beside Action.Kind.
const (
	// Deliver: Batch is the next batch in order. A malformed batch was reported as lost before; only its seq counts.
	Deliver Kind = iota + 1
	// ReportGap: batches are or may be lost. Reason, First, Last, Missed and Repairable are set. Batch is
	// the batch after the gap, or nil if that is unknown.
	ReportGap
	// ReportBegin: Batch, of seq Seq, is the first batch read of an incarnation. First, Last and Missed are the earlier seqs of the
	// incarnation. FirstContact reports whether it is the first incarnation read: its earlier seqs are not lost, because they were published
	// before kvcast connected, and no ReportGap follows.
	ReportBegin
	// ReportRestart: the engine restarted with an empty cache. Evidence is set. Seq is the seq
	// of the batch that shows the restart, or else the last seq read before the restart.
	ReportRestart
	// ReportConflict: two publishers use the same topic and rank.
	ReportConflict
	// ReportProved: the replay socket is the publisher's. It had replayed batches before that was known.
	ReportProved
	// ReportForeign: the replay socket belongs to another publisher. Discard all blocks of this one, of which some are the other's, and report
	// that batches are lost, as for ReportGap: Reason is set. Until ReportRestart, the publisher's blocks are incomplete.
	ReportForeign
	// ReportSilent: the connection is silent, and the engine does not reply.
	ReportSilent
	// ReportAbsent: the publisher has had no connection for Config.Grace.
	ReportAbsent
	// AttemptConnection: attempt to connect now, unless an attempt is in progress. If it fails, the caller calls Machine.AttemptFailed.
	AttemptConnection
	// RequestReplay: send Request to the replay socket. The caller then calls Machine.Sent,
	// Machine.Reply for each reply, and Machine.ReplayEnded.
	RequestReplay
	// CancelReplay: abandon the request in progress, of either kind.
	CancelReplay
	// RequestSnapshot: send Request, of which From is not set, to the socket for snapshots. The caller then calls
	// Machine.Sent, Machine.SnapshotHeader, Machine.SnapshotBatch for each batch, and Machine.ReplayEnded.
	RequestSnapshot
	// BeginRestore: discard all blocks of the publisher. The batches of a snapshot follow, of which Restored is set, up to EndRestore,
	// AbortRestore or ReportRestart. Seq is the last seq that the snapshot includes, and Batch names the incarnation.
	BeginRestore
	// EndRestore: the snapshot is complete. Seq is that of BeginRestore. Repair is set.
	EndRestore
	// AbortRestore: discard all blocks of the publisher, because the snapshot was not complete, and report that batches
	// are lost, as for ReportGap: Reason is set. Until BeginRestore or ReportRestart, the publisher's blocks are incomplete.
	AbortRestore
	// BeginReread: discard all blocks of the publisher. Batch, of seq Seq, and all later batches of the incarnation follow:
	// the replay socket has them again, or for the first time.
	BeginReread
	// RejectSnapshot: a snapshot is not used, because it includes batches up to Seq only, which were read before.
	RejectSnapshot
	// SnapshotFailed: no snapshot is requested for some time, after several failures.
	SnapshotFailed
	// Reconnect: close the connection and open another.
	Reconnect
	// OpenReplacement: open a second connection, which replaces the silent one once it is established.
	OpenReplacement
	// RepairStarted, RepairDone, RepairFailed and RepairHole report the progress of a repair:
	// Repair is set. For RepairHole, Seq is the last seq read.
	RepairStarted
	RepairDone
	RepairFailed
	RepairHole
	// Reject: Batch is malformed. Another action reports its loss.
	Reject
	// DropDuplicate: a batch that was read before was dropped.
	DropDuplicate
	// DropStale: a live batch of an earlier incarnation or a closed connection was dropped. If no replay
	// has it, its seq is reported as lost although it arrived.
	DropStale
	// DropOverflow: a live batch did not fit into the reorder buffer. It is requested later.
	DropOverflow
)

// Action is something that the caller does. Actions are returned in the order in which they are to
// be done, and are valid until the machine's next input.
type Action struct {
	Kind         Kind
	Reason       feed.GapReason
	Evidence     Evidence
	FirstContact bool
	// Repairable reports whether the replay socket may still repair this loss, or one before it.
	Repairable bool
	Batch      *Batch
	// First and Last are seqs, both included; both are 0 if unknown. Missed is the number of seqs in the range; 0 if unknown.
	First, Last, Missed uint64
	Seq                 uint64
	Request             *Request
	Repair              *Repair
}

// Request is a request to a replay socket.
type Request struct {
	ID       uint64
	Cause    Cause
	Endpoint string
	// From is the first seq requested.
	From uint64
	// Answered reports whether the socket answered the previous request, and Failures how many requests in a row brought
	// nothing, as far as that matters.
	Answered bool
	Failures int
}

// Repair is the progress of a repair.
type Repair struct {
	Cause Cause
	Began time.Time
	// Requests is the number of requests sent, and Batches the number of replies delivered.
	Requests, Batches uint64
}
