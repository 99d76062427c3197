package pipeline

import (
	"errors"
	"fmt"
	"slices"

	"google.golang.org/protobuf/encoding/protowire"
	"google.golang.org/protobuf/proto"

	"github.com/kvcast/kvcast/internal/core/encode"
	"github.com/kvcast/kvcast/internal/core/kvblock"
	"github.com/kvcast/kvcast/internal/feed"
	"github.com/kvcast/kvcast/internal/wire"
	"github.com/kvcast/kvcast/pipeline/internal/consolidate"
	"github.com/kvcast/kvcast/pipeline/internal/copies"
	"github.com/kvcast/kvcast/pipeline/internal/groups"
	statev1 "github.com/kvcast/kvcast/proto/kvcast/state/v1"
	kvcastv1 "github.com/kvcast/kvcast/proto/kvcast/v1"
)

// application applies the events and changes of an entry to a lane.
type application struct {
	*Recovery
	worker  *recoveredWorker
	changes []*statev1.Change // not applied yet
	ops     *statev1.CopyOps  // of the next event
}

// applyChanges applies the changes that precede event n of the entry.
func (a *application) applyChanges(n int) error {
	for len(a.changes) > 0 && uint64(a.changes[0].GetEventsBefore()) <= uint64(n) {
		c := a.changes[0]
		a.changes = a.changes[1:]
		if err := a.applyChange(c); err != nil {
			return err
		}
	}
	return nil
}

func (a *application) applyChange(c *statev1.Change) error {
	l := a.worker.lane
	switch c := c.GetChange().(type) {
	case *statev1.Change_SuppressedRemoves:
		s := c.SuppressedRemoves
		tier, err := storedTier(uint64(s.GetTier()))
		if err != nil {
			return fmt.Errorf("suppressed removes: %w", err)
		}
		op := copies.Op(s.GetOp())
		if op == copies.RemoveAnnounced {
			op = copies.Remove // a child of the block was the reason to suppress the remove
		}
		remove := l.newTable(l.rank(s.GetDpRank()), tier).remove
		if s.GetGroup() != 0 {
			key, err := groups.KeyOf(s.GetGroup(), tier)
			if err != nil {
				return fmt.Errorf("suppressed removes: %w", err)
			}
			remove = l.rank(s.GetDpRank()).otherGroups.Blocks(key).Remove
		}
		for _, hash := range s.GetBlockHashes() {
			remove(hash, op)
		}
	case *statev1.Change_StoreOps:
		a.ops = c.StoreOps
	case *statev1.Change_StaleTiers:
		for tier, t := range &l.rank(c.StaleTiers.GetDpRank()).tables {
			if t != nil && c.StaleTiers.GetTiers()&(1<<tier) != 0 {
				t.gap()
			}
		}
	case *statev1.Change_TrackerCalls:
		if l.consolidation != dedup {
			return errors.New("tracker calls of a worker whose sources are not deduplicated")
		}
		return consolidate.Replay(c.TrackerCalls, func(rank uint32) *consolidate.Tracker {
			return l.sources(rank, l.rank(rank)).tracker
		})
	case *statev1.Change_Learned:
		a.worker.learned = append(a.worker.learned, c.Learned)
	default:
		return fmt.Errorf("change of an unknown kind: %w", errLater)
	}
	return nil
}

// apply applies an event.
func (a *application) apply(e *event) error {
	switch e.kind {
	case kvcastv1.RouterEventStoredField, kvcastv1.RouterEventRemovedField:
		tier, err := storedTier(e.tier)
		if err != nil {
			return err
		}
		l := a.worker.lane
		r := l.rank(e.rank)
		t := l.newTable(r, tier)
		if e.kind == kvcastv1.RouterEventStoredField {
			r.used |= 1 << tier
			return a.stored(t, e.value)
		}
		return a.eventRemoved(t, e.value)
	case kvcastv1.RouterEventGroupStoredField, kvcastv1.RouterEventGroupRemovedField:
		tier, err := storedTier(e.tier)
		if err != nil {
			return err
		}
		r := a.worker.lane.rank(e.rank)
		if e.kind == kvcastv1.RouterEventGroupStoredField {
			r.used |= 1 << tier
		}
		return a.group(r, tier, e.kind, e.value)
	case kvcastv1.RouterEventWorkerAddedField:
		return nil
	default:
		return a.other(e)
	}
}

// other applies an event of a rare kind.
func (a *application) other(e *event) error {
	var ev kvcastv1.RouterEvent
	if err := proto.Unmarshal(e.all, &ev); err != nil {
		return fmt.Errorf("decode event: %w", err)
	}
	l := a.worker.lane
	r := l.rank(e.rank)
	switch kind := ev.GetEvent().(type) {
	case *kvcastv1.RouterEvent_Cleared:
		for tier := range r.tables {
			if tiers := kind.Cleared.GetTiers(); len(tiers) == 0 || slices.Contains(tiers, kvcastv1.Tier(tier)) {
				l.dropTable(r, kvblock.Tier(tier))
			}
		}
	case *kvcastv1.RouterEvent_Gap:
		if l.consolidation != dedup && engineGap(kind.Gap.GetReason()) {
			r.gap()
		}
	case *kvcastv1.RouterEvent_GroupsOmitted, *kvcastv1.RouterEvent_Groups, *kvcastv1.RouterEvent_Resolved:
	default:
		return fmt.Errorf("event of the unknown kind %d: %w", e.kind, errLater)
	}
	r.emitted(&ev)
	return nil
}

