package consolidate

import (
	"slices"

	"google.golang.org/protobuf/encoding/protowire"
	"google.golang.org/protobuf/proto"

	"github.com/kvcast/kvcast/internal/core/encode"
	"github.com/kvcast/kvcast/pipeline/internal/copies"
	statev1 "github.com/kvcast/kvcast/proto/kvcast/state/v1"
)

// Flags of names in stored state, beside the source. Idle names have storedNamed alone: the store that makes a name live sets
// its parent, copies and generation.
const (
	storedParent = 1 << iota
	storedStale
	storedCopies
	storedSourceShift = iota
	// storedNamed is above the source.
	storedNamed = 1 << (storedSourceShift + 7)
)

// storedFlags returns the source and the flag that names have whether they are idle or not.
func storedFlags(n *name) uint64 {
	flags := uint64(n.source()) << storedSourceShift
	if n.flags&flagNamed != 0 {
		flags |= storedNamed
	}
	return flags
}

// AppendState appends the tracker's state, an encoded kvcast.state.v1.Tracker, from which Restore makes a tracker that decides everything
// as this tracker does. The state does not include changes that were not drained.
func (t *Tracker) AppendState(b []byte) []byte {
	blocks, names := t.blocks.len(), t.names.len()
	c := columns{
		Tracker: &statev1.Tracker{
			Generations:         t.generations,
			CountedNames:        make([]uint32, t.sources),
			PeakNames:           t.names.peak,
			ReservedScopes:      uint32(t.scopes.Reserved()),
			BlockSequenceHashes: make([]uint64, 0, blocks-t.unidentified),
			NameHashes:          make([]uint64, 0, names),
			NameParents:         make([]uint64, 0, t.liveNames),
		},
		scopes:      make([]byte, 0, blocks),
		routerNames: make([]byte, 0, blocks),
		liveNames:   make([]byte, 0, blocks),
		idleNames:   make([]byte, 0, blocks),
		nameFlags:   make([]byte, 0, names),
	}
	for source := range t.children {
		c.CountedNames[source] = t.children[source].upTo
	}
	scopes, n := make([]uint32, t.scopes.Slots()+1), uint32(0) // scopes are their numbers in the state
	for id := t.oldest; id != 0; id = t.blocks.at(id).newer {
		bl := t.blocks.at(id)
		if slot := bl.content.scope; slot != 0 {
			if scopes[slot] == 0 {
				set := t.scopes.At(slot - 1)
				c.ScopeLoraNames = append(c.ScopeLoraNames, set.LoRA)
				c.ScopeCacheSalts = append(c.ScopeCacheSalts, []byte(set.Salt))
				scopes[slot] = uint32(len(c.ScopeLoraNames))
			}
			c.BlockSequenceHashes = append(c.BlockSequenceHashes, bl.content.sequence)
		}
		c.scopes = protowire.AppendVarint(c.scopes, uint64(scopes[bl.content.scope]))
		t.appendNames(&c, bl)
		if n++; t.staleFrom == id {
			c.StaleFrom = n
		}
	}
	return c.append(b)
}

// columns are the columns of stored state. Those of small numbers are encoded without generated code, which
// would need a third of the time of AppendState for them.
type columns struct {
	*statev1.Tracker
	scopes, routerNames, liveNames, idleNames, nameFlags []byte
}

func (c *columns) append(b []byte) []byte {
	b, err := proto.MarshalOptions{}.MarshalAppend(b, c.Tracker)
	if err != nil {
		// The only cause is a LoRA name that is not UTF-8, which ingest prevents.
		panic("consolidate: encode state: " + err.Error())
	}
	b = encode.AppendString(b, statev1.TrackerBlockScopesField, c.scopes)
	b = encode.AppendString(b, statev1.TrackerBlockRouterNamesField, c.routerNames)
	b = encode.AppendString(b, statev1.TrackerBlockLiveNamesField, c.liveNames)
	b = encode.AppendString(b, statev1.TrackerBlockIdleNamesField, c.idleNames)
	return encode.AppendString(b, statev1.TrackerNameFlagsField, c.nameFlags)
}

// appendNames appends the names of a block, and the hash by which routers know it.
func (t *Tracker) appendNames(c *columns, b *block) {
	first := len(c.NameHashes)
	for id, n := range t.ring(b.live) {
		t.appendLive(c, id, n)
	}
	live := len(c.NameHashes) - first
	for _, n := range t.ring(b.idle) {
		c.NameHashes = append(c.NameHashes, n.hash)
		c.nameFlags = protowire.AppendVarint(c.nameFlags, storedFlags(n))
	}
	names := c.NameHashes[first:]
	router := slices.Index(names, b.routerHash) + 1
	if router == 0 {
		c.BlockRouterHashes = append(c.BlockRouterHashes, b.routerHash)
	}
	c.routerNames = protowire.AppendVarint(c.routerNames, uint64(router))
	c.liveNames = protowire.AppendVarint(c.liveNames, uint64(live))
	c.idleNames = protowire.AppendVarint(c.idleNames, uint64(len(names)-live))
}

func (t *Tracker) appendLive(c *columns, id uint32, n *name) {
	flags := storedFlags(n)
	if n.flags&flagParent != 0 {
		flags |= storedParent
		c.NameParents = append(c.NameParents, n.parent)
	}
	if t.stale(n) {
		flags |= storedStale
	} else if count := t.count(id); count != (copies.Count{}) {
		flags |= storedCopies
		c.NameFurtherCopies = append(c.NameFurtherCopies, count.Further)
		c.NameUnsureCopies = append(c.NameUnsureCopies, count.Unsure)
	}
	c.NameHashes = append(c.NameHashes, n.hash)
	c.nameFlags = protowire.AppendVarint(c.nameFlags, flags)
}
