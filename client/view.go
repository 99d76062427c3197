package client

import (
	"context"
	"iter"
	"sync"

	kvcastv1 "github.com/kvcast/kvcast/proto/kvcast/v1"
)

// View is what all workers hold, as the updates of one subscription tell it. One
// goroutine applies them; any number may ask at the same time, and see each entry
// whole or not at all. A question waits for one entry at most, not for a response or
// a snapshot.
//
// A block that is held by one worker takes at most 80 bytes, one of which all the
// blocks before it are known; 125 where they are not. What several workers hold
// takes less for each.
//
// While a snapshot comes that takes the place of what is there, as after the loss of
// the journal, questions are answered from what was there, which may be old and is
// not wrong more often than it was; it and the snapshot both take memory until that
// ends. Before the first snapshot has come whole a View is empty, and Ready says so.
type View struct {
	mu       sync.RWMutex
	now      *state              // guarded by mu
	about    ViewStatus          // guarded by mu
	watchers map[*watch]struct{} // guarded by mu

	// Of the goroutine that applies.
	next  *state // a snapshot that has not ended; nil where none comes
	whole bool   // the state is all that the workers hold, in the filter's terms
}

// ViewStatus is how a View stands.
type ViewStatus struct {
	// Ready tells that a snapshot has come whole, or that the subscription began
	// without one.
	Ready bool
	// Live tells that there is a stream; without one the View grows old.
	Live bool
	// Position is that of the last update that had one.
	Position Position
	// Snapshots is how many have come whole.
	Snapshots uint64
	// Compared is how many sets of blocks were compared with digests of the server, and
	// Differed how many of them were others: they had a snapshot asked for.
	Compared, Differed uint64
}

// NewView returns an empty View.
func NewView() *View {
	return &View{now: newState(), watchers: make(map[*watch]struct{})}
}

// Follow applies all updates of a subscription. It returns the error that they end
// with, or nil where they end with their context. It is the usual way to feed a View,
// in a goroutine of its own:
//
//	err := view.Follow(c.Subscribe(ctx, client.Config{Digests: true}))
func (v *View) Follow(updates iter.Seq2[Update, error]) error {
	for u, err := range updates {
		if err != nil {
			return err
		}
		v.Apply(u)
	}
	return nil
}

// Apply applies the next update of a subscription. The first of a View has to be the
// first of a subscription, and the subscription one from a snapshot if the View is to
// know all that the workers hold. One goroutine may call it at a time.
//
// Where the server tells digests (Config.Digests), Apply compares them, if the View
// began with a snapshot or with the first entry of all. One that differs can not be
// unless somebody lost an event: the subscription begins anew with a snapshot, and a
// *DigestError tells of it in the next Interruption.
func (v *View) Apply(u Update) {
	m := u.Message
	switch {
	case m == nil:
		v.next = nil // its end will not come
		v.edit(func() { v.about.Live = false })
		return
	case m.GetAccepted() != nil:
		v.whole = v.whole || m.GetAccepted().GetMode() == kvcastv1.Accepted_MODE_EARLIEST && u.Position.Seq == 0
	case m.GetSnapshotBegin() != nil:
		v.next, v.whole = newState(), false
	case m.GetSnapshotEnd() != nil:
		v.replace(u)
		return
	}
	v.applyParts(m)
	v.edit(func() {
		v.about.Live = true
		if !u.Position.IsZero() {
			v.about.Ready, v.about.Position = true, u.Position
		}
		v.now.sweep()
	})
	if m.GetProgress() != nil && m.GetPosition() != nil && v.whole {
		v.compare(u)
	}
}

// applyParts applies what a message holds: to the snapshot that comes, which nobody
// sees, or else to the state, an entry at a time.
func (v *View) applyParts(m *kvcastv1.SubscribeResponse) {
	if v.next != nil {
		if w := m.GetSnapshotWorker(); w != nil {
			v.next.snapshotWorker(w)
		}
		for _, b := range m.GetSnapshotBlocks() {
			v.next.snapshotBlocks(b)
		}
		for _, e := range m.GetEntries() {
			v.next.entry(e)
		}
		v.next.sweep()
		return
	}
	for _, e := range m.GetEntries() {
		v.edit(func() {
			v.now.entry(e)
			v.now.sweep()
			v.changed(e.GetWorker())
		})
	}
}

// replace makes the snapshot, which is whole, the state.
func (v *View) replace(u Update) {
	v.edit(func() {
		for name := range v.now.workers {
			v.changed(name)
		}
		for name := range v.next.workers {
			v.changed(name)
		}
		v.now, v.next, v.whole = v.next, nil, true
		v.about.Ready, v.about.Live, v.about.Position = true, true, u.Position
		v.about.Snapshots++
		for w := range v.watchers {
			w.snapshot()
		}
	})
}

// edit changes what readers see.
func (v *View) edit(f func()) {
	v.mu.Lock()
	defer v.mu.Unlock()
	f()
	for w := range v.watchers {
		w.wake(v.about)
	}
}

// Status tells how the View stands.
func (v *View) Status() ViewStatus {
	v.mu.RLock()
	defer v.mu.RUnlock()
	return v.about
}

// WaitReady waits until the View is Ready, or ctx is done, whose error it returns.
func (v *View) WaitReady(ctx context.Context) error {
	for range v.Changes(ctx) {
		if v.Status().Ready {
			return nil
		}
	}
	return ctx.Err()
}
