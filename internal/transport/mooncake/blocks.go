package mooncake

import (
	"bytes"
	"cmp"
	"fmt"
	"maps"
	"slices"
	"strings"

	"github.com/kvcast/kvcast/internal/wire"
)

const (
	// maxShards is how many parts the blocks of all attention groups together may have: those of 8 groups on 16 ranks.
	maxShards = 128
	// maxOtherShards is how many parts of other components are remembered in a list.
	maxOtherShards = 128
	// maxNamespaces is how many namespaces a problem names.
	maxNamespaces = 8
	// blockBytes is the memory of a block, with its part of the map.
	blockBytes = 96
	// maxAdapters is the number of LoRA adapters, and sizes of blocks, that blocks may have.
	maxAdapters = 1 << 12
)

// content is what workers have told of blocks with a hash, except for their parent and their tokens hash.
type content struct {
	lora string
	size uint32 // in tokens
}

// block is a block whose content is known.
type block struct {
	hash, parent uint64
	tokens       uint64 // the tokens hash
	content      uint32 // index in blocks.contents
	told         uint32 // the number of the list after which its content was told last
	walked       uint32 // the number of the list at whose end blocks before it were looked for
	// parts are those in the list that is being read. held reports whether the store had all in the last list, and emitted whether routers
	// know that.
	parts         parts
	hasParent     bool
	held, emitted bool
}

// parts is a set of shards.
type parts [maxShards / 64]uint64

func (p *parts) add(shard int) { p[shard/64] |= 1 << (shard % 64) }

func (p *parts) has(all parts) bool {
	for i := range p {
		if p[i]&all[i] != all[i] {
			return false
		}
	}
	return true
}

// limit bounds the memory of blocks. It is implemented by budget.Budget.
type limit interface {
	Reserve(bytes int64) bool
	Release(bytes int64)
}

// blocks are the blocks of a store whose contents are known, because workers that load from it have stored them. It is pure, and not safe
// for concurrent use.
//
// Of a list, first begin is called, then object for each key, and then end. The store holds a block if the list has all its parts. Which
// parts there are is learned from the list: those of any block in the group with the most blocks, since other groups keep fewer. If keys are of several
// namespaces, or there are too many parts, the store counts as empty.
type blocks struct {
	// prefix begins the keys that count. model, if not empty, is what vLLM's keys must name where there is no prefix.
	prefix, model string
	limit         limit
	all           map[uint64]*block
	contents      []content
	indexes       map[content]uint32
	// number is that of the list that is being read, or of the last.
	number uint32
	list   list
	// full reports whether there was no room for a block since the last list.
	full bool
}

// list is what is known of the list that is being read.
type list struct {
	shards     map[string]*shard
	counted    []*shard // the shards of attention, by index
	namespaces map[string]bool
	// objects and unread are the numbers of keys, and of those that have no form that is read or are of another namespace. unknown is the
	// number of those of blocks whose content is not known.
	objects, unread, unknown int
	tooMany                  bool
	others                   map[string]bool // namespaces of another model
}

// shard is a part that blocks have.
type shard struct {
	index   int // -1 if it is not of attention
	group   uint32
	objects int
}

func newBlocks(prefix, model string, l limit) *blocks {
	if i := strings.LastIndexByte(strings.TrimRight(model, "/"), '/'); i >= 0 {
		model = model[i+1:] // as in vLLM's keys
	}
	return &blocks{prefix: prefix, model: strings.TrimRight(model, "/"), limit: l, all: make(map[uint64]*block), indexes: make(map[content]uint32)}
}

// learn records the content of a block. The last content of a hash counts.
func (b *blocks) learn(hash uint64, parent uint64, hasParent bool, tokens uint64, c content) {
	at := b.all[hash]
	if at == nil {
		if !b.limit.Reserve(blockBytes) {
			b.full = true
			return
		}
		at = &block{hash: hash}
		b.all[hash] = at
	}
	index, ok := b.indexes[c]
	if !ok {
		if len(b.contents) >= maxAdapters {
			b.forget(at)
			return
		}
		index = uint32(len(b.contents))
		b.contents, b.indexes[c] = append(b.contents, c), index
	}
	if changed := at.tokens != tokens || at.parent != parent || at.hasParent != hasParent || at.content != index; changed && at.emitted {
		return // the hash names two contents; routers have the first
	}
	at.parent, at.hasParent, at.tokens, at.content, at.told = parent, hasParent, tokens, index, b.number
}

func (b *blocks) forget(at *block) {
	delete(b.all, at.hash)
	b.limit.Release(blockBytes)
}

// close releases the memory.
func (b *blocks) close() {
	b.limit.Release(blockBytes * int64(len(b.all)))
	clear(b.all)
}

// begin begins a list.
func (b *blocks) begin() {
	b.number++
	b.list = list{shards: make(map[string]*shard), namespaces: make(map[string]bool), others: make(map[string]bool)}
	for _, at := range b.all {
		at.parts = parts{}
	}
}

