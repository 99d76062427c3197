package wire

import (
	"slices"
	"strings"

	"github.com/kvcast/kvcast/internal/budget"
	"github.com/kvcast/kvcast/internal/core/kvblock"
)

const (
	// maxNameBytes is the length of the longest LoRA name and cache salt. A store may become many router events, and each of them has both.
	maxNameBytes = 1024
	// MaxBlockSize is the number of tokens in the largest block of a worker. Engines have blocks of up to some hundred tokens. A store with
	// larger ones is dropped, since a wrong size that is learned drops the stores with the right one.
	MaxBlockSize = 65_536
	// maxRulesKept is how many bytes of each kind of memory a Rules keeps from one batch to the next: enough for a store of 128 Ki tokens.
	maxRulesKept = 1 << 20
)

// BlockSize is the number of tokens in the blocks of a worker.
//
// vLLM also stores partial blocks: single blocks of a smaller size, which divides the block size. Other requests cannot reuse them, and
// their parents may not be stored. A learned size may be the size of a partial block.
type BlockSize struct {
	// Tokens is at most MaxBlockSize; 0 while the size is unknown.
	Tokens uint32
	// Configured reports whether the size was configured. It then never changes.
	Configured bool
	// offDevice reports whether the size was learned from a store in another tier than device
	// memory: a connector, such as LMCache, may use another block size than the engine.
	offDevice bool
	// former is the size of device memory that was forgotten last; 0: none was. Other dp ranks still have it.
	former uint32
	// learnedFrom are the rules of the source whose store has set the size; nil: none has since the state was restored.
	learnedFrom *Rules
}

// Forget resets a learned size, since an engine may have restarted with another one.
func (s *BlockSize) Forget() {
	if s.Configured {
		return
	}
	former := s.former
	if s.Tokens != 0 && !s.offDevice {
		former = s.Tokens
	}
	*s = BlockSize{former: former}
}

// Rules drop the events of one source that are invalid or do not concern prefix reuse, and set
// the derived fields of the others. They are not safe for concurrent use.
//
// Rules reuse their memory, and keep at most 5 MiB of it after a batch. Attention groups and
// scoped blocks take at most 68 MiB, and almost nothing for a source without cache salts.
type Rules struct {
	blockSize *BlockSize
	rawID     uint64
	// ForeignBlockSize is the block size of a store that the last Admit dropped because the size differs from the
	// worker's, and ForeignTier its tier; both 0 if there was none.
	ForeignBlockSize uint32
	ForeignTier      kvblock.Tier
	// ChunkSize is the number of tokens in the chunks of a store that the last Admit split; 0 if there was none.
	ChunkSize uint32
	// ClearsDevice reports whether a clear that names no medium is of device memory, and not of all tiers.
	ClearsDevice bool
	// IsVLLM reports whether the engine is vLLM. It sends cache salts and multimodal inputs in extra keys alone, and some of its connectors send no
	// removes.
	IsVLLM bool
	// ContentInKeys reports whether stores have the contents of their blocks in the form of AppendContents, in place of tokens.
	ContentInKeys bool
	// HasPools reports whether the worker loads from pools. Its stores in files or objects on another machine are then admitted, in the external tier. Without
	// pools, they are left out, with a doubt.
	HasPools bool
	// doubts are those of the current Admit.
	doubts Doubts
	// groups are the attention groups of earlier stores by rank; numGroups is their number.
	groups    map[uint32]*rankGroups
	numGroups int
	// lastGroups caches the groups of lastRank; nil: none.
	lastRank   uint32
	lastGroups *rankGroups
	// followed are the settings of groups other than the main group; nil: their events are ignored.
	followed *GroupSettings

	repeatFinder repeatFinder
	multimodal   mmReader
	hashes       slab[uint64]
	scopes       scopes
	// names caches the salts in extra keys.
	names  interner
	budget *budget.Budget // nil: no limit
	// changes are recorded after TrackChanges; nil before.
	changes *changes
}

// NewRules returns the rules of a source. blockSize is the block size of the source's worker. All sources of the worker share it, and their
// stores set it unless it is configured. It must not be nil.
func NewRules(blockSize *BlockSize) *Rules {
	return &Rules{
		blockSize:    blockSize,
		groups:       make(map[uint32]*rankGroups),
		repeatFinder: newRepeatFinder(),
		scopes:       scopes{maxBlocks: maxScopedBlocks},
	}
}

