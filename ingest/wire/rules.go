package wire

import (
	"maps"
	"slices"
	"strings"
)

const (
	// maxGroups bounds the attention groups remembered per source, over all its ranks.
	// Models have a few; beyond the bound a group is treated as never seen.
	maxGroups = 8192
	// groupCost is the size of an attention group in bytes.
	groupCost = 48
	// maxNameBytes is the length of the longest LoRA name and cache salt. A store may
	// become many router events, each of which has both.
	maxNameBytes = 1024
	// maxRulesKept is how many bytes a Rules keeps from one batch to the next of each
	// kind of memory: enough for a store of 128 Ki tokens.
	maxRulesKept = 1 << 20
)

// BlockSize is the number of tokens in the blocks of a worker.
//
// vLLM also stores partial blocks: single blocks of a smaller size, that of its hash
// blocks, which divides the block size. They are not prefixes that another request
// could reuse, and their parents need not be stored. A learned size may be theirs.
type BlockSize struct {
	// Tokens is 0 while the size is unknown.
	Tokens uint32
	// Configured reports whether the size was configured, and so never changes.
	Configured bool
	// offDevice reports whether the size was learned from a store of another tier: a
	// connector's blocks, such as LMCache's, may have a size of their own.
	offDevice bool
}

// Forget resets a learned size.
func (s *BlockSize) Forget() {
	if !s.Configured {
		*s = BlockSize{}
	}
}

// group identifies an attention group of an engine.
type group struct {
	rank uint32
	idx  int64
}

// Rules decides which events of one source concern block reuse and are valid, and
// completes those with what follows from their fields. It is not safe for concurrent
// use.
//
// It reuses its memory, of which it keeps 5 MiB at most after a batch. It remembers
// attention groups and salted blocks in 44 MiB at most, nothing for a source without
// cache salts.
type Rules struct {
	blockSize   *BlockSize
	foreignHost uint32 // see ForeignHostBlockSize
	rawID       uint64
	// groups are the attention groups seen, and whether each has main attention.
	groups map[group]bool
	// lastGroup caches the most recent lookup in groups: most models have one group.
	lastGroup group
	lastMain  bool
	hasLast   bool

	repeatFinder repeatFinder
	multimodal   mmReader
	hashes       slab[uint64]
	salts        salts
	// names caches the salts in extra keys.
	names  interner
	budget Budget
}

// NewRules returns the rules of a source. blockSize is the block size of its worker,
// shared by all of the worker's sources, and learned from their stores unless it is
// configured. It must not be nil.
func NewRules(blockSize *BlockSize) *Rules {
	return &Rules{
		blockSize:    blockSize,
		groups:       make(map[group]bool),
		repeatFinder: newRepeatFinder(),
		salts:        salts{budget: unlimited{}},
		budget:       unlimited{},
	}
}

// SetBudget bounds the memory for groups and salts of these Rules and others together. Where
// it is used up, a salt or a salted block counts as unknown, and an attention group as never
// seen. Call it before the first Admit. Close releases what was reserved.
func (r *Rules) SetBudget(b Budget) { r.budget, r.salts.budget = b, b }

// Close forgets what was learned. Admit must not be called afterwards.
func (r *Rules) Close() {
	r.budget.Release(int64(groupCost * len(r.groups)))
	clear(r.groups)
	for rank := range r.salts.ranks {
		r.salts.clear(rank)
	}
}

// Reset forgets what was learned of a dp rank, whose engine restarted. Raw event ids
// continue.
func (r *Rules) Reset(rank uint32) {
	before := len(r.groups)
	maps.DeleteFunc(r.groups, func(g group, _ bool) bool { return g.rank == rank })
	r.budget.Release(int64(groupCost * (before - len(r.groups))))
	r.hasLast = false
	r.salts.clear(rank)
}

// SkipRaw takes n raw event ids, for events that were lost. Where fewer are left, all
// later events have MaxRawID: ids must not start over because an engine's seq jumps to
// its end.
func (r *Rules) SkipRaw(n uint64) { r.rawID += min(n, MaxRawID-r.rawID) }

// ForeignHostBlockSize is the block size of a store in host memory that the last Admit
// dropped because it differs from the worker's; 0 if there was none.
func (r *Rules) ForeignHostBlockSize() uint32 { return r.foreignHost }

