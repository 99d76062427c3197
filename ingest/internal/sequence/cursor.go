package sequence

import (
	"time"

	"github.com/kvcast/kvcast/internal/feed"
)

// Cursor is what a Machine needs to continue where another one ended: see Machine.Resume. It follows from the actions alone, so that there
// is a cursor after each action, also within the actions of one input. The zero Cursor is that of a new Machine.
type Cursor struct {
	// Started reports whether a batch of the incarnation was read or reported as lost; Seq is the last seq.
	Started bool
	Seq     uint64
	// Delivered reports whether a batch of the incarnation was delivered; Batch is the seq of the last one, and Fingerprint its fingerprint.
	Delivered   bool
	Batch       uint64
	Fingerprint Fingerprint
	// Epoch and Publisher are the identifiers in the incarnation's batches; Epoch is valid if EpochKnown.
	Epoch      string
	EpochKnown bool
	Publisher  string
	// Restarted reports whether an earlier incarnation was read.
	Restarted bool
	// PossibleRestart reports whether a possible restart was reported since the last batch.
	PossibleRestart bool
	// Conflicted reports whether batches of two publishers were read.
	Conflicted bool
	// Restoring reports whether a part of a snapshot was delivered. Then Started and Delivered are false.
	Restoring bool
	// Proved reports whether the last batch that was delivered arrived live, or by a replay socket that is the publisher's,
	// and Unproved whether a batch of the incarnation came by one that may be another's.
	Proved, Unproved bool
	// Lost reports whether a loss was reported that the replay socket may still repair.
	Lost bool
	// HasReplay reports whether the batches were read with a replay socket: Machine.ReplayEndpoint is set. The caller sets it.
	HasReplay bool
}

// Apply makes c the cursor after an action.
func (c *Cursor) Apply(a *Action) {
	switch a.Kind {
	case Deliver:
		b := a.Batch
		if b.Restored {
			return
		}
		c.Started, c.Seq = true, b.Seq
		c.Delivered, c.Batch, c.Fingerprint = true, b.Seq, b.Fingerprint
		c.PossibleRestart = false
		c.Proved, c.Unproved = !b.Unproved, c.Unproved || b.Unproved
		if !c.Conflicted {
			c.identify(b)
		}
	case ReportGap:
		if a.Missed > 0 {
			c.Started, c.Seq = true, a.Last
		}
		c.PossibleRestart = c.PossibleRestart || a.Reason == feed.GapPossibleRestart
		c.Lost = c.Lost || a.Repairable
	case ReportBegin:
		if a.FirstContact && a.Missed > 0 {
			c.Started, c.Seq, c.Lost = true, a.Last, true
		}
	case ReportProved:
		c.Proved, c.Unproved = true, false
	case ReportForeign:
		*c = Cursor{}
	case ReportRestart:
		*c = Cursor{Restarted: true}
	case ReportConflict:
		c.Conflicted = true
	case BeginReread:
		*c = Cursor{Restarted: c.Restarted, Epoch: c.Epoch, EpochKnown: c.EpochKnown, Publisher: c.Publisher, Unproved: c.Unproved}
	case BeginRestore:
		*c = Cursor{Restarted: c.Restarted, Restoring: true, Epoch: c.Epoch, EpochKnown: c.EpochKnown, Publisher: c.Publisher}
		if known := (&incarnation{epoch: c.Epoch, publisher: c.Publisher, epochKnown: c.EpochKnown}); known.contradicts(a.Batch) {
			c.Epoch, c.EpochKnown, c.Publisher = "", false, ""
		}
		c.identify(a.Batch)
	case EndRestore:
		c.Restoring = false
		c.Started, c.Seq = true, a.Seq
	case AbortRestore:
		*c = Cursor{Restarted: true, Lost: true, Epoch: c.Epoch, EpochKnown: c.EpochKnown, Publisher: c.Publisher}
	default:
	}
}

// identify adds the identifiers of a batch.
func (c *Cursor) identify(b *Batch) {
	if c.EpochKnown && (c.Publisher != "" || len(b.Publisher) == 0) {
		return // the common case
	}
	i := incarnation{epoch: c.Epoch, publisher: c.Publisher, epochKnown: c.EpochKnown}
	i.record(b)
	c.Epoch, c.Publisher, c.EpochKnown = i.epoch, i.publisher, i.epochKnown
}

// Resume makes a new Machine continue at a cursor, as if its connection had been closed at now. replay is the endpoint
// of the replay socket; empty if there is none or it is unknown. The history has only the last batch that was delivered.
func (m *Machine) Resume(now time.Time, c *Cursor, replay string) {
	if c.Delivered {
		m.order.history.add(c.Batch, c.Fingerprint)
	}
	if c.Started {
		m.order.skipTo(c.Seq)
	}
	m.incarnation = incarnation{epoch: c.Epoch, publisher: c.Publisher, epochKnown: c.EpochKnown}
	if c.Started && !c.Delivered && c.EpochKnown {
		m.snapshotSeq, m.hasSnapshot = c.Seq, true // the identifiers are a snapshot's: no batch has named them
	}
	if c.Restarted {
		m.restarts = 1
	}
	m.proof.lastProved, m.proof.unproved = c.Delivered && c.Proved, c.Unproved
	if c.HasReplay {
		m.useEndpoints(Connection{Replay: replay})
	}
	m.begun = m.order.first // it is not stored
	if c.Lost {
		m.loss = loss{known: true, at: now.Add(minLossWait)}
	}
	m.possibleRestartReported = c.PossibleRestart
	m.resumedConflict, m.resumedRestore = c.Conflicted, c.Restoring
	m.connections = 3 // one connection, and then none
	m.absentUntil = now.Add(m.cfg.Grace)
	m.state = m.settledState()
}
