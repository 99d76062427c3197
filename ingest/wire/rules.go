package wire

import (
	"maps"
	"strings"
)

// Counts counts events left out, by reason.
type Counts [NumReasons]uint64

// maxGroups is how many attention groups are remembered of one source, over all
// its ranks. Models have a few; beyond the bound a group counts as never seen.
const maxGroups = 8192

const (
	// maxNameBytes is the length of the longest LoRA name and cache salt. A store
	// may be told in many events, each of which carries both.
	maxNameBytes = 1024
	// maxRulesKept is how much a Rules keeps from one batch to the next of each
	// that it fills, in bytes: enough for a store of 128 K tokens.
	maxRulesKept = 1 << 20
)

// group names an attention group of an engine.
type group struct {
	rank uint32
	idx  int64
}

// Rules decides which events of one source concern block reuse and are sound,
// and completes those with what follows from their fields. It is not for use by
// several goroutines at once.
//
// It reuses its memory, of which 5 MiB at most stay after a batch, and what is
// remembered of attention groups and of salted blocks: 44 MiB at most, and
// nothing for a source that names no cache salt.
type Rules struct {
	blockSize   *BlockSize
	foreignHost uint32 // see ForeignHostBlockSize
	rawID       uint64
	// groups tells of each group seen whether it is one of main attention. The
	// last one asked for is kept beside: most models have one.
	groups    map[group]bool
	lastGroup group
	lastMain  bool
	hasLast   bool

	repeats repeats
	extras  extras
	hashes  arena[uint64]
	salts   salts
	// names are the salts read lately from extra keys.
	names  interner
	memory memory
}

// NewRules returns the rules of a source. blockSize is the block size of its
// worker, shared by all of the worker's sources, and learned from their stores
// unless it is configured; it must not be nil.
func NewRules(blockSize *BlockSize) *Rules {
	return &Rules{
		blockSize: blockSize,
		groups:    make(map[group]bool),
		repeats:   newRepeats(),
	}
}

// SetBudget bounds what the Rules remember by what they and others may together. Where
// it is used up, a salt or a salted block counts as unknown, and an attention group as
// never seen. To be called before the first Admit; Close returns all that was taken.
func (r *Rules) SetBudget(b Budget) {
	r.memory.budget, r.salts.memory.budget = b, b
}

// Close forgets everything that was learned. Nothing may be admitted any more.
func (r *Rules) Close() {
	r.memory.release(groupCost * len(r.groups))
	clear(r.groups)
	for rank := range r.salts.ranks {
		r.salts.clear(rank)
	}
}

// groupCost is what an attention group takes, in bytes.
const groupCost = 48

// Reset forgets what was learned of a dp rank's engine, which began anew. Raw
// event ids go on.
func (r *Rules) Reset(rank uint32) {
	before := len(r.groups)
	maps.DeleteFunc(r.groups, func(g group, _ bool) bool { return g.rank == rank })
	r.memory.release(groupCost * (before - len(r.groups)))
	r.hasLast = false
	r.salts.clear(rank)
}

// SkipRaw uses up n raw event ids, for events that never came. Where there are
// not so many left all that follow have MaxRawID: an engine that jumps to the
// end of its seqs must not make ids begin again.
func (r *Rules) SkipRaw(n uint64) { r.rawID += min(n, MaxRawID-r.rawID) }

