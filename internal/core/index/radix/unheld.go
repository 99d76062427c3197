package radix

import "slices"

// A block keeps its place if the blocks before it are removed. Without a bound, an engine that holds one block could thus
// fill the memory: it removes each block after it has stored the next, or stores the same block after itself.

// noteUnheld notes whether a run is unheld, after blocks of it were released.
func (t *tree) noteUnheld(id uint32) {
	r := t.run(id)
	if r.isHeld() || len(r.tokens) == 0 || r.unheld {
		return
	}
	r.unheld = true
	t.unheldRuns++
	if r.queued {
		return
	}
	if len(t.unheld) > 2*t.unheldRuns+t.limits.unheld {
		t.unheld = slices.DeleteFunc(t.unheld, func(id uint32) bool {
			r := t.run(id)
			r.queued = r.unheld
			return !r.unheld
		})
	}
	r.queued = true
	t.unheld = append(t.unheld, id)
}

// forgetUnheld forgets the oldest unheld runs, up to some number, while there are too many. Each becomes a detached run,
// which keeps its number until no run follows it. A detached run follows none, so that there are never more than other
// runs. All blocks must be held that have been placed.
func (t *tree) forgetUnheld(most int) {
	for ; most > 0 && t.hasManyUnheld(); most-- {
		id := t.unheld[0]
		t.unheld = t.unheld[1:]
		r := t.run(id)
		if r.queued = false; !r.unheld {
			continue
		}
		r.unheld = false
		t.unheldRuns--
		t.detachedRuns++
		after := t.detach(id)
		t.dropIDs(r)
		r.tokens, r.after, r.detached = nil, position{}, true
		t.trim(after)
	}
}

func (t *tree) hasManyUnheld() bool {
	runs := int(t.runs) - len(t.free)
	return t.unheldRuns > 0 && 2*(t.unheldRuns+t.detachedRuns) > t.limits.unheld+runs
}
