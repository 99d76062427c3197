package consolidate

import (
	"fmt"
	"slices"

	"google.golang.org/protobuf/proto"

	"github.com/kvcast/kvcast/internal/budget"
	"github.com/kvcast/kvcast/internal/core/attribute"
	"github.com/kvcast/kvcast/pipeline/internal/copies"
	statev1 "github.com/kvcast/kvcast/proto/kvcast/state/v1"
)

// Restore makes a tracker, as New does, with a state that AppendState has appended. The budgets and maxBlocks may be lower than before:
// Restore reserves what the tracker has even beyond their limits, and the tracker stores no further blocks until it is within them.
//
// Restore returns an error, and reserves nothing, if the state is invalid or has another number of sources. It uses memory of up to some
// ten times the length of the state, and 60 times that of the LoRA adapters and cache salts.
func Restore(
	state []byte, sources, maxBlocks int, blocks, attributeBytes *budget.Budget, counts *Counts,
) (*Tracker, error) {
	s := new(statev1.Tracker)
	if err := proto.Unmarshal(state, s); err != nil {
		return nil, fmt.Errorf("decode state of consolidated sources: %w", err)
	}
	t := New(sources, maxBlocks, blocks, attributeBytes, counts)
	var err error
	t.withoutLimit(func() { err = (&restoration{Tracker: t, state: s}).run() })
	if err != nil {
		t.Reset()
		return nil, fmt.Errorf("restore state of consolidated sources: %w", err)
	}
	return t, nil
}

// withoutLimit calls do, in which no budget refuses anything, and then reserves in the budgets what the tracker has more than before.
func (t *Tracker) withoutLimit(do func()) {
	b, before := t.budget, t.units()
	t.budget = nil
	t.scopes.WithoutLimit(do)
	t.budget = b
	b.Adjust(t.units() - before)
}

// units returns the units of the budget that blocks and names use.
func (t *Tracker) units() int64 { return int64(unitsPerBlock*t.blocks.len() + t.names.len()) }

// restoration fills a new tracker from stored state. It consumes the state's columns.
type restoration struct {
	*Tracker
	state *statev1.Tracker
	// slots are the slots of the scopes.
	slots []uint32
	// namesPrefetched is the number of the next names that were prefetched.
	namesPrefetched int
	keys            []uint64 // reused by prefetchContents and prefetchNames
	// lacking reports whether a column ended too early.
	lacking bool
}

func (r *restoration) run() error {
	s := r.state
	if err := r.sourceState(); err != nil {
		return err
	}
	if len(s.NameHashes) > maxRecords || int(s.PeakNames) < len(s.NameHashes) || s.PeakNames > maxRecords {
		return fmt.Errorf("a peak of %d names with %d names", s.PeakNames, len(s.NameHashes))
	}
	if err := r.acquireScopes(); err != nil {
		return err
	}
	for i := range s.BlockScopes {
		if i%prefetched == 0 {
			r.prefetchContents(s.BlockScopes[i:min(i+prefetched, len(s.BlockScopes))])
		}
		if err := r.block(i); err != nil {
			return fmt.Errorf("block %d of %d: %w", i+1, len(s.BlockScopes), err)
		}
		if int(s.StaleFrom) == i+1 {
			r.staleFrom = r.newest
		}
	}
	if int(s.StaleFrom) > r.Len() {
		return fmt.Errorf("stale from block %d of %d", s.StaleFrom, r.Len())
	}
	if r.lacking || r.leftOver() {
		return fmt.Errorf("the columns do not have the same number of blocks or names")
	}
	r.names.peak = s.PeakNames
	for _, slot := range r.slots {
		r.scopes.Release(slot)
	}
	if r.scopes.Len() != len(r.slots) {
		return fmt.Errorf("%d of %d scopes have blocks", r.scopes.Len(), len(r.slots))
	}
	return nil
}

