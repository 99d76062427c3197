package objects

import (
	"cmp"
	"fmt"
	"maps"
	"slices"
	"unique"

	"github.com/kvcast/kvcast/internal/feed"
)

const (
	// maxParts is how many parts the blocks of all attention groups together may have: those of 8 groups on 16 ranks.
	maxParts = 128
	// maxOtherParts is how many parts of other components are remembered in a list.
	maxOtherParts = 128
	// partLists is after how many lists without it blocks do not need a part any more: the engines have other ranks then. It is half an hour at least.
	partLists = 900
	// maxMissed is how many partial lists in a row may lack a block that is held.
	maxMissed = 3
	// maxNamespaces is how many namespaces a problem names.
	maxNamespaces = 8
	// blockBytes is the memory of a block, with its part of the map, without the name of its adapter.
	blockBytes = 112
)

// content is what is known of the content of a block, beside its tokens hash.
type content struct {
	lora string
	size uint32 // in tokens
}

// block is a block whose content is known.
type block struct {
	hash, parent uint64
	tokens       uint64 // the tokens hash
	content      unique.Handle[content]
	learned      uint32 // the number of the list after which its content was learned last
	walked       uint32 // the number of the list at whose end blocks before it were looked for
	// parts are those in the list that is being read. held reports whether the store had all in the last list, and emitted whether routers
	// know that. disputed reports whether several contents were learned: it never counts as held.
	parts                   parts
	hasParent               bool
	missed                  uint8 // partial lists in a row that had not all parts
	held, emitted, disputed bool
}

// known returns what is known of the content.
func (b *block) known() feed.Content {
	of := b.content.Value()
	return feed.Content{Hash: b.hash, Parent: b.parent, HasParent: b.hasParent, TokensHash: b.tokens, Tokens: of.size, LoRA: of.lora}
}

func (b *block) bytes() int64 { return blockBytes + int64(len(b.content.Value().lora)) }

// parts is a set of parts.
type parts [maxParts / 64]uint64

func (p *parts) add(part int) { p[part/64] |= 1 << (part % 64) }

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
// Of a list, first begin is called, then object, foreign or unread for each object, and then end. The store holds a block if the list has all its parts. Which
// parts there are is learned from this list and those before: those of any block in the group with the most blocks, since other groups keep
// fewer. If keys are of several namespaces, or there are too many parts, the store counts as empty.
type blocks struct {
	// topic and model are those of Config.
	topic, model string
	texts        problemTexts
	limit        limit
	all          map[uint64]*block
	// number is that of the list that is being read, or of the last.
	number uint32
	list   list
	// parts are those of attention, in any of the last partLists lists.
	parts map[string]*part
	// full reports whether there was no room for a block since the last list.
	full bool
}

// list is what is known of the list that is being read.
type list struct {
	parts      []*part         // by index
	other      map[string]bool // names of parts that are not of attention
	namespaces map[string]bool
	foreign    map[string]bool // namespaces of another model
	// objects are all keys, and unread those that have no form that is read, or are not to count. known and unknown are the numbers of
	// those that count, of blocks whose content is known or not.
	objects, unread, known, unknown int
	tooMany                         bool
}

// part is a part that blocks have.
type part struct {
	index   int // in the list
	group   uint32
	objects int    // in the list
	most    int    // objects in any list
	listed  uint32 // the number of the last list that had it
}

func newBlocks(topic, model string, l limit) *blocks {
	return &blocks{topic: topic, model: model, texts: mooncakeTexts, limit: l, all: make(map[uint64]*block), parts: make(map[string]*part)}
}

// learn records the content of a block.
func (b *blocks) learn(hash uint64, parent uint64, hasParent bool, tokens uint64, c content) {
	next := block{hash: hash, parent: parent, hasParent: hasParent, tokens: tokens, content: unique.Make(c), learned: b.number}
	at := b.all[hash]
	switch {
	case at == nil && b.limit.Reserve(next.bytes()):
		b.all[hash] = &next
	case at == nil:
		b.full = true
	default:
		at.disputed = at.disputed || at.tokens != tokens || at.parent != parent || at.hasParent != hasParent || at.content != next.content
		at.learned = b.number
	}
}

// close releases the memory.
func (b *blocks) close() {
	for _, at := range b.all {
		b.forget(at)
	}
}

func (b *blocks) forget(at *block) {
	delete(b.all, at.hash)
	b.limit.Release(at.bytes())
}

// begin begins a list.
func (b *blocks) begin() {
	b.number++
	b.list = list{other: make(map[string]bool), namespaces: make(map[string]bool), foreign: make(map[string]bool)}
	for name, p := range b.parts {
		if p.objects = 0; b.number-p.listed > partLists {
			delete(b.parts, name)
			continue
		}
		p.index = len(b.list.parts)
		b.list.parts = append(b.list.parts, p)
	}
	for _, at := range b.all {
		at.parts = parts{}
	}
}

