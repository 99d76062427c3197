package pipeline

import (
	"slices"

	"github.com/kvcast/kvcast/internal/journal"
	statev1 "github.com/kvcast/kvcast/proto/kvcast/state/v1"
)

// maxRemovedNames bounds the removed workers whose last event id is kept. Publishers choose the names, of up to 2 KiB each.
const maxRemovedNames = 16_384

// eventIDs keeps the last event ids of removed workers, so that a worker that returns under its name
// continues from there. Beyond maxRemovedNames it evicts the worker that was removed first. A new
// name then continues from the largest evicted id, since the name may have been evicted.
type eventIDs struct {
	byName map[string]*removedWorker
	all    []*removedWorker // the first removed in front
	floor  uint64           // the largest evicted id
}

type removedWorker struct {
	name     string
	lastID   uint64
	appended journal.Pending // its last entry
	stored   bool            // a stored checkpoint has the worker
}

// isDurable reports whether the worker is removed after a crash, too.
func (w *removedWorker) isDurable() bool {
	_, acknowledged := acknowledged(w.appended)
	return w.stored || acknowledged
}

func (w *removedWorker) state() *statev1.RemovedWorker {
	return &statev1.RemovedWorker{Name: w.name, LastEventId: w.lastID}
}

func newEventIDs() eventIDs {
	return eventIDs{byName: make(map[string]*removedWorker)}
}

// resume returns the id after which a worker of that name continues, and deletes the name. earlier is what was remembered
// of it; nil if nothing was.
func (ids *eventIDs) resume(name string) (id uint64, earlier *removedWorker) {
	if earlier = ids.byName[name]; earlier == nil {
		return ids.floor, nil
	}
	ids.drop(earlier)
	return earlier.lastID, earlier
}

// drop deletes a name.
func (ids *eventIDs) drop(w *removedWorker) {
	delete(ids.byName, w.name)
	i := slices.Index(ids.all, w)
	ids.all = slices.Delete(ids.all, i, i+1)
}

// remember keeps the last id of a removed worker, and forgets an earlier one of the name.
func (ids *eventIDs) remember(w removedWorker) {
	if known := ids.byName[w.name]; known != nil {
		ids.drop(known)
	}
	ids.byName[w.name], ids.all = &w, append(ids.all, &w)
	if len(ids.all) > maxRemovedNames {
		ids.floor = max(ids.floor, ids.all[0].lastID)
		ids.drop(ids.all[0])
	}
}

// raise is remember, unless a larger id of the worker is known.
func (ids *eventIDs) raise(w removedWorker) {
	if known := ids.byName[w.name]; known == nil || known.lastID < w.lastID {
		ids.remember(w)
	}
}

// merge adds the workers of other.
func (ids *eventIDs) merge(other *eventIDs) {
	ids.floor = max(ids.floor, other.floor)
	for _, w := range other.all {
		ids.raise(*w)
	}
}

// state returns the stored form of the removed workers, and those of them that no stored checkpoint has. It omits workers
// whose last entry is not acknowledged: the entry may get lost, and its event id would be missing in the journal.
func (ids *eventIDs) state() (state *statev1.RemovedWorkers, unstored []removedWorker) {
	state = &statev1.RemovedWorkers{LargestForgottenId: ids.floor}
	for _, w := range ids.all {
		if !w.isDurable() {
			continue
		}
		if !w.stored {
			unstored = append(unstored, *w)
		}
		state.Workers = append(state.Workers, w.state())
	}
	return state, unstored
}

// setStored marks workers that a stored checkpoint has.
func (ids *eventIDs) setStored(workers []removedWorker) {
	for _, w := range workers {
		if known := ids.byName[w.name]; known != nil && known.lastID == w.lastID {
			known.stored = true
		}
	}
}

// needed returns the entries that recovery needs: those that removed the workers which no stored checkpoint has.
func (ids *eventIDs) needed() (entries []journal.Pending) {
	for _, w := range ids.all {
		if !w.stored {
			entries = append(entries, w.appended)
		}
	}
	return entries
}

// restore adds the workers of a checkpoint.
func (ids *eventIDs) restore(state *statev1.RemovedWorkers) {
	ids.floor = max(ids.floor, state.GetLargestForgottenId())
	for _, w := range state.GetWorkers() {
		ids.remember(removedWorker{name: w.GetName(), lastID: w.GetLastEventId(), stored: true})
	}
}