// Admit keeps in the batch the events to apply, which are of a dp rank, and counts the
// others, including those that the Decoder skipped.
//
// It sets their Tier, RawID, TokensHashes and, where extra keys hold it or the store
// continues a salted block, their CacheSalt. It cuts stores to whole blocks.
// TokensHashes is the Rules' memory, valid until the next Admit.
func (r *Rules) Admit(b *Batch, rank uint32, counts *Counts) {
	skipped := b.Skipped
	kept := 0
	r.foreignHost = 0
	for k := range b.Events {
		ev := &b.Events[k]
		for len(skipped) > 0 && skipped[0].Index < ev.Index {
			r.countSkipped(skipped[0].Reason, counts)
			skipped = skipped[1:]
		}
		if reason := r.ignore(ev, rank); reason != ReasonNone {
			counts[reason]++
			continue
		}
		r.SkipRaw(1)
		ev.RawID = r.rawID
		switch {
		case ev.Kind == KindStored:
			if !r.admitStore(ev, rank, counts) {
				continue
			}
		case !r.salts.used():
		case ev.Kind == KindRemoved:
			r.salts.remove(ev, rank)
		default:
			r.salts.clear(rank)
		}
		if kept != k {
			b.Events[kept] = *ev
		}
		kept++
	}
	for _, s := range skipped {
		r.countSkipped(s.Reason, counts)
	}
	b.Events = b.Events[:kept]
	// Released now, not with the next batch, which may be far off: there may be many
	// sources.
	r.hashes.release(maxRulesKept / 8)
	r.multimodal.release()
}

func (r *Rules) countSkipped(reason Reason, counts *Counts) {
	counts[reason]++
	if !reason.Ignored() {
		r.SkipRaw(1)
	}
}

// ignore returns why the event does not concern kvcast, and sets its tier.
func (r *Rules) ignore(ev *Event, rank uint32) Reason {
	if ev.Kind == KindStored && ev.SpecKind != "" && ev.HasGroupIdx {
		r.learnGroup(group{rank, ev.GroupIdx}, isMainAttention(ev.SpecKind))
	}
	if ev.Kind != KindCleared {
		var ok bool
		if ev.Tier, ok = tierOf(ev.Medium); !ok {
			return ReasonUnknownMedium
		}
	}
	rare := ev.rare()
	switch {
	case rare.Locality != "" && !strings.EqualFold(rare.Locality, "LOCAL"):
		return ReasonNonLocalLocality
	case rare.Ownership != "" && rare.Ownership != "kvcr":
		return ReasonUnsupportedOwnership
	case ev.Tier != TierDisk && ev.Tier != TierExternal && !r.inMainGroup(ev, rank):
		return ReasonNonMainAttentionGroup
	default:
		return ReasonNone
	}
}

// inMainGroup reports whether the event concerns main attention.
func (r *Rules) inMainGroup(ev *Event, rank uint32) bool {
	if ev.SpecKind != "" {
		return isMainAttention(ev.SpecKind)
	}
	if !ev.HasGroupIdx {
		return true
	}
	g := group{rank, ev.GroupIdx}
	if r.hasLast && r.lastGroup == g {
		return r.lastMain
	}
	main, ok := r.groups[g]
	if !ok {
		return ev.GroupIdx == 0
	}
	r.lastGroup, r.lastMain, r.hasLast = g, main, true
	return main
}

func (r *Rules) learnGroup(g group, main bool) {
	if r.hasLast && r.lastGroup == g && r.lastMain == main {
		return
	}
	if _, ok := r.groups[g]; !ok && (len(r.groups) >= maxGroups || !r.budget.Take(groupCost)) {
		return
	}
	r.groups[g] = main
	r.lastGroup, r.lastMain, r.hasLast = g, main, true
}

// isMainAttention reports whether caches of this kind decide the reuse of prefixes.
func isMainAttention(kind string) bool {
	return kind == "full_attention" || kind == "mla_attention" || kind == "sink_full_attention"
}

