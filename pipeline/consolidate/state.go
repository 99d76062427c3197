package consolidate

import (
	"google.golang.org/protobuf/proto"

	"github.com/kvcast/kvcast/pipeline/copies"
	statev1 "github.com/kvcast/kvcast/proto/kvcast/state/v1"
)

// Flags of names in stored state. Idle names have none: when they become live, a store sets their parent, copies and generation.
const (
	storedParent = 1 << iota
	storedStale
	storedCopies
	storedSourceShift = iota
)

// AppendState appends the tracker's state, an encoded kvcast.state.v1.Tracker, from which Restore makes
// a tracker that decides everything as this tracker does. The state does not include changes that
// were not drained.
func (t *Tracker) AppendState(b []byte) []byte {
	blocks, names := t.blocks.len(), t.names.len()
	s := &statev1.Tracker{
		Generations:         t.generations,
		CountedNames:        make([]uint32, t.sources),
		PeakNames:           t.names.peak,
		ReservedScopes:      uint32(t.scopes.Reserved()),
		BlockScopes:         make([]uint32, 0, blocks),
		BlockSequenceHashes: make([]uint64, 0, blocks-t.unidentified),
		BlockRouterNames:    make([]uint32, 0, blocks),
		BlockLiveNames:      make([]uint32, 0, blocks),
		BlockIdleNames:      make([]uint32, 0, blocks),
		NameHashes:          make([]uint64, 0, names),
		NameFlags:           make([]uint32, 0, names),
		NameParents:         make([]uint64, 0, t.liveNames),
	}
	for source := range t.children {
		s.CountedNames[source] = t.children[source].upTo
	}
	scopes := make([]uint32, t.scopes.Slots()+1) // numbers in the state
	for id := t.oldest; id != 0; id = t.blocks.at(id).newer {
		bl := t.blocks.at(id)
		if slot := bl.content.scope; slot != 0 {
			if scopes[slot] == 0 {
				set := t.scopes.At(slot - 1)
				s.ScopeLoraNames = append(s.ScopeLoraNames, set.LoRA)
				s.ScopeCacheSalts = append(s.ScopeCacheSalts, []byte(set.Salt))
				scopes[slot] = uint32(len(s.ScopeLoraNames))
			}
			s.BlockSequenceHashes = append(s.BlockSequenceHashes, bl.content.sequence)
		}
		s.BlockScopes = append(s.BlockScopes, scopes[bl.content.scope])
		first := len(s.NameHashes)
		t.appendNames(s, bl.live)
		live := len(s.NameHashes)
		t.appendNames(s, bl.idle)
		s.BlockLiveNames = append(s.BlockLiveNames, uint32(live-first))
		s.BlockIdleNames = append(s.BlockIdleNames, uint32(len(s.NameHashes)-live))
		router := uint32(0)
		for i, hash := range s.NameHashes[first:] {
			if hash == bl.routerHash {
				router = uint32(i + 1)
				break
			}
		}
		if router == 0 {
			s.BlockRouterHashes = append(s.BlockRouterHashes, bl.routerHash)
		}
		s.BlockRouterNames = append(s.BlockRouterNames, router)
		if t.staleFrom == id {
			s.StaleFrom = uint32(len(s.BlockScopes))
		}
	}
	b, err := proto.MarshalOptions{}.MarshalAppend(b, s)
	if err != nil {
		// The only cause is a LoRA name that is not UTF-8, which ingest prevents.
		panic("consolidate: encode state: " + err.Error())
	}
	return b
}

// appendNames appends the names of a ring.
func (t *Tracker) appendNames(s *statev1.Tracker, first uint32) {
	for id, n := range t.ring(first) {
		flags := uint32(n.source()) << storedSourceShift
		if n.live() {
			if n.flags&flagParent != 0 {
				flags |= storedParent
				s.NameParents = append(s.NameParents, n.parent)
			}
			if t.stale(n) {
				flags |= storedStale
			} else if count := t.count(id); count != (copies.Count{}) {
				flags |= storedCopies
				s.NameFurtherCopies = append(s.NameFurtherCopies, count.Further)
				s.NameUnsureCopies = append(s.NameUnsureCopies, count.Unsure)
			}
		}
		s.NameHashes = append(s.NameHashes, n.hash)
		s.NameFlags = append(s.NameFlags, flags)
	}
}