// object adds an object to the list. The key is not kept.
func (b *blocks) object(text []byte) {
	l := &b.list
	l.objects++
	k, ok := parse(text)
	if !ok || !bytes.HasPrefix(text, []byte(b.prefix)) || !b.ofModel(&k) {
		l.unread++
		return
	}
	if !l.namespaces[string(k.namespace)] && len(l.namespaces) < maxNamespaces {
		l.namespaces[string(k.namespace)] = true
	}
	part, ok := l.shard(&k)
	if !ok {
		l.unread++
		return
	}
	if at := b.all[k.hash]; at != nil {
		at.parts.add(part)
	} else {
		l.unknown++
	}
}

// ofModel reports whether a key is of the model, or names none.
func (b *blocks) ofModel(k *key) bool {
	if b.prefix != "" || b.model == "" || !bytes.HasPrefix(k.shard, vllmShard) {
		return true
	}
	for name := range bytes.SplitSeq(k.namespace, []byte("@")) {
		if string(name) == b.model {
			return true
		}
	}
	if len(b.list.others) < maxNamespaces {
		b.list.others[string(k.namespace)] = true
	}
	return false
}

// shard returns the index of a key's part, and counts it. ok is false if it is not of attention, or there are too many.
func (l *list) shard(k *key) (index int, ok bool) {
	s := l.shards[string(k.shard)]
	if s == nil {
		s = &shard{index: -1, group: k.group}
		if k.isAttention() {
			if len(l.counted) == maxShards {
				l.tooMany = true
				return 0, false
			}
			s.index = len(l.counted)
			l.counted = append(l.counted, s)
		}
		if len(l.shards) < maxShards+maxOtherShards {
			l.shards[string(k.shard)] = s
		}
	}
	s.objects++
	return s.index, s.index >= 0
}

// required returns the parts that a block has: those of the group with the most blocks, the first of several.
func (l *list) required() (all parts) {
	most := make(map[uint32]int)
	for _, s := range l.counted {
		most[s.group] = max(most[s.group], s.objects)
	}
	groups := slices.SortedFunc(maps.Keys(most), func(a, b uint32) int { return cmp.Or(most[b]-most[a], cmp.Compare(a, b)) })
	for _, s := range l.counted {
		if s.group == groups[0] {
			all.add(s.index)
		}
	}
	return all
}

// problem returns why no block counts as held; empty if blocks do.
func (l *list) problem(model string) string {
	names := func(of map[string]bool) string {
		return fmt.Sprintf("%q", slices.Sorted(maps.Keys(of)))
	}
	switch {
	case l.tooMany:
		return fmt.Sprintf("blocks have more than %d parts", maxShards)
	case len(l.namespaces) > 1:
		return "objects are of several models or deployments, " + names(l.namespaces) + ": choose one with topic, the beginning of its keys"
	case len(l.namespaces) == 0 && len(l.others) > 0:
		return fmt.Sprintf("no object names the model %q, but ", model) + names(l.others) + ": set topic, the beginning of the keys"
	}
	return ""
}

// end ends the list. Blocks that the store no longer holds are passed to removed, and those that it holds now to stored: each after its
// parent. A block whose parent the store does not hold is passed when it does, since no prompt has it as its prefix before.
func (b *blocks) end(stored, removed func(*block)) (problem string) {
	problem = b.list.problem(b.model)
	var all parts
	if problem == "" && len(b.list.counted) > 0 {
		all = b.list.required()
	}
	for _, at := range b.all {
		at.held = all != parts{} && at.parts.has(all)
		if at.emitted && !at.held {
			at.emitted = false
			removed(at)
		}
	}
	var chain []*block
	for _, at := range b.all {
		chain = b.chain(at, chain[:0])
		for _, next := range slices.Backward(chain) {
			next.emitted = true
			stored(next)
		}
	}
	b.prune()
	return problem
}

// chain appends a block and the blocks before it that routers are to know, from the last one on; none if the store does not hold all of them.
func (b *blocks) chain(at *block, chain []*block) []*block {
	for at != nil && at.held && !at.emitted && at.walked != b.number {
		at.walked = b.number
		chain = append(chain, at)
		if !at.hasParent {
			return chain
		}
		at = b.all[at.parent]
	}
	if at == nil || !at.emitted {
		return chain[:0] // one before is missing, or was found to have one before that is
	}
	return chain
}

// prune forgets blocks that the store does not hold and nobody has told since the list before, if there was no room for others.
func (b *blocks) prune() {
	if !b.full {
		return
	}
	b.full = false
	for _, at := range b.all {
		if !at.held && at.told+1 < b.number {
			b.forget(at)
		}
	}
}

// stores returns the stores of blocks: of one store, each block is the parent of the next.
func (b *blocks) stores(all []*block) (events []wire.Event) {
	var last *block
	for _, at := range all {
		if last == nil || !at.hasParent || at.parent != last.hash || at.content != last.content {
			of := b.contents[at.content]
			events = append(events, wire.Event{
				Kind: wire.KindStored, Medium: medium, Parent: at.parent, HasParent: at.hasParent, BlockSize: of.size, LoRAName: of.lora, Raw: new(wire.Raw),
			})
		}
		event := &events[len(events)-1]
		event.BlockHashes, event.TokensHashes = append(event.BlockHashes, at.hash), append(event.TokensHashes, at.tokens)
		last = at
	}
	for i := range events {
		events[i].Raw.ExtraKeys = wire.AppendContents(nil, events[i].TokensHashes)
	}
	return events
}
