package wire

import (
	"cmp"
	"fmt"
	"maps"
	"slices"
	"strings"

	"github.com/kvcast/kvcast/internal/core/index/hybrid"
	"github.com/kvcast/kvcast/internal/core/index/hybrid/vllmhash"
	"github.com/kvcast/kvcast/internal/core/kvblock"
	kvcastv1 "github.com/kvcast/kvcast/proto/kvcast/v1"
)

const (
	// maxGroups bounds the attention groups of a source, over all its ranks. Models have a
	// few. Groups beyond the bound are treated as never seen.
	maxGroups = 8192
	// groupCost is the size of an attention group in bytes, with its share of its rank and of what is published.
	groupCost = 320
	// maxHashedBlock is the number of tokens in the largest block by which the hashes of an engine are found. It bounds the time that
	// a store takes, which is repeated until they are found. If a store leaves out blocks, all its tokens are hashed: maxSparseTries bounds
	// how many of a rank are, and maxSparseTokens their tokens.
	maxHashedBlock  = 4096
	maxSparseTries  = 256
	maxSparseTokens = 1 << 15
)

// GroupSettings are what is configured of the attention groups of a worker's engines, as their events do not have it.
type GroupSettings struct {
	// ChunkSize is the number of tokens in a chunk of chunked local attention; 0: it is not configured.
	ChunkSize int
	// EAGLEGroups are the groups of engines that draft tokens with EAGLE or MTP, of which these drop a block: bit n is group n. 0: they
	// do not draft.
	EAGLEGroups uint64
	// HashSeed is the engines' PYTHONHASHSEED; empty: it is not set.
	HashSeed string
	// LoRAPaths are the paths of LoRA adapters by name, as the engines were given them.
	LoRAPaths map[string]string
}

// attentionGroup is what the stores of a group have told of it.
type attentionGroup struct {
	idx int64
	// kind is empty if a version that did not keep it has stored the group, which was not the main group.
	kind      string
	blockSize uint32 // the largest of device memory
	window    int64
}

// maxGroupChanges bounds how often what is known of a rank's groups changes: routers get each description. Engines do not change them
// while they run, but their first stores may not tell the block size.
const maxGroupChanges = 64

// rankGroups are the attention groups of a dp rank, and how its engine computes hashes.
type rankGroups struct {
	all []attentionGroup // in the order in which they were learned
	// main is the index in all of the first group with main attention; -1: there is none.
	main int
	// changes counts the changes of groups that were known.
	changes int
	// unit is the number of tokens in a hash unit; 0: the hashes are not found. The other fields are how they are computed.
	unit      uint32
	algorithm vllmhash.Algorithm
	seed      string // empty: the default
	// sparseTries counts the stores with left out blocks by which the hashes were not found.
	sparseTries int
	// adapters are the LoRA adapters whose paths a store has shown to be right, and tries counts the stores of each that have not.
	adapters     map[string]string
	adapterBytes int
	tries        map[string]int
	// lost is why blocks of other groups may be unknown, until the engine's cache is cleared; empty: none are.
	lost string
	// described is the description for routers, and isDescribed whether it is current.
	described   *kvcastv1.Groups
	isDescribed bool
}

// find returns the index of a group in all; -1 if it is not known.
func (g *rankGroups) find(idx int64) int {
	for i := range g.all {
		if g.all[i].idx == idx {
			return i
		}
	}
	return -1
}

// groupsOf returns the groups of a rank; nil if none are known.
func (r *Rules) groupsOf(rank uint32) *rankGroups {
	if len(r.groups) == 0 { // of most engines
		return nil
	}
	if r.lastGroups == nil || r.lastRank != rank {
		r.lastRank, r.lastGroups = rank, r.groups[rank]
	}
	return r.lastGroups
}

// inMainGroup reports whether the event concerns the main group. A group that no store has named is the main group if it is group 0, unless
// the rank has another group with main attention: most models have one, of any index. Groups of a rank that is read from the middle are
// unknown until they store a block. If other groups are not followed, the main group is all groups with main attention.
func (r *Rules) inMainGroup(ev *Event, rank uint32) bool {
	if !ev.HasGroupIdx {
		return ev.SpecKind == "" || isMainAttention(ev.SpecKind)
	}
	g, at := r.groupsOf(rank), -1
	if g != nil {
		at = g.find(ev.GroupIdx)
	}
	switch {
	case at >= 0 && r.followed != nil:
		return at == g.main
	case ev.SpecKind != "":
		return isMainAttention(ev.SpecKind)
	case at >= 0:
		return isMainAttention(g.all[at].kind)
	default:
		return ev.GroupIdx == 0 && (g == nil || g.main < 0)
	}
}

// isKnownMain reports whether the event's group is known to have main attention.
func (r *Rules) isKnownMain(ev *Event, rank uint32) bool {
	g := r.groupsOf(rank)
	return g != nil && ev.HasGroupIdx && g.find(ev.GroupIdx) >= 0 && r.inMainGroup(ev, rank)
}

