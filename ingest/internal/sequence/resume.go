package sequence

import "time"

// resumeTimeout is how long the first batch of a connection that resumes may take. The publisher has that batch already.
const resumeTimeout = 5 * time.Second

// resume handles a batch of a connection that resumes, until it is known whether the engine restarted. It
// reports whether the batch is to be dropped, because its seq was read or reported as lost.
//
//  1. An identifier of another incarnation shows a restart, and one of this that there was none, whatever the batch.
//  2. The last batch read, with the same fingerprint, shows that the engine did not restart. An earlier
//     one shows nothing: the last follows.
//  3. Another batch under a seq that was read shows a restart.
//  4. If the publisher begins with a later batch, it no longer has the last one, and the engine may have
//     restarted. So it may if the last seq was reported as lost, or its batch is like those of other engines.
//  5. The batch before the last may be unknown, after Machine.Resume. Some publishers begin with it.
func (m *Machine) resume(b *Batch) (drop bool) {
	known, remembered := m.order.history.find(b.Seq)
	switch {
	case m.incarnation.contradicts(b):
		m.endResume(false)
	case b.Seq > m.order.last:
		m.endResume(!m.incarnation.confirms(b))
	case remembered && known != b.Fingerprint:
		m.endResume(false)
	case b.Seq == m.order.last:
		m.endResume((!remembered || b.Empty && b.Fingerprint.Time == 0) && !m.incarnation.confirms(b))
		return true
	case remembered, b.Seq+1 == m.order.last:
		return true
	default: // the batch is older than the history
		m.endResume(false)
	}
	return false
}

// Resuming reports whether the connection resumes, and it is not known yet whether the engine restarted.
func (m *Machine) Resuming() bool { return !m.resumeUntil.IsZero() }

// endResume ends the wait for the last batch read. restartPossible reports whether the engine may have restarted.
func (m *Machine) endResume(restartPossible bool) {
	m.resumeUntil = time.Time{}
	if restartPossible {
		m.reportPossibleRestart()
	}
}
