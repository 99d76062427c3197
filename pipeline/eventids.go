package pipeline

import "container/list"

// maxRemovedNames is how many workers that are gone have their last event id
// remembered. Names come from publishers, at up to 2 KiB each.
const maxRemovedNames = 16_384

// eventIDs remembers the last event ids of workers that are gone, so that no id
// comes twice under a name. It forgets the name that went first when there are
// too many; every name that it does not know then goes on from the largest id
// forgotten, for it may be one of those.
type eventIDs struct {
	byName map[string]*list.Element
	gone   *list.List // of goneWorker, the first to have gone in front
	floor  uint64
}

type goneWorker struct {
	name   string
	lastID uint64
}

func newEventIDs() eventIDs {
	return eventIDs{byName: make(map[string]*list.Element), gone: list.New()}
}

// take returns the id after which a worker of a name goes on, and forgets it.
func (ids *eventIDs) take(name string) uint64 {
	e := ids.byName[name]
	if e == nil {
		return ids.floor
	}
	delete(ids.byName, name)
	return ids.gone.Remove(e).(goneWorker).lastID
}

// keep remembers the last id of a worker that has gone; take was called when it
// came.
func (ids *eventIDs) keep(name string, lastID uint64) {
	ids.byName[name] = ids.gone.PushBack(goneWorker{name, lastID})
	if ids.gone.Len() > maxRemovedNames {
		oldest := ids.gone.Remove(ids.gone.Front()).(goneWorker)
		delete(ids.byName, oldest.name)
		ids.floor = max(ids.floor, oldest.lastID)
	}
}
