package main

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"time"

	"github.com/kvcast/kvcast/client"
	kvcastv1 "github.com/kvcast/kvcast/proto/kvcast/v1"
)

// matchInterval is the time between two requests of a matcher.
const matchInterval = 20 * time.Millisecond

// matched counts the answers to a matcher.
type matched struct {
	requests, compared, blocks int
}

// matcher matches prompts on the server, and compares the answers with those of a router's view.
type matcher struct {
	router *router
	rng    *rand.Rand
	counts matched
}

// run matches until the context ends. It returns an error if an answer is wrong.
func (m *matcher) run(ctx context.Context) error {
	stream, err := m.router.client.MatchPrefixes(ctx)
	if err != nil {
		return fmt.Errorf("matcher: %w", err)
	}
	pace := time.NewTicker(matchInterval)
	defer pace.Stop()
	for id := uint64(1); ; {
		select {
		case <-pace.C:
		case <-ctx.Done():
			return nil
		}
		prompt, want, at := m.draw()
		if len(prompt) == 0 {
			continue
		}
		err := stream.Send(&kvcastv1.MatchPrefixesRequest{Id: id, Request: &kvcastv1.MatchPrefixRequest{
			Prompts: []*kvcastv1.Prompt{{TokensHashes: prompt}}, After: at,
		}})
		var got *kvcastv1.MatchPrefixesResponse
		if err == nil {
			got, err = stream.Recv()
		}
		if err == nil && got.GetId() != id {
			err = fmt.Errorf("answer %d to request %d", got.GetId(), id)
		}
		if err == nil {
			err = m.compare(got.GetResponse(), want, at)
		}
		if err != nil && ctx.Err() == nil {
			return fmt.Errorf("matcher: prompt %x: %w", prompt, err)
		}
		id++
	}
}

// draw returns the tokens hashes of a random block and its ancestors, with the view's matches and position. The prompt is
// empty if there is no such block.
func (m *matcher) draw() (prompt []uint64, want []client.Match, at *kvcastv1.Position) {
	r := m.router
	r.mu.Lock()
	defer r.mu.Unlock()
	view := r.checker.View()
	workers := view.Workers()
	if at = r.checker.Position(); at == nil || len(workers) == 0 {
		return nil, nil, nil
	}
	worker := workers[m.rng.IntN(len(workers))]
	ranks := view.Ranks(worker)
	if len(ranks) == 0 {
		return nil, nil, nil
	}
	blocks := view.Contents(worker, ranks[m.rng.IntN(len(ranks))], kvcastv1.Tier_TIER_DEVICE)
	for hash := range blocks {
		for range len(blocks) {
			b, ok := blocks[hash]
			if !ok || !b.Hashed {
				break
			}
			prompt = append(prompt, b.TokensHash)
			if hash = b.Parent; !b.HasParent {
				break
			}
		}
		break
	}
	slices.Reverse(prompt)
	return prompt, r.view.Match(client.Prompt{TokensHashes: prompt}), at
}

// compare checks an answer. If it is true at the position of the view, it must equal the view's matches, except for
// sources that are down, which the view does not know, and for the age of what is known, which it measures at another time.
func (m *matcher) compare(got *kvcastv1.MatchPrefixResponse, want []client.Match, at *kvcastv1.Position) error {
	m.counts.requests++
	pos, matches := got.GetPosition(), got.GetPrompts()
	switch {
	case len(matches) != 1:
		return fmt.Errorf("answers to %d prompts, want one", len(matches))
	case pos.GetEpoch() != at.GetEpoch() || pos.GetSeq() < at.GetSeq():
		return fmt.Errorf("answer at %v, want at least %v", pos, at)
	case pos.GetSeq() > at.GetSeq():
		return nil
	}
	m.counts.compared++
	all := matches[0].GetMatches()
	if len(all) != len(want) {
		return fmt.Errorf("at %v: %d matches, want %d", pos, len(all), len(want))
	}
	var errs []error
	for i, w := range want {
		g := all[i]
		var tiers [kvcastv1.Tier_TIER_EXTERNAL + 1]int
		for _, t := range g.GetTiers() {
			tiers[t.GetTier()] = int(t.GetBlocks())
		}
		reasons, known := lasting(g.GetReasons()), lasting(w.Reasons)
		if g.GetWorker() != w.Worker || g.GetDpRank() != w.Rank || int(g.GetBlocks()) != w.Blocks ||
			tiers != w.TierBlocks || !slices.Equal(reasons, known) {
			errs = append(errs, fmt.Errorf("at %v, match %d: got %v, want %+v", pos, i, g, w))
		}
		m.counts.blocks += w.Blocks
	}
	return errors.Join(errs...)
}

// lasting returns the reasons that only entries change.
func lasting(reasons []kvcastv1.DegradedReason) []kvcastv1.DegradedReason {
	return slices.DeleteFunc(slices.Clone(reasons), func(r kvcastv1.DegradedReason) bool {
		return r == kvcastv1.DegradedReason_DEGRADED_REASON_SOURCE_DOWN || r == kvcastv1.DegradedReason_DEGRADED_REASON_STALE
	})
}