// stored applies an encoded Stored.
func (a *application) stored(t *table, b []byte) error {
	r := run{key: runKey{kind: wire.KindStored, salt: "unknown"}, inputs: true} // the event tells neither
	a.hashes = a.hashes[:0]
	tokensHashes := 0
	var f encode.Field
	for len(b) > 0 {
		rest, err := f.Next(b)
		if err != nil {
			return fmt.Errorf("decode stored: %w", err)
		}
		b = rest
		switch f.Number {
		case kvcastv1.StoredParentHashField:
			r.parent, r.hasParent = f.Value, true
		case kvcastv1.StoredBlockHashesField:
			if a.hashes, err = f.AppendFixed64s(a.hashes); err != nil {
				return fmt.Errorf("decode stored: %w", err)
			}
		case kvcastv1.StoredTokensHashesField:
			tokensHashes += len(f.Bytes) / 8
		case kvcastv1.StoredBlockSizeField:
			r.key.blockSize = uint32(f.Value)
		case kvcastv1.StoredLoraNameField:
			r.key.lora = string(f.Bytes)
		default: // a field that the table does not have
		}
	}
	r.hashes, r.key.hashed = a.hashes, tokensHashes == len(a.hashes)
	var err error
	if r.ops, err = restoreOps(a.ops, len(r.hashes)); err != nil {
		return err
	}
	a.ops = nil
	slot, _ := t.acquireAttributes(&r)
	t.blocks.table.Prefetch(r.hashes)
	t.storeRun(&r, slot)
	t.attrs.Release(slot)
	return nil
}

// eventRemoved applies an encoded Removed.
func (a *application) eventRemoved(t *table, b []byte) error {
	a.hashes = a.hashes[:0]
	var f encode.Field
	for len(b) > 0 {
		rest, err := f.Next(b)
		if err == nil && f.Number == kvcastv1.RemovedBlockHashesField {
			a.hashes, err = f.AppendFixed64s(a.hashes)
		}
		if err != nil {
			return fmt.Errorf("decode removed: %w", err)
		}
		b = rest
	}
	t.blocks.table.Prefetch(a.hashes)
	for _, hash := range a.hashes {
		t.remove(hash, copies.RemoveAll)
	}
	return nil
}

// engineGap reports whether a Gap with the reason makes the blocks of the rank stale: whether batches were lost.
func engineGap(reason kvcastv1.Gap_Reason) bool {
	switch reason {
	case kvcastv1.Gap_REASON_TOO_MANY_BLOCKS, kvcastv1.Gap_REASON_TOO_MANY_ATTRIBUTES, kvcastv1.Gap_REASON_SHARED_TIER,
		kvcastv1.Gap_REASON_EVENTS_SKIPPED, kvcastv1.Gap_REASON_BLOCK_SIZE_MISMATCH, kvcastv1.Gap_REASON_UNKNOWN_CONTENT,
		kvcastv1.Gap_REASON_TIER_NOT_CLEARED, kvcastv1.Gap_REASON_REPLAY_UNPROVED, kvcastv1.Gap_REASON_COPIES_UNSURE,
		kvcastv1.Gap_REASON_CONNECTOR_TIER, kvcastv1.Gap_REASON_RELAYED:
		return false
	default:
		return true
	}
}

// applyState applies the fields of an entry's state that replace the earlier state.
func (w *recoveredWorker) applyState(s *statev1.EntryState) error {
	l := w.lane
	for _, c := range s.GetCursors() {
		if c.GetSource() >= maxSourceIndex {
			return fmt.Errorf("cursor of source %d", c.GetSource())
		}
		if w.cursors == nil {
			w.cursors = make(map[feed.Publisher][]byte)
		}
		w.cursors[feed.Publisher{Source: int(c.GetSource()), Rank: c.GetDpRank()}] = c.GetCursor()
	}
	for _, sources := range s.GetSources() {
		if err := l.restoreSources(sources); err != nil {
			return err
		}
	}
	return l.restoreState(s.GetRawEventIds(), s.GetAnnouncements(), s.GetPending())
}

// event is the head of an encoded event.
type event struct {
	id    uint64
	rank  uint32
	tier  uint64
	kind  protowire.Number // of the field of the event
	value []byte           // of that field
	model string           // of the entry
	all   []byte           // the whole event
}

// firstEvent returns the first event of an entry. Its kind is 0 if there is none.
func firstEvent(body []byte) (event, error) {
	var model string
	var f encode.Field
	for b := body; len(b) > 0; {
		rest, err := f.Next(b)
		if err != nil {
			return event{}, fmt.Errorf("decode entry: %w", err)
		}
		b = rest
		switch f.Number {
		case kvcastv1.EntryModelField:
			model = string(f.Bytes)
		case kvcastv1.EntryEventsField:
			e, err := decodeEvent(f.Bytes)
			e.model = model
			return e, err
		default: // a field that recovery does not need
		}
	}
	return event{}, nil
}

func decodeEvent(b []byte) (e event, err error) {
	e.all = b
	var f encode.Field
	for len(b) > 0 {
		rest, err := f.Next(b)
		if err != nil {
			return event{}, fmt.Errorf("decode event: %w", err)
		}
		b = rest
		switch f.Number {
		case kvcastv1.RouterEventEventIDField:
			e.id = f.Value
		case kvcastv1.RouterEventDpRankField:
			e.rank = uint32(f.Value)
		case kvcastv1.RouterEventTierField:
			e.tier = f.Value
		default:
			e.kind, e.value = f.Number, f.Bytes
		}
	}
	if e.id == 0 {
		return event{}, errors.New("event without an event id")
	}
	return e, nil
}