// SetBudget sets a budget for the memory of groups and salts, which several Rules may share. If the budget is used up, a scope or a scoped
// block counts as unknown, and an attention group as never seen. Call SetBudget before the first Admit. Close releases the reserved bytes.
func (r *Rules) SetBudget(b *budget.Budget) { r.budget, r.scopes.budget = b, b }

// Close forgets all groups and scopes. Admit must not be called afterwards.
func (r *Rules) Close() {
	r.budget.Release(int64(groupCost * r.numGroups))
	clear(r.groups)
	r.numGroups, r.lastGroups = 0, nil
	for rank := range r.scopes.ranks {
		r.scopes.clear(rank)
	}
	r.scopes.former.close(&r.scopes)
}

// FollowGroups makes Admit admit events of other attention groups than the main group, with Event.Group set, and describe the groups. It
// must be called before the first Admit. The Rules keep the settings, which must not change.
func (r *Rules) FollowGroups(settings *GroupSettings) { r.followed = settings }

// AddPeer makes the rules of another source of the worker known, whose blocks this source may name without their adapter
// and salt. It must be called before the first Admit.
func (r *Rules) AddPeer(peer *Rules) { r.scopes.peers = append(r.scopes.peers, &peer.scopes) }

// Reset forgets the groups and scopes of a dp rank whose engine restarted. Raw event ids continue.
func (r *Rules) Reset(rank uint32) {
	g := r.groups[rank]
	if g != nil {
		delete(r.groups, rank)
		r.numGroups -= len(g.all)
		r.budget.Release(int64(groupCost * len(g.all)))
	}
	if g != nil || r.scopes.ranks[rank] != nil {
		r.changes.reset(rank)
	}
	r.lastGroups = nil
	r.scopes.clear(rank)
	r.scopes.former.clear(&r.scopes, rank)
}

// SkipRaw skips n raw event ids, one for each lost event. If fewer are left, all later events
// have MaxRawID. So ids do not start over when an engine's seq jumps to its maximum.
func (r *Rules) SkipRaw(n uint64) { r.rawID += min(n, MaxRawID-r.rawID) }