// admitStore validates a store, cuts it to whole blocks and hashes them. It reports
// whether any block is left.
func (r *Rules) admitStore(ev *Event, rank uint32, counts *Counts) bool {
	// The salt comes first: the engine holds the blocks of a store that is dropped or cut
	// as well, and others may continue them.
	salt, ok := r.applySalt(ev, rank)
	if !ok || len(ev.LoRAName) > maxNameBytes {
		counts[ReasonNameTooLong]++
		return false
	}
	hashOnly := ev.hashOnly()
	if !hashOnly && !r.fitsBlockSize(ev, rank) {
		counts[ReasonBlockSizeMismatch]++
		if ev.Tier == TierHostPinned {
			r.foreignHost = ev.BlockSize
		}
		return false
	}
	if ev.HasParent && slices.Contains(ev.BlockHashes, ev.Parent) || r.repeatFinder.repeats(ev.BlockHashes) {
		counts[ReasonRepeatedHash]++
		return false
	}
	if hashOnly {
		return true
	}
	r.learnBlockSize(ev)
	if ev.OpaqueTokens {
		return true
	}
	size := int(ev.BlockSize)
	overlap := 0
	if ev.Eagle {
		overlap = 1
	}
	if whole := max(0, len(ev.Tokens)-overlap) / size; whole < len(ev.BlockHashes) {
		counts[ReasonTokensShort]++
		if whole == 0 {
			return false
		}
		ev.BlockHashes = ev.BlockHashes[:whole]
	}
	blocks := len(ev.BlockHashes)
	if blocks == 0 {
		overlap = 0
	}
	ev.Tokens = ev.Tokens[:blocks*size+overlap]
	// An adapter without a name must not pass for the base model, nor content of an
	// unknown namespace for that of all.
	if ev.HasLoRAID && ev.LoRAName == "" || ev.CacheSalt == "" && salt == unknownSalt {
		return true
	}
	seed := BlockSeed(ev.LoRAName, ev.CacheSalt)
	hashes := AppendTokensHashes(r.hashes.reserve(blocks)[:0], ev.Tokens, size, seed, ev.Eagle, r.multimodal.read(ev))
	ev.TokensHashes = r.hashes.allocate(len(hashes))
	return true
}

// applySalt finds a store's cache salt, sets it, and remembers it for its blocks. ok
// reports whether the salt is short enough to be passed on; a longer one is remembered
// as unknown.
func (r *Rules) applySalt(ev *Event, rank uint32) (id saltID, ok bool) {
	if ev.CacheSalt == "" && ev.Raw == nil && !r.salts.used() {
		return noSalt, true
	}
	var extra []byte
	if ev.CacheSalt == "" && ev.raw().ExtraKeys != nil {
		extra = saltOf(ev.raw().ExtraKeys, ev.LoRAName)
	}
	switch {
	case len(ev.CacheSalt) > maxNameBytes || len(extra) > maxNameBytes:
		r.salts.remember(ev, rank, unknownSalt)
		return unknownSalt, false
	case len(extra) > 0:
		salt, ok := r.names.string(extra)
		if !ok {
			// Not UTF-8, but what the engine isolates by: hashed unchanged.
			salt = string(extra)
		}
		ev.CacheSalt = salt
		id = r.salts.id(salt)
	case ev.CacheSalt != "":
		id = r.salts.id(ev.CacheSalt)
	case r.salts.used():
		id = r.salts.of(ev, rank)
		ev.CacheSalt = r.salts.name(id)
	default:
		return noSalt, true
	}
	r.salts.remember(ev, rank, id)
	return id, true
}

// fitsBlockSize reports whether a store's block size is the worker's, or is to become
// it.
func (r *Rules) fitsBlockSize(ev *Event, rank uint32) bool {
	size := r.blockSize
	switch {
	case ev.BlockSize == 0:
		return false
	case ev.BlockSize == size.Tokens:
		return true
	case size.Tokens == 0:
		// Not that of a partial block, which looks like one block with a parent, by an
		// engine that names attention groups. The parent of a whole block would have
		// been stored before.
		return len(ev.BlockHashes) != 1 || !ev.HasParent || ev.Parent == 0 || !ev.HasGroupIdx && ev.SpecKind == ""
	case size.Configured || ev.Tier != TierDevice:
		return false
	case size.offDevice:
		return true
	default:
		// A larger multiple, of a group that is known to have main attention.
		return ev.BlockSize > size.Tokens && ev.BlockSize%size.Tokens == 0 &&
			(ev.SpecKind != "" || ev.HasGroupIdx && r.groups[group{rank, ev.GroupIdx}])
	}
}

// learnBlockSize makes an admitted store's block size the worker's.
func (r *Rules) learnBlockSize(ev *Event) {
	if ev.BlockSize == r.blockSize.Tokens {
		r.blockSize.offDevice = r.blockSize.offDevice && ev.Tier != TierDevice
		return
	}
	ev.ReplacesBlockSize = r.blockSize.Tokens != 0
	*r.blockSize = BlockSize{Tokens: ev.BlockSize, offDevice: ev.Tier != TierDevice}
}
