package index

import (
	"slices"

	"github.com/kvcast/kvcast/internal/core/kvblock"
)

// hashList is a prompt as hashes, with one block size.
type hashList struct {
	prompt     int
	size       uint32 // of the workers to match; 0: all
	pools      bool   // whether only pools match
	start, end int    // in Matches.hashes, for token ids
}

// hash computes the hashes of all prompts, without the index's lock.
func (m *Matches) hash(x *Index, q *Query) {
	m.hashes, m.lists = m.hashes[:0], m.lists[:0]
	m.sizes = x.appendBlockSizes(m.sizes[:0], q.Model)
	for i := range q.Prompts {
		p := &q.Prompts[i]
		switch {
		case len(p.TokenIDs) == 0:
			m.add(i, p, p.BlockSize)
		case p.BlockSize != 0:
			m.add(i, p, p.BlockSize)
			if q.Pools { // which may have other sizes than their workers
				for _, size := range x.appendPoolSizes(nil, q.Model) {
					if size != p.BlockSize {
						m.add(i, p, size)
						m.lists[len(m.lists)-1].pools = true
					}
				}
			}
		default:
			for _, size := range m.sizes {
				m.add(i, p, size)
			}
		}
	}
}

func (m *Matches) add(i int, p *Prompt, size uint32) {
	l := hashList{prompt: i, size: size, start: len(m.hashes)}
	if len(p.TokenIDs) > 0 {
		m.hashes = kvblock.AppendTokensHashes(m.hashes, p.TokenIDs, int(size), kvblock.Seed(p.LoRA, p.Salt), p.Eagle, nil)
		if p.ExcludeLastToken {
			m.hashes = m.hashes[:min(len(m.hashes), l.start+(len(p.TokenIDs)-1)/int(size))]
		}
	}
	l.end = len(m.hashes)
	m.lists = append(m.lists, l)
}

// appendBlockSizes appends the distinct block sizes of a model's workers.
func (x *Index) appendBlockSizes(sizes []uint32, modelName string) []uint32 {
	x.mu.RLock()
	defer x.mu.RUnlock()
	if modelName != "" {
		return x.models[modelName].appendSizes(sizes)
	}
	for _, m := range x.models {
		sizes = m.appendSizes(sizes)
	}
	return sizes
}

// appendPoolSizes appends the distinct block sizes of a model's pools.
func (x *Index) appendPoolSizes(sizes []uint32, modelName string) []uint32 {
	x.mu.RLock()
	defer x.mu.RUnlock()
	if x.numPools == 0 {
		return sizes
	}
	for name, m := range x.models {
		if modelName != "" && modelName != name {
			continue
		}
		for _, w := range m.pools.all {
			if w.blockSize != 0 && !slices.Contains(sizes, w.blockSize) {
				sizes = append(sizes, w.blockSize)
			}
		}
	}
	return sizes
}

// appendSizes appends the block sizes of a model, which may be nil, that are not in sizes.
func (m *model) appendSizes(sizes []uint32) []uint32 {
	if m == nil {
		return sizes
	}
	for _, c := range m.sizes {
		if !slices.Contains(sizes, c.size) {
			sizes = append(sizes, c.size)
		}
	}
	return sizes
}