// unread adds an object that has no form that is read, or is not to count.
func (b *blocks) unread() {
	b.list.objects++
	b.list.unread++
}

// foreign adds an object of another model. Of its key, the namespace is kept.
func (b *blocks) foreign(k *key) {
	b.unread()
	if len(b.list.foreign) < maxNamespaces {
		b.list.foreign[string(k.namespace)] = true
	}
}

// object adds an object that counts. The key is not kept, but for the names of its part and namespace.
func (b *blocks) object(k *key) {
	l := &b.list
	l.objects++
	p := b.part(k)
	if p == nil {
		l.unread++
		return
	}
	if !l.namespaces[string(k.namespace)] && len(l.namespaces) < maxNamespaces {
		l.namespaces[string(k.namespace)] = true
	}
	p.listed = b.number
	p.objects++
	p.most = max(p.most, p.objects)
	if at := b.all[k.hash]; at != nil {
		l.known++
		at.parts.add(p.index)
	} else {
		l.unknown++
	}
}

// part returns the part that a key names; nil if it is not of attention, or there are too many.
func (b *blocks) part(k *key) *part {
	l := &b.list
	p := b.parts[string(k.shard)]
	switch {
	case p != nil:
		return p
	case l.other[string(k.shard)]:
		return nil
	case !k.isAttention():
		if len(l.other) < maxOtherParts {
			l.other[string(k.shard)] = true
		}
		return nil
	case len(l.parts) == maxParts:
		l.tooMany = true
		return nil
	}
	p = &part{index: len(l.parts), group: k.group, listed: b.number}
	b.parts[string(k.shard)], l.parts = p, append(l.parts, p)
	return p
}

// required returns the parts that a block has: those of the group with the most blocks, the first of several.
func (l *list) required() (all parts) {
	most := make(map[uint32]int)
	for _, p := range l.parts {
		most[p.group] = max(most[p.group], p.most)
	}
	groups := slices.SortedFunc(maps.Keys(most), func(a, b uint32) int { return cmp.Or(most[b]-most[a], cmp.Compare(a, b)) })
	for _, p := range l.parts {
		if p.group == groups[0] {
			all.add(p.index)
		}
	}
	return all
}

// problemTexts say what to do about a list of which no block counts as held.
type problemTexts struct {
	several string // objects are of several models or deployments
	foreign string // they are of other models
	none    string // of a number of objects, none has a form that is read
	unknown string // of a number of objects, the content of none is known
}

// problem returns why no block counts as held; empty if blocks may.
func (l *list) problem(model string, texts *problemTexts) string {
	names := func(of map[string]bool) string { return fmt.Sprintf("%q", slices.Sorted(maps.Keys(of))) }
	switch {
	case l.tooMany:
		return fmt.Sprintf("blocks have more than %d parts", maxParts)
	case len(l.namespaces) > 1:
		return "objects are of several models or deployments, " + names(l.namespaces) + ": " + texts.several
	case len(l.namespaces) == 0 && len(l.foreign) > 0:
		return fmt.Sprintf("no object is of the model %q, but of ", model) + names(l.foreign) + ": " + texts.foreign
	case len(l.namespaces) == 0 && l.objects > 0:
		return fmt.Sprintf(texts.none, l.objects)
	case l.known == 0 && l.unknown > 0:
		return fmt.Sprintf(texts.unknown, l.objects)
	}
	return ""
}

// end ends the list. Blocks that the store no longer holds are passed to removed, and those that it holds now to stored: each after its
// parent. A block whose parent the store does not hold is passed when it does, since no prompt has it as its prefix before.
// Blocks that are not in a partial list are held as before, until maxMissed in a row have not had them.
func (b *blocks) end(isPartial bool, stored, removed func(*block)) (problem string) {
	problem = b.list.problem(b.model, &b.texts)
	var all parts
	if problem == "" && len(b.list.parts) > 0 {
		all = b.list.required()
	}
	for _, at := range b.all {
		isListed := all != parts{} && at.parts.has(all)
		if at.missed++; isListed || !isPartial {
			at.missed = 0
		}
		at.held = (isListed || at.held && 0 < at.missed && at.missed < maxMissed) && !at.disputed
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

// prune forgets blocks that the store does not hold and whose content was not learned again since the list before, if there was no room for others.
func (b *blocks) prune() {
	if !b.full {
		return
	}
	b.full = false
	for _, at := range b.all {
		if !at.held && at.learned+1 < b.number {
			b.forget(at)
		}
	}
}