// sourceState restores what the state has for each source.
func (r *restoration) sourceState() error {
	s := r.state
	if len(s.Generations) != r.sources || len(s.CountedNames) != r.sources {
		return fmt.Errorf("generations of %d and counted names of %d sources, want %d",
			len(s.Generations), len(s.CountedNames), r.sources)
	}
	for source, generation := range s.Generations {
		if generation > maxGeneration {
			return fmt.Errorf("source %d: generation %d, want at most %d", source, generation, maxGeneration)
		}
		upTo := s.CountedNames[source]
		if upTo > s.PeakNames && upTo != allNames {
			return fmt.Errorf("source %d: children of %d names counted, of up to %d", source, upTo, s.PeakNames)
		}
		if upTo > 0 {
			r.children[source] = childCounts{byParent: make(map[uint64]uint32), upTo: upTo}
		}
	}
	copy(r.generations, s.Generations)
	return nil
}

// acquireScopes acquires the slot of each scope until all blocks are restored.
func (r *restoration) acquireScopes() error {
	s := r.state
	if len(s.ScopeLoraNames) != len(s.ScopeCacheSalts) || len(s.ScopeLoraNames) > len(s.BlockScopes) {
		return fmt.Errorf("%d LoRA adapters and %d cache salts of %d blocks",
			len(s.ScopeLoraNames), len(s.ScopeCacheSalts), len(s.BlockScopes))
	}
	for i, lora := range s.ScopeLoraNames {
		slot, _ := r.scopes.Acquire(attribute.Set{LoRA: lora, Salt: string(s.ScopeCacheSalts[i])})
		if int(slot) != i {
			return fmt.Errorf("scope %d is the same as scope %d", i+1, slot+1)
		}
		r.slots = append(r.slots, slot)
	}
	// A Store acquires the scope before any name.
	if n := s.ReservedScopes; n > 0 && len(r.slots) == 0 || uint64(n) > uint64(s.PeakNames)+1 {
		return fmt.Errorf("a peak of %d scopes, with %d scopes and a peak of %d names", n, len(r.slots), s.PeakNames)
	}
	r.scopes.ReserveSlots(int(s.ReservedScopes))
	return nil
}

// next removes the first element of a column and returns it; 0 if there is none.
func next[T any](r *restoration, column *[]T) (v T) {
	if len(*column) == 0 {
		r.lacking = true
		return v
	}
	v, *column = (*column)[0], (*column)[1:]
	return v
}

// prefetched is the number of blocks or names whose entries in an index are loaded at once.
const prefetched = 32

// prefetchContents prefetches the contents of the next blocks, which have these scopes.
func (r *restoration) prefetchContents(scopes []uint32) {
	keys, sequences := r.keys[:0], r.state.BlockSequenceHashes
	for _, scope := range scopes {
		if scope != 0 && len(keys) < len(sequences) {
			keys = append(keys, content{scope, sequences[len(keys)]}.key())
		}
	}
	r.byContent.Prefetch(keys)
	r.keys = keys
}

// prefetchNames prefetches the next names.
func (r *restoration) prefetchNames() {
	keys := r.keys[:0]
	n := min(prefetched, len(r.state.NameHashes), len(r.state.NameFlags))
	for i, hash := range r.state.NameHashes[:n] {
		keys = append(keys, nameKey(int(r.state.NameFlags[i]>>storedSourceShift), hash))
	}
	r.byName.Prefetch(keys)
	r.keys, r.namesPrefetched = keys, n
}

// leftOver reports whether a column has more elements than the blocks and names need.
func (r *restoration) leftOver() bool {
	s := r.state
	return len(s.BlockSequenceHashes)+len(s.BlockRouterNames)+len(s.BlockRouterHashes)+len(s.BlockLiveNames)+len(s.BlockIdleNames)+
		len(s.NameHashes)+len(s.NameFlags)+len(s.NameParents)+len(s.NameFurtherCopies)+len(s.NameUnsureCopies) > 0
}