// Admit removes from the batch of a dp rank all events that must not be applied. It counts
// them by reason, together with the events that the Decoder skipped.
//
// Admit sets Tier, RawID and TokensHashes of the other events, cuts stores to whole blocks, and sets CacheSalt if the salt is in an extra
// key or the store continues a salted block. TokensHashes is the Rules' memory, valid until the next Admit. Admit also sets the batch's
// Groups and GroupsOmitted. Events of followed groups have Group, and no raw event id.
func (r *Rules) Admit(b *Batch, rank uint32, counts *Counts) {
	omitted := counts[ReasonNonMainAttentionGroup] + counts[ReasonPartialBlock]
	skipped := b.Skipped
	kept, followed := 0, false
	r.ForeignBlockSize, r.ForeignTier, r.ChunkSize = 0, 0, 0
	r.doubts = Doubts{}
	if r.scopes.hashed = r.IsVLLM; r.scopes.former.used() {
		r.scopes.former.begin(rank)
	}
	for k := range b.Events {
		ev := &b.Events[k]
		for len(skipped) > 0 && skipped[0].Index < ev.Index {
			r.countSkipped(skipped[0].Reason, counts)
			skipped = skipped[1:]
		}
		if reason := r.ignore(ev, rank); reason != ReasonNone {
			r.doubt(reason, ev.Tier, counts)
			continue
		}
		if ev.Group != 0 {
			if followed = true; !r.admitGroup(ev, counts) {
				continue
			}
			b.Events[kept] = *ev
			kept++
			continue
		}
		r.SkipRaw(1)
		ev.RawID = r.rawID
		switch {
		case ev.objectKeyOnly():
			tier := ev.Tier
			if ev.Medium == "" {
				tier = 0 // a store of objects has none in device memory
			}
			r.doubt(ReasonObjectKey, tier, counts)
			continue
		case ev.Kind == KindStored:
			if !r.admitStore(ev, rank, counts) {
				continue
			}
		case ev.Kind == KindRemoved:
			r.scopes.remove(ev, rank)
		case ev.Tier != 0:
			if ev.Tier == kvblock.TierDevice {
				r.clearGroups(rank)
			}
			r.scopes.clearTier(rank, ev.Tier)
			r.resolve(1 << ev.Tier)
		default:
			r.clearGroups(rank)
			r.scopes.clear(rank)
			r.resolve(kvblock.AllTiers)
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
	b.GroupsOmitted = followed || counts[ReasonNonMainAttentionGroup]+counts[ReasonPartialBlock] != omitted
	b.Groups = r.describeGroups(rank)
	b.Doubts = r.doubts
	// The memory is released now because the next batch may come late, and there may be many sources.
	r.hashes.release(maxRulesKept / 8)
	r.multimodal.release()
}

func (r *Rules) countSkipped(reason Reason, counts *Counts) {
	r.doubt(reason, 0, counts)
	if !reason.Ignored() {
		r.SkipRaw(1)
	}
}

// ignore returns why the event is ignored, or ReasonNone. It sets the event's tier.
func (r *Rules) ignore(ev *Event, rank uint32) Reason {
	if ev.Kind == KindStored && ev.SpecKind != "" && ev.HasGroupIdx {
		r.learnGroup(ev, rank)
	}
	if ev.Kind == KindCleared && ev.Medium == "" {
		if r.ClearsDevice {
			ev.Tier = kvblock.TierDevice
		}
	} else {
		var ok bool
		if ev.Tier, ok = tierOf(ev.Medium); !ok {
			return ReasonUnknownMedium
		}
	}
	rare := ev.rare()
	isShared := r.IsVLLM && ev.isShared()
	if isShared {
		ev.Tier = kvblock.TierExternal
	}
	switch {
	case isShared && !r.HasPools:
		return ReasonNoRemoves // the engine may load it
	case !isShared && rare.Locality != "" && !strings.EqualFold(rare.Locality, "LOCAL"):
		return ReasonNonLocalLocality
	case rare.Ownership != "" && rare.Ownership != "kvcr":
		return ReasonUnsupportedOwnership
	case ev.Kind != KindCleared && ev.Tier != kvblock.TierDisk && ev.Tier != kvblock.TierExternal && !r.inMainGroup(ev, rank):
		if r.follows(ev) {
			ev.Group = uint8(ev.GroupIdx) + 1
			return ReasonNone
		}
		return ReasonNonMainAttentionGroup
	default:
		return ReasonNone
	}
}

// admitStore validates a store, cuts it to whole blocks and hashes them. It reports whether any block is left.
func (r *Rules) admitStore(ev *Event, rank uint32, counts *Counts) bool {
	if r.ContentInKeys {
		return r.admitContents(ev, rank, counts)
	}
	if r.IsVLLM && ev.isNeverRemoved() {
		r.doubt(ReasonNoRemoves, ev.Tier, counts)
	}
	// The scope is applied first: the engine also has the blocks of a store that is dropped or cut, and other stores may continue them.
	known, told, ok := r.applyScope(ev, rank)
	if !ok || len(ev.LoRAName) > maxNameBytes {
		r.doubt(ReasonNameTooLong, ev.Tier, counts)
		return false
	}
	hashOnly := ev.hashOnly()
	if !hashOnly && r.isPartial(ev) {
		if r.follows(ev) && r.describeGroups(rank) != nil {
			return r.admitGroup(ev, counts)
		}
		r.lose(rank, "a part of a block was stored before its groups were known: reset the engine's prefix cache")
		r.doubt(ReasonPartialBlock, ev.Tier, counts)
		return false
	}
	isChunks := !hashOnly && r.isChunk(ev)
	if isChunks {
		known = r.splitChunks(ev, known, counts)
	}
	if !hashOnly && !r.fitsBlockSize(ev, rank) {
		r.doubt(ReasonBlockSizeMismatch, ev.Tier, counts)
		r.ForeignBlockSize, r.ForeignTier = ev.BlockSize, ev.Tier
		return false
	}
	if ev.HasParent && slices.Contains(ev.BlockHashes, ev.Parent) || r.repeatFinder.repeats(ev.BlockHashes) {
		r.doubt(ReasonRepeatedHash, ev.Tier, counts)
		return false
	}
	if hashOnly {
		ev.HashesOnly, ev.BlockSize = true, 0 // the size says nothing about blocks with tokens
		return true
	}
	r.learnBlockSize(ev, counts)
	if ev.HasLoRAID && ev.LoRAName == "" || ev.OpaqueTokens || ev.sparse() {
		known, told = 0, false
	}
	if !told {
		r.doubt(ReasonUnknownContent, ev.Tier, counts)
	}
	if r.IsVLLM && ev.Inputs == InputsWithoutField {
		r.doubt(ReasonNoExtraKeys, ev.Tier, counts)
	}
	ev.Inputs = r.inputs(ev, known)
	if ev.OpaqueTokens {
		return true
	}
	size, overlap := int(ev.BlockSize), eagleOverlap(ev)
	if whole := max(0, len(ev.Tokens)-overlap) / size; whole < len(ev.BlockHashes) {
		r.doubt(ReasonTokensShort, ev.Tier, counts)
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
	r.hashTokens(ev, rank, min(known, blocks), isChunks)
	return true
}

// inputs returns Event.Inputs of a store of which the first known blocks have known content, without its images. vLLM's connectors send no inputs.
func (r *Rules) inputs(ev *Event, known int) Inputs {
	raw := ev.raw()
	switch hasKeys := raw.ExtraKeys != nil && !allNil(raw.ExtraKeys); {
	case r.IsVLLM && ev.Tier != kvblock.TierDevice && !hasKeys && raw.BlockMMInfos == nil && raw.MMKeys == nil:
		return InputsNotSent
	case known < len(ev.BlockHashes):
		return InputsSent
	}
	return InputsNone
}

// isShared reports whether the event is a store in files or objects that vLLM's offloading connector keeps on another machine, by its setting locality.
func (ev *Event) isShared() bool {
	rare := ev.rare()
	return ev.Kind == KindStored && ev.Medium == "STORAGE" && rare.Ownership == "" && strings.EqualFold(rare.Locality, "REMOTE")
}

// isNeverRemoved reports whether a store of vLLM is by a connector that sends no removes. The media are those of vLLM 0.33: cpu in lower case of its
// connector for Mooncake stores, and of LMCache's; STORAGE of the tiers of its offloading connector that are files or objects. Its own host
// memory is CPU, and KVCR, which is the owner of its blocks, sends removes.
func (ev *Event) isNeverRemoved() bool {
	return ev.Medium == "cpu" || ev.Medium == "STORAGE" && ev.rare().Ownership == ""
}

// hashTokens sets the tokens hashes of a store's first known blocks. Scopes know the blocks of a split store (isSplit) as chunks. The others have none: the hashes would equal those of
// blocks without adapter and salt.
func (r *Rules) hashTokens(ev *Event, rank uint32, known int, isSplit bool) {
	if known == 0 {
		return
	}
	size, tokens := int(ev.BlockSize), ev.Tokens
	if known < len(ev.BlockHashes) {
		tokens = tokens[:min(len(tokens), known*size+eagleOverlap(ev))]
	}
	images := r.multimodal.read(ev)
	if slices.ContainsFunc(images, func(of []uint64) bool { return len(of) > 0 }) {
		ev.Inputs = InputsSent
	}
	seed := kvblock.Seed(ev.LoRAName, ev.CacheSalt)
	hashes := kvblock.AppendTokensHashes(r.hashes.reserve(known)[:0], tokens, size, seed, ev.Eagle, images)
	ev.TokensHashes = r.hashes.allocate(len(hashes))
	if !isSplit {
		r.scopes.setTokens(ev, rank)
	}
}

// eagleOverlap returns how many tokens the last block has beside its own.
func eagleOverlap(ev *Event) int {
	if ev.Eagle {
		return 1
	}
	return 0
}

// applyScope finds a store's adapter and cache salt, sets LoRAName and CacheSalt, and records the scope of the blocks. known
// is the number of the first blocks whose content is known, apart from their tokens; told is false if that of the others
// cannot be told. ok is false if a name is longer than maxNameBytes. The scope is then recorded as unknown.
func (r *Rules) applyScope(ev *Event, rank uint32) (known int, told, ok bool) {
	scopes := &r.scopes
	named := ev.LoRAName != "" && len(scopes.peers) > 0
	if ev.CacheSalt == "" && ev.Raw == nil && !named && !scopes.used() && !scopes.peersUsed() {
		return len(ev.BlockHashes), true, true
	}
	keys := readExtraKeys(ev)
	if len(ev.CacheSalt) > maxNameBytes || ev.CacheSalt == "" && len(keys.salt) > maxNameBytes || len(ev.LoRAName) > maxNameBytes {
		scopes.record(ev, rank, unknownScope)
		return 0, false, false
	}
	if ev.CacheSalt == "" && len(keys.salt) > 0 {
		salt, ok := r.names.string(keys.salt)
		if !ok {
			// The salt is not UTF-8, but the engine isolates requests by it.
			salt = string(keys.salt)
		}
		ev.CacheSalt = salt
	}
	id, told := unknownScope, ev.CacheSalt != ""
	if in, inherited := scopes.inherited(ev, rank); inherited || told {
		if !told {
			ev.CacheSalt, told = in.salt, true
		}
		if ev.LoRAName == "" && !ev.HasLoRAID && len(scopes.peers) > 0 {
			ev.LoRAName = in.lora
		}
		id = scopes.idOf(ev)
	}
	if conflict := scopes.record(ev, rank, id); conflict || !told {
		return 0, false, true
	}
	return keys.known, keys.known == len(ev.BlockHashes) || keys.embeds, true
}

// isPartial reports whether a store is of a part of a block: a single block, of an engine that names attention groups, of a
// size that divides the worker's. While that is unknown, it is a block with a parent: if it were a whole block, a store of its
// parent would have come first. That does not hold once the size was forgotten because another dp rank restarted: a block of the former
// size is whole.
func (r *Rules) isPartial(ev *Event) bool {
	size := r.blockSize.Tokens
	switch {
	case len(ev.BlockHashes) != 1 || !ev.HasGroupIdx && ev.SpecKind == "" || ev.BlockSize == 0 || ev.BlockSize > MaxBlockSize:
		return false
	case size == 0:
		return ev.HasParent && ev.Parent != 0 && ev.BlockSize != r.blockSize.former
	default:
		return ev.Tier == kvblock.TierDevice && ev.BlockSize < size && size%ev.BlockSize == 0 && !r.blockSize.offDevice
	}
}

// fitsBlockSize reports whether a store's block size is or becomes the worker's block size.
func (r *Rules) fitsBlockSize(ev *Event, rank uint32) bool {
	size := r.blockSize
	switch {
	case ev.BlockSize == 0 || ev.BlockSize > MaxBlockSize:
		return false
	case ev.BlockSize == size.Tokens:
		return true
	case size.Tokens == 0:
		return true
	case size.Configured || ev.Tier != kvblock.TierDevice:
		return false
	case size.offDevice:
		return true
	default:
		// The size of partial blocks is replaced by a larger multiple, of a group that is known to have main attention.
		return ev.BlockSize > size.Tokens && ev.BlockSize%size.Tokens == 0 &&
			(ev.SpecKind != "" || r.isKnownMain(ev, rank))
	}
}

// learnBlockSize sets the worker's block size to the block size of an admitted store.
func (r *Rules) learnBlockSize(ev *Event, counts *Counts) {
	if ev.BlockSize == r.blockSize.Tokens {
		r.blockSize.offDevice = r.blockSize.offDevice && ev.Tier != kvblock.TierDevice
		return
	}
	if r.blockSize.offDevice { // the blocks of a connector, which are removed
		counts[ReasonChunks]++
		r.doubts[ReasonChunks] |= kvblock.LowerTiers
	}
	if ev.ReplacesBlockSize = r.blockSize.Tokens != 0; ev.ReplacesBlockSize && r.blockSize.learnedFrom == r && !r.blockSize.offDevice {
		for rank := range r.groups { // what was stored before is removed, and the engine can reuse it
			r.lose(rank, "a part of a block was stored before the block size was known: reset the engine's prefix cache")
		}
	}
	*r.blockSize = BlockSize{Tokens: ev.BlockSize, offDevice: ev.Tier != kvblock.TierDevice, former: r.blockSize.former, learnedFrom: r}
}