// follows reports whether an event of another group than the main group is admitted.
func (r *Rules) follows(ev *Event) bool {
	return r.followed != nil && ev.HasGroupIdx && 0 <= ev.GroupIdx && ev.GroupIdx < hybrid.MaxGroups &&
		(ev.Tier == kvblock.TierDevice || ev.Tier == kvblock.TierHostPinned)
}

// isMainAttention reports whether caches of this kind decide the reuse of prefixes.
func isMainAttention(kind string) bool {
	return kind == "full_attention" || kind == "mla_attention" || kind == "sink_full_attention"
}

// learnGroup learns the group of a store.
func (r *Rules) learnGroup(ev *Event, rank uint32) {
	learned := attentionGroup{idx: ev.GroupIdx, kind: ev.SpecKind, window: ev.rare().SlidingWindow}
	if tier, ok := tierOf(ev.Medium); ok && tier == kvblock.TierDevice && ev.BlockSize <= MaxBlockSize {
		learned.blockSize = ev.BlockSize
	}
	r.setGroup(rank, learned)
	if r.followed != nil && learned.blockSize != 0 {
		r.findHashing(ev, rank)
	}
}

// setGroup adds a group, or changes what is known of it.
func (r *Rules) setGroup(rank uint32, learned attentionGroup) {
	g := r.groupsOf(rank)
	at := -1
	if g != nil {
		at = g.find(learned.idx)
	}
	switch {
	case at >= 0:
		known := &g.all[at]
		learned.blockSize = max(learned.blockSize, known.blockSize)
		if learned == *known {
			return
		}
		if g.changes++; g.changes > maxGroupChanges {
			r.lose(rank, "the engine's stores do not agree about the attention groups")
			return
		}
		*known = learned
	case r.numGroups >= maxGroups || !r.budget.Reserve(groupCost):
		r.lose(rank, "there is no memory for further attention groups: raise ingest.salt_bytes")
		return
	case g == nil:
		g = new(rankGroups)
		r.groups[rank] = g
		r.lastGroups = nil
		fallthrough
	default:
		g.all = append(g.all, learned)
		r.numGroups++
	}
	g.main = slices.IndexFunc(g.all, func(a attentionGroup) bool { return isMainAttention(a.kind) })
	g.isDescribed = false
	r.changes.groupsChanged(rank)
}

// lose records that blocks of other groups than the main group may be unknown.
func (r *Rules) lose(rank uint32, why string) {
	if g := r.groupsOf(rank); g != nil && g.lost == "" {
		g.lost, g.isDescribed = why, false
		r.changes.groupsChanged(rank)
	}
}

// clearGroups records that a rank has no block.
func (r *Rules) clearGroups(rank uint32) {
	if g := r.groupsOf(rank); g != nil && g.lost != "" {
		g.lost, g.isDescribed = "", false
		r.changes.groupsChanged(rank)
	}
}

const (
	// maxAdapterBytes bounds the names and paths of a rank's adapters that are verified: each Groups event has all.
	maxAdapterBytes = 16 << 10
	maxAdapterTries = 64 // stores by which the path of an adapter is verified
)

// needsVerifying reports whether the path of a store's adapter is to be verified.
func (r *Rules) needsVerifying(g *rankGroups, ev *Event) bool {
	if ev.LoRAName == "" || r.followed.LoRAPaths[ev.LoRAName] == "" || g.adapters[ev.LoRAName] != "" || g.adapterBytes+len(ev.LoRAName)+len(r.followed.LoRAPaths[ev.LoRAName]) > maxAdapterBytes {
		return false
	}
	if g.tries == nil {
		g.tries = make(map[string]int)
	}
	g.tries[ev.LoRAName]++
	return g.tries[ev.LoRAName] <= maxAdapterTries
}

