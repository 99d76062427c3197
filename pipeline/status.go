package pipeline

import (
	"context"
	"errors"
	"maps"
	"slices"
	"strings"

	"google.golang.org/protobuf/proto"

	"github.com/kvcast/kvcast/ingest/wire"
	"github.com/kvcast/kvcast/journal"
	kvcastv1 "github.com/kvcast/kvcast/proto/kvcast/v1"
)

// Status returns the workers that match selects, sorted by name, without the status of their
// sources. It may be ahead of the journal, since it does not wait for acknowledgements.
func (p *Pipeline) Status(match func(worker, model string) bool) []*kvcastv1.WorkerStatus {
	var all []*kvcastv1.WorkerStatus
	for _, l := range p.matching(match) {
		all = append(all, l.status())
	}
	return all
}

// matching returns the lanes of the workers that match selects, sorted by name.
func (p *Pipeline) matching(match func(worker, model string) bool) []*Lane {
	p.mu.Lock()
	defer p.mu.Unlock()
	var lanes []*Lane
	for _, l := range p.lanes {
		if match(l.worker, l.entry.source.Model) {
			lanes = append(lanes, l)
		}
	}
	slices.SortFunc(lanes, func(a, b *Lane) int { return strings.Compare(a.worker, b.worker) })
	return lanes
}

func (l *Lane) status() *kvcastv1.WorkerStatus {
	l.mu.Lock()
	defer l.mu.Unlock()
	s := &kvcastv1.WorkerStatus{
		Name:        l.worker,
		Model:       l.entry.source.Model,
		BlockSize:   l.blockSize,
		Endpoint:    l.added.GetEndpoint(),
		Labels:      l.added.GetLabels(),
		LastEventId: l.lastEventID,
	}
	for _, name := range l.rankNames() {
		rank := &kvcastv1.RankStatus{DpRank: name}
		if r := l.ranks[name]; r != nil {
			rank.Incomplete, rank.Gaps, rank.MissedBatches = r.incomplete, r.gaps, r.missedBatches
			for tier, t := range r.tables {
				if t != nil && t.blocks.len() > 0 {
					rank.Blocks = append(rank.Blocks, &kvcastv1.TierBlocks{Tier: kvcastv1.Tier(tier), Blocks: uint64(t.blocks.len())})
				}
			}
		}
		s.Ranks = append(s.Ranks, rank)
	}
	return s
}

// Query selects blocks, by block hash or tokens hash, and places to look for them.
type Query struct {
	BlockHashes  []uint64
	TokensHashes []uint64
	// Match selects the workers, Tiers the tiers.
	Match func(worker, model string) bool
	Tiers journal.Tiers
	// Limit is the maximum number of holders returned.
	Limit int
}

// ErrTooManyHolders means that Lookup found more holders than Query.Limit.
var ErrTooManyHolders = errors.New("too many places hold the blocks")

// Lookup returns every place that has one of the blocks. For a worker with several sources, it finds
// a block by each source's block hash, and returns the block once, with the block hash that routers
// know. Tokens hashes have no index: Lookup compares them with every block of the workers.
func (p *Pipeline) Lookup(ctx context.Context, q Query) ([]*kvcastv1.BlockHolder, error) {
	tokens := make(map[uint64]struct{}, len(q.TokensHashes))
	for _, h := range q.TokensHashes {
		tokens[h] = struct{}{}
	}
	hashes := slices.Compact(slices.Sorted(slices.Values(q.BlockHashes)))
	var found []*kvcastv1.BlockHolder
	for _, l := range p.matching(q.Match) {
		l.mu.Lock()
		ranks := l.rankNames()
		l.mu.Unlock()
		for _, rank := range ranks {
			for tier := wire.TierDevice; tier < wire.NumTiers; tier++ {
				if q.Tiers&journal.TierBit(uint8(tier)) == 0 {
					continue
				}
				found = append(found, l.lookup(ctx, place{rank, tier}, hashes, tokens, q.Limit-len(found))...)
				if err := ctx.Err(); err != nil {
					return nil, err
				}
				if len(found) > q.Limit {
					return nil, ErrTooManyHolders
				}
			}
		}
		if err := l.awaitAcknowledged(ctx); err != nil {
			return nil, err
		}
	}
	return found, nil
}

// place identifies a table of a lane.
type place struct {
	rank uint32
	tier wire.Tier
}