// Admit leaves in the batch the events to apply, which came from dp rank rank,
// and counts the others, those skipped by the Decoder included.
//
// It sets their Tier, RawID, TokensHashes and, where extra keys hold it or the
// store continues a salted block, their CacheSalt; it cuts a store to whole
// blocks. TokensHashes is the Rules' memory, good until the next Admit.
func (r *Rules) Admit(b *Batch, rank uint32, counts *Counts) {
	skipped := b.Skipped
	kept := 0
	r.foreignHost = 0
	for k := range b.Events {
		ev := &b.Events[k]
		for len(skipped) > 0 && skipped[0].Index < ev.Index {
			r.skip(skipped[0].Reason, counts)
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
		r.skip(s.Reason, counts)
	}
	b.Events = b.Events[:kept]
	// Only now, and not with the next batch: there may be many sources, and their
	// next batches far off.
	r.hashes.release(maxRulesKept / 8)
	if cap(r.extras.blocks) > 0 {
		r.extras.release()
	}
}

func (r *Rules) skip(reason Reason, counts *Counts) {
	counts[reason]++
	if !reason.Ignored() {
		r.SkipRaw(1)
	}
}

// ignore returns why the event is none of ours, and sets its tier.
func (r *Rules) ignore(ev *Event, rank uint32) Reason {
	if ev.Kind == KindStored && ev.SpecKind != "" && ev.HasGroupIdx {
		r.learn(group{rank, ev.GroupIdx}, mainAttention(ev.SpecKind))
	}
	if ev.Kind != KindCleared {
		var ok bool
		if ev.Tier, ok = TierOf(ev.Medium); !ok {
			return ReasonUnknownMedium
		}
	}
	switch {
	case ev.rare().Locality != "" && !strings.EqualFold(ev.rare().Locality, "LOCAL"):
		return ReasonNonLocalLocality
	case ev.rare().Ownership != "" && ev.rare().Ownership != "kvcr":
		return ReasonUnsupportedOwnership
	case ev.Tier != TierDisk && ev.Tier != TierExternal && !r.main(ev, rank):
		return ReasonNonMainAttentionGroup
	default:
		return ReasonNone
	}
}

// main tells whether the event is about the attention that decides the reuse of
// prefixes.
func (r *Rules) main(ev *Event, rank uint32) bool {
	if ev.SpecKind != "" {
		return mainAttention(ev.SpecKind)
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

func (r *Rules) learn(g group, main bool) {
	if r.hasLast && r.lastGroup == g && r.lastMain == main {
		return
	}
	if _, ok := r.groups[g]; !ok && (len(r.groups) >= maxGroups || !r.memory.take(groupCost)) {
		return
	}
	r.groups[g] = main
	r.lastGroup, r.lastMain, r.hasLast = g, main, true
}

// mainAttention tells whether caches of this kind decide the reuse of prefixes.
func mainAttention(kind string) bool {
	switch kind {
	case "full_attention", "mla_attention", "sink_full_attention":
		return true
	default:
		return false
	}
}

// admitStore checks a store, cuts it to whole blocks and hashes them. It reports
// whether anything is left of it.
func (r *Rules) admitStore(ev *Event, rank uint32, counts *Counts) bool {
	// First of all: also of a store that is dropped, or cut, the engine holds the
	// blocks, and others may continue them.
	salt, short := noSalt, true
	if ev.CacheSalt != "" || ev.raw().ExtraKeys != nil || r.salts.used() {
		salt, short = r.salt(ev, rank)
	}
	if !short || len(ev.LoRAName) > maxNameBytes {
		counts[ReasonNameTooLong]++
		return false
	}
	hashOnly := ev.hashOnly()
	if !hashOnly && !r.fits(ev, rank) {
		counts[ReasonBlockSizeMismatch]++
		if ev.Tier == TierHostPinned {
			r.foreignHost = ev.BlockSize
		}
		return false
	}
	if r.repeated(ev) {
		counts[ReasonRepeatedHash]++
		return false
	}
	if !hashOnly {
		r.settle(ev)
	}
	if hashOnly || ev.OpaqueTokens {
		return true
	}
	whole := wholeBlocks(ev)
	if whole < len(ev.BlockHashes) {
		counts[ReasonTokensShort]++
		if whole == 0 {
			return false
		}
		ev.BlockHashes = ev.BlockHashes[:whole]
	}
	size := int(ev.BlockSize)
	n := len(ev.BlockHashes) * size
	if ev.Eagle && n > 0 {
		n++
	}
	ev.Tokens = ev.Tokens[:n]
	// An adapter without a name must not pass for the base model, nor content of
	// an unknown namespace for that of all.
	if ev.HasLoRAID && ev.LoRAName == "" || ev.CacheSalt == "" && salt == unknownSalt {
		return true
	}
	room := r.hashes.reserve(len(ev.BlockHashes))
	mm := r.extras.read(ev)
	hashes := AppendTokensHashes(room[:0], ev.Tokens, size, BlockSeed(ev.LoRAName, ev.CacheSalt), ev.Eagle, mm)
	ev.TokensHashes = r.hashes.take(len(hashes))
	return true
}

// hashOnly tells whether a store names blocks without saying what is in them.
func (ev *Event) hashOnly() bool {
	return ev.BlockSize == 0 && len(ev.Tokens) == 0 && !ev.OpaqueTokens
}

// repeated tells whether a store's hashes repeat, or one is its own parent.
func (r *Rules) repeated(ev *Event) bool {
	if ev.HasParent {
		for _, h := range ev.BlockHashes {
			if h == ev.Parent {
				return true
			}
		}
	}
	return r.repeats.in(ev.BlockHashes)
}

// salt finds out a store's cache salt, sets it, and remembers it of its blocks. It
// tells whether the salt is short enough to be passed on; one that is not is
// remembered as unknown.
func (r *Rules) salt(ev *Event, rank uint32) (id saltID, short bool) {
	var among []byte
	if ev.CacheSalt == "" && ev.raw().ExtraKeys != nil {
		among = saltOf(ev.raw().ExtraKeys, ev.LoRAName)
	}
	switch {
	case len(ev.CacheSalt) > maxNameBytes || len(among) > maxNameBytes:
		r.salts.remember(ev, rank, unknownSalt)
		return unknownSalt, false
	case len(among) > 0:
		salt, ok := r.names.string(among)
		if !ok {
			// No UTF-8, but what the engine isolates by: hashed as it stands.
			salt = string(among)
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

// wholeBlocks returns how many blocks the tokens of a store fill.
func wholeBlocks(ev *Event) int {
	n := len(ev.Tokens)
	if ev.Eagle && n > 0 {
		n--
	}
	return min(n/int(ev.BlockSize), len(ev.BlockHashes))
}