// findHashing finds how the engine computes hashes, by a store of blocks without a parent, and whether the path of its adapter is right.
func (r *Rules) findHashing(ev *Event, rank uint32) {
	g := r.groupsOf(rank)
	if g == nil || g.unit != 0 && !r.needsVerifying(g, ev) || ev.HasParent && ev.Parent != 0 || ev.BlockSize > maxHashedBlock || len(ev.BlockHashes) == 0 || !r.needsHashing(g) {
		return
	}
	if len(ev.BlockHashes) < len(ev.Tokens)/int(ev.BlockSize) {
		if len(ev.Tokens) > maxSparseTokens || g.sparseTries == maxSparseTries {
			return
		}
		g.sparseTries++
	}
	store := vllmhash.Store{
		Tokens: ev.Tokens, BlockSize: int(ev.BlockSize), Hashes: ev.BlockHashes,
		Content: vllmhash.Content{LoRAName: ev.LoRAName, LoRAPath: r.followed.LoRAPaths[ev.LoRAName]},
	}
	seed := r.followed.HashSeed
	if seed == "" {
		seed = vllmhash.DefaultSeed
	}
	for _, algorithm := range []vllmhash.Algorithm{vllmhash.SHA256, vllmhash.SHA256CBOR} {
		unit, err := vllmhash.FindUnit(algorithm, seed, store)
		if err != nil { // the content may also have a cache salt
			continue
		}
		if g.unit != 0 && (g.unit != uint32(unit) || g.algorithm != algorithm) {
			continue
		}
		g.unit, g.algorithm, g.seed, g.isDescribed = uint32(unit), algorithm, r.followed.HashSeed, false
		if path := r.followed.LoRAPaths[ev.LoRAName]; path != "" {
			g.adapters = maps.Clone(g.adapters) // the description has the former
			if g.adapters == nil {
				g.adapters = make(map[string]string)
			}
			g.adapters[strings.Clone(ev.LoRAName)] = path
			g.adapterBytes += len(ev.LoRAName) + len(path)
		}
		r.changes.groupsChanged(rank)
		return
	}
}

// needsHashing reports whether the engine reuses prefixes by other groups than one with main attention, or drops a part of them.
func (r *Rules) needsHashing(g *rankGroups) bool {
	return len(g.all) > 1 || g.main < 0 || r.followed.EAGLEGroups != 0
}

// describeGroups returns the description of a rank's groups for routers; nil if a main group decides alone which prefixes are reused, or if
// other groups are not followed. It does not change: after a change of a group, there is another one.
func (r *Rules) describeGroups(rank uint32) *kvcastv1.Groups {
	if r.followed == nil {
		return nil
	}
	g := r.groupsOf(rank)
	if g == nil {
		return nil
	}
	if !g.isDescribed {
		g.described, g.isDescribed = nil, true
		if r.needsHashing(g) {
			g.described = r.newDescription(g)
		}
	}
	return g.described
}

func (r *Rules) newDescription(g *rankGroups) *kvcastv1.Groups {
	d := &kvcastv1.Groups{Unit: g.unit}
	if g.unit != 0 {
		d.Hashing = &kvcastv1.BlockHashing{
			Algorithm: kvcastv1.BlockHashing_Algorithm(g.algorithm) + kvcastv1.BlockHashing_ALGORITHM_SHA256,
			Seed:      g.seed, LoraPaths: g.adapters,
		}
	}
	var groups []hybrid.Group
	for i, a := range g.all {
		if a.idx < 0 || a.idx >= hybrid.MaxGroups {
			d.Missing = fmt.Sprintf("attention group %d: kvcast follows groups 0 to %d", a.idx, hybrid.MaxGroups-1)
			continue
		}
		kind, ok := hybrid.KindOf(a.kind)
		if !ok {
			d.Missing = fmt.Sprintf("attention group %d is of kind %.40q, which kvcast does not know", a.idx, a.kind)
		}
		h := hybrid.Group{Index: int(a.idx), Kind: kind, BlockSize: int(a.blockSize)}
		switch {
		case kind.IsWindow():
			h.Window = int(min(max(a.window, 0), hybrid.MaxTokens))
		case kind == hybrid.ChunkedLocalAttention:
			if h.Chunk = r.followed.ChunkSize; h.Chunk == 0 {
				d.Missing = fmt.Sprintf("attention group %d has chunks, whose size the engine does not tell: set chunk_size of the worker", a.idx)
			}
		}
		h.Drops = r.followed.EAGLEGroups&(1<<h.Index) != 0
		groups = append(groups, h)
		d.Groups = append(d.Groups, &kvcastv1.AttentionGroup{
			Index: uint32(h.Index), Kind: kvcastv1.AttentionGroup_Kind(kind), BlockSize: a.blockSize, Window: uint32(h.Window),
			Chunk: uint32(h.Chunk), Drops: h.Drops, Main: i == g.main,
		})
	}
	if d.Missing == "" {
		d.Missing = g.lost
	}
	if d.Missing == "" {
		if _, err := hybrid.New(groups, int(g.unit)); err != nil {
			d.Missing = err.Error()
		}
	}
	d.Missing = d.Missing[:min(len(d.Missing), 200)]
	slices.SortFunc(d.Groups, func(a, b *kvcastv1.AttentionGroup) int { return cmp.Compare(a.Index, b.Index) })
	return d
}

// admitGroup admits an event of another group than the main group. Its blocks have hashes alone.
func (r *Rules) admitGroup(ev *Event, counts *Counts) bool {
	if r.repeatFinder.repeats(ev.BlockHashes) {
		r.doubt(ReasonRepeatedHash, ev.Tier, counts)
		return false
	}
	ev.Group, ev.HashesOnly = uint8(ev.GroupIdx)+1, ev.Kind == KindStored
	return true
}