// lookup returns the holders in one table of blocks with sorted block hashes or with tokens
// hashes. It may return one more than the limit.
func (l *Lane) lookup(ctx context.Context, at place, hashes []uint64, tokens map[uint64]struct{}, limit int) (found []*kvcastv1.BlockHolder) {
	l.mu.Lock()
	if t := l.table(at); t != nil {
		var sources map[uint64][]int
		if tr := l.tracker(at.rank); tr != nil {
			sources = tr.Lookup(hashes...)
			hashes = slices.AppendSeq(slices.Clone(hashes), maps.Keys(sources))
			slices.Sort(hashes)
			hashes = slices.Compact(hashes)
		}
		for _, hash := range hashes {
			if b := t.blocks.find(hash); b != nil && len(found) <= limit {
				found = append(found, l.holder(at, t, b, sources[hash]))
			}
		}
	}
	l.mu.Unlock()
	if len(tokens) == 0 {
		return found
	}
	l.scanTable(ctx, at, nil, func(t *table, s *segment, from, _ uint64) {
		for i := range s.Slots {
			b := &s.Slots[i]
			if !b.Used() || b.Cursor() < from || b.Value.flags&flagTokensHash == 0 {
				continue
			}
			if _, wanted := tokens[b.Value.tokensHash]; !wanted || len(found) > limit {
				continue
			}
			if _, twice := slices.BinarySearch(hashes, b.Key()); twice {
				continue
			}
			var sources []int
			if tr := l.tracker(at.rank); tr != nil {
				sources = tr.Lookup(b.Key())[b.Key()]
			}
			found = append(found, l.holder(at, t, b, sources))
		}
	})
	return found
}

// holder describes a block of a table. sources are the indexes of the sources that have the
// block, for a worker with several sources.
func (l *Lane) holder(at place, t *table, b *slot, sources []int) *kvcastv1.BlockHolder {
	h := &kvcastv1.BlockHolder{
		BlockHash: b.Key(),
		Worker:    l.worker,
		Model:     l.entry.source.Model,
		DpRank:    at.rank,
		Tier:      kvcastv1.Tier(at.tier),
	}
	for _, source := range sources {
		h.Sources = append(h.Sources, l.sourceNames[source])
	}
	if b.Value.flags&flagTokensHash != 0 {
		h.TokensHash = proto.Uint64(b.Value.tokensHash)
	}
	if lora := t.attrs.At(b.Value.attr).LoRA; lora != "" {
		h.LoraName = &lora
	}
	return h
}

// table returns the table of a place; nil if there is none.
func (l *Lane) table(at place) *table {
	if r := l.ranks[at.rank]; r != nil {
		return r.tables[at.tier]
	}
	return nil
}

// Digests returns the digests of the workers that match selects, in some tiers, sorted by worker. The
// digests of a worker are of its last entry; digests of several workers are of different times.
func (p *Pipeline) Digests(ctx context.Context, match func(worker, model string) bool, tiers journal.Tiers) ([]*kvcastv1.WorkerDigest, error) {
	var all []*kvcastv1.WorkerDigest
	for _, l := range p.matching(match) {
		first := len(all)
		var appended journal.Pending
		var err error
		all, appended, err = l.digests(all, tiers)
		if err != nil {
			return nil, err
		}
		seq, err := l.wait(ctx, appended)
		if err != nil {
			return nil, err
		}
		for _, d := range all[first:] {
			d.Seq = seq
		}
	}
	return all, nil
}

// digests appends the lane's digests, unless the worker was removed, and returns the append of the
// entry after which they apply.
func (l *Lane) digests(to []*kvcastv1.WorkerDigest, tiers journal.Tiers) ([]*kvcastv1.WorkerDigest, journal.Pending, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.gone {
		return to, journal.Pending{}, nil
	}
	names := l.rankNames()
	if len(names) == 0 {
		names = []uint32{0}
	}
	for _, name := range names {
		to = l.rankDigests(to, name, tiers)
	}
	return to, l.entry.appended, l.failed
}

// rankDigests appends a digest for each selected tier that has had blocks; if none has, a digest of
// the first selected tier.
func (l *Lane) rankDigests(to []*kvcastv1.WorkerDigest, name uint32, tiers journal.Tiers) []*kvcastv1.WorkerDigest {
	r := l.ranks[name]
	if r == nil {
		r = &rankState{}
	}
	used := tiers & r.usedTiers
	for tier := wire.TierDevice; tier < wire.NumTiers; tier++ {
		bit := journal.TierBit(uint8(tier))
		if tiers&bit == 0 || used != 0 && used&bit == 0 {
			continue
		}
		d := &kvcastv1.WorkerDigest{Worker: l.worker, DpRank: name, Tier: kvcastv1.Tier(tier)}
		if t := r.tables[tier]; t != nil {
			d.Blocks, d.Digest = uint64(t.blocks.len()), t.blocks.digest
		}
		to = append(to, d)
		if used == 0 {
			break
		}
	}
	return to
}
