package sequence

import (
	"time"

	"github.com/kvcast/kvcast/feed"
)

// Batch is one engine batch, live or replayed.
type Batch struct {
	Seq         uint64
	Fingerprint Fingerprint
	// Epoch is that of the topic, and Publisher the publisher id of the batch; empty
	// where the engine sends none. The machine copies what it keeps.
	Epoch     []byte
	Publisher []byte
	// Payload is opaque to the machine.
	Payload []byte
	// Replayed reports whether the batch came from the replay socket.
	Replayed bool
	// Malformed reports whether the payload does not decode.
	Malformed bool
	// Empty reports whether the payload decodes, and has no events.
	Empty bool
	// ReceivedAt is set by the machine.
	ReceivedAt time.Time

	connection uint32 // the number of the connection by which it arrived
}

// ConnectionID names a connection; 0 is none.
type ConnectionID uint64

// Connection is a connection to a publisher.
type Connection struct {
	ID ConnectionID
	// Replay is the endpoint of the replay socket behind it; empty where there is none.
	Replay string
}

// Cause is why the replay socket is asked.
type Cause uint8

// The causes.
const (
	// CauseStart: nothing of this incarnation has been read.
	CauseStart Cause = iota + 1
	// CauseGap: a live batch shows that batches before it are missing.
	CauseGap
	// CauseReconnect: batches may have been missed while there was no connection.
	CauseReconnect
	// CauseSilence: nothing has arrived for a while.
	CauseSilence
)

// String returns the cause's name, as metrics label it.
func (c Cause) String() string {
	return [...]string{CauseStart: "start", CauseGap: "gap", CauseReconnect: "reconnect", CauseSilence: "silence"}[c]
}

// Outcome is how a request to the replay socket ended.
type Outcome uint8

// The outcomes.
const (
	// OutcomeComplete: the end marker came, or Reply returned false.
	OutcomeComplete Outcome = iota + 1
	// OutcomeSilent: no reply, or no further one, came in time.
	OutcomeSilent
	// OutcomeBusy: the request was not sent, as too many others are in progress.
	OutcomeBusy
	// OutcomeYielded: the request was interrupted in favour of others, after some replies.
	OutcomeYielded
	// OutcomeFailed: anything else.
	OutcomeFailed
)

// Evidence is what shows a restart.
type Evidence uint8

// The evidence.
const (
	// EvidenceBatch: a live batch.
	EvidenceBatch Evidence = iota + 1
	// EvidenceReplay: the replay socket has other batches than were read.
	EvidenceReplay
	// EvidenceConflict: of two publishers in conflict one is left, and the blocks of the
	// other one cannot be distinguished from its own.
	EvidenceConflict
)

// Kind is what an Action demands or reports.
type Kind uint8

// The kinds. Unless a kind says otherwise only Action.Kind is set.
const (
	// Deliver: Batch is the next one in order. Of a malformed batch only the seq counts:
	// it was reported as lost.
	Deliver Kind = iota + 1
	// ReportGap: batches are lost, or may be. Reason, First, Last and Missed are set;
	// Batch is the one that follows the gap, where that is known.
	ReportGap
	// ReportBegin: Batch is the first that was read of an incarnation. First, Last and
	// Missed are the seqs that the engine published before. FirstContact reports whether
	// it is the first incarnation that was read: then the seqs are not lost, as nobody was
	// connected, and no ReportGap follows.
	ReportBegin
	// ReportRestart: the engine restarted with an empty cache. Evidence is set, and Seq:
	// that of the batch that shows it, otherwise the last one read before.
	ReportRestart
	// ReportConflict: two publishers use one topic and rank.
	ReportConflict
	// ReportSilent: the connection is silent, and the engine does not answer.
	ReportSilent
	// ReportAbsent: the publisher has had no connection for the grace time.
	ReportAbsent
	// RequestReplay: ask the replay socket at Endpoint for the batches from Seq on.
	// Machine.Sent is the input when that is done, Machine.Reply that for each reply, and
	// Machine.ReplayEnded that for the end, with RequestID.
	// Answered reports whether the socket answered when it was asked last.
	RequestReplay
	// CancelReplay: abandon the request RequestID.
	CancelReplay
	// RenewConnection: close the connection and make another.
	RenewConnection
	// RenewBeside: make another connection beside the silent one, which it replaces once
	// it is established.
	RenewBeside
	// RepairStarted, RepairDone, RepairFailed and RepairHole report the progress of a
	// repair. Cause, Requests, Batches and Began are set; for RepairHole Seq is the last
	// seq that was read.
	RepairStarted
	RepairDone
	RepairFailed
	RepairHole
	// Reject: Batch is malformed. It is counted here; its loss is reported apart.
	Reject
	// DropDuplicate: a batch was dropped that was read before.
	DropDuplicate
	// DropStale: a batch was dropped that a former incarnation sent.
	DropStale
	// DropOverflow: a live batch did not fit into the reorder buffer. It is requested
	// later.
	DropOverflow
)

// Action is something to do, in the order in which the machine returns them. It is valid
// until the machine's next input.
type Action struct {
	Kind     Kind
	Reason   feed.GapReason
	Cause    Cause
	Evidence Evidence
	// Answered and FirstContact: see the kinds.
	Answered     bool
	FirstContact bool
	Batch        *Batch
	// First and Last are seqs, both included; both 0 where they are unknown. Missed is
	// their number; 0 where it is unknown.
	First, Last, Missed uint64
	Seq                 uint64
	RequestID           uint64
	Endpoint            string
	// Requests and Batches are how many requests a repair took, and how many batches it
	// brought. Began is when it started.
	Requests, Batches uint64
	Began             time.Time
}