// block restores block i and its names.
func (r *restoration) block(i int) error {
	s := r.state
	var c content
	if c.scope = s.BlockScopes[i]; c.scope != 0 {
		c.sequence = next(r, &s.BlockSequenceHashes)
		if int(c.scope) > len(r.slots) {
			return fmt.Errorf("scope %d of %d", c.scope, len(r.slots))
		}
		if r.find(c) != 0 {
			return fmt.Errorf("another block has the same content")
		}
	}
	live, idle := uint64(next(r, &s.BlockLiveNames)), uint64(next(r, &s.BlockIdleNames))
	if live == 0 || live+idle > uint64(len(s.NameHashes)) || live+idle > uint64(len(s.NameFlags)) {
		return fmt.Errorf("%d live and %d idle names, of %d", live, idle, len(s.NameHashes))
	}
	var routerHash uint64
	switch router := uint64(next(r, &s.BlockRouterNames)); {
	case router == 0:
		routerHash = next(r, &s.BlockRouterHashes)
	case router > live+idle:
		return fmt.Errorf("router hash of name %d of %d", router, live+idle)
	default:
		routerHash = s.NameHashes[router-1]
	}
	id := r.addBlock(routerHash, c)
	if err := r.ringOfNames(id, int(live), true); err != nil {
		return err
	}
	if err := r.ringOfNames(id, int(idle), false); err != nil {
		return err
	}
	return r.checkIdle(r.blocks.at(id), int(idle))
}

// checkIdle returns an error if a source has too many idle names for a block, which has n idle names.
func (r *restoration) checkIdle(b *block, n int) error {
	if n <= maxIdleNames {
		return nil
	}
	bySource := make([]int, r.sources)
	for _, n := range r.ring(b.idle) {
		if n.hash != b.routerHash {
			bySource[n.source()]++
		}
	}
	if n := slices.Max(bySource); n > maxIdleNames {
		return fmt.Errorf("%d idle names of a source, want at most %d", n, maxIdleNames)
	}
	return nil
}

// ringOfNames restores the next names, as a block's ring of live or idle names.
func (r *restoration) ringOfNames(block uint32, n int, live bool) error {
	first := r.names.last + 1
	for range n {
		if err := r.name(block, live); err != nil {
			return err
		}
	}
	for nameID := r.names.last; nameID >= first; nameID-- {
		r.link(nameID, block)
	}
	return nil
}

// name restores the next name, without linking it.
func (r *restoration) name(block uint32, live bool) error {
	s := r.state
	if r.namesPrefetched == 0 {
		r.prefetchNames()
	}
	r.namesPrefetched--
	hash, flags := next(r, &s.NameHashes), next(r, &s.NameFlags)
	source := int(flags &^ storedNamed >> storedSourceShift)
	if source >= r.sources {
		return fmt.Errorf("name %x of source %d, want less than %d", hash, source, r.sources)
	}
	if r.Tracker.name(source, hash) != 0 {
		return fmt.Errorf("name %x of source %d: another name is the same", hash, source)
	}
	nameID := r.addName(source, hash, block)
	if flags&storedNamed != 0 {
		r.names.at(nameID).flags |= flagNamed
	}
	if !live {
		if flags&(1<<storedSourceShift-1) != 0 {
			return fmt.Errorf("name %x of source %d is idle, and has flags %#x", hash, source, flags)
		}
		return nil
	}
	n := r.names.at(nameID)
	n.flags &^= flagIdle
	r.live[source]++
	r.liveNames++
	if flags&storedParent != 0 {
		n.flags |= flagParent
		n.parent = next(r, &s.NameParents)
	}
	var count copies.Count
	if flags&storedCopies != 0 {
		count = copies.Count{Further: next(r, &s.NameFurtherCopies), Unsure: next(r, &s.NameUnsureCopies)}
		if count == (copies.Count{}) || flags&storedStale != 0 {
			return fmt.Errorf("name %x of source %d has no further copies, or is stale", hash, source)
		}
	}
	r.setCount(nameID, count)
	if flags&storedStale != 0 {
		if r.generations[source] == 0 {
			return fmt.Errorf("name %x of source %d is stale without a gap", hash, source)
		}
		n.flags -= 1 << generationShift
	}
	r.countChild(nameID, 1)
	return nil
}
