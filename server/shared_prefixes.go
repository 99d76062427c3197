package server

import (
	"context"
	"sync"
	"time"

	"google.golang.org/grpc/status"

	"github.com/kvcast/kvcast/index"
	kvcastv1 "github.com/kvcast/kvcast/proto/kvcast/v1"
)

const (
	defaultSharedPrefixes = 100
	maxSharedPrefixes     = 500
	// sharedPrefixesAge is how old an answer may be, so that several who ask cost as much as one.
	sharedPrefixesAge = 5 * time.Second
)

// sharedPrefixes is the last answer of ListSharedPrefixes.
type sharedPrefixes struct {
	mu     sync.Mutex // guards all below
	model  string
	limit  int
	at     time.Time
	answer *kvcastv1.ListSharedPrefixesResponse // nil: none yet
}

// ListSharedPrefixes implements kvcastv1.InspectionServiceServer.
func (s inspection) ListSharedPrefixes(ctx context.Context, req *kvcastv1.ListSharedPrefixesRequest) (*kvcastv1.ListSharedPrefixesResponse, error) {
	b := s.journal.Bounds()
	limit := int(req.GetLimit())
	switch {
	case limit > maxSharedPrefixes:
		return nil, invalidField(b, "limit", "%d is not allowed: want at most %d", limit, maxSharedPrefixes)
	case limit == 0:
		limit = defaultSharedPrefixes
	}
	if err := s.checkServing(); err != nil {
		return nil, err
	}
	if err := s.sharingScans.acquire(ctx, b); err != nil {
		return nil, err
	}
	defer s.sharingScans.release()
	last := &s.sharedPrefixes
	last.mu.Lock()
	defer last.mu.Unlock()
	now := time.Now()
	if last.answer != nil && last.model == req.GetModel() && last.limit == limit && now.Sub(last.at) < sharedPrefixesAge {
		return last.answer, nil
	}
	sharing, err := s.index.Sharing(ctx, req.GetModel(), limit)
	if err != nil {
		return nil, status.FromContextError(err).Err()
	}
	last.model, last.limit, last.at, last.answer = req.GetModel(), limit, now, sharedPrefixesResponse(sharing, now)
	return last.answer, nil
}

func sharedPrefixesResponse(s *index.Sharing, at time.Time) *kvcastv1.ListSharedPrefixesResponse {
	out := &kvcastv1.ListSharedPrefixesResponse{Blocks: s.Blocks, Copies: s.Copies, TimeUnixNano: at.UnixNano()}
	ranks := len(s.ByRanks)
	for ranks > 0 && s.ByRanks[ranks-1] == 0 {
		ranks--
	}
	out.BlocksByRanks = s.ByRanks[:ranks]
	for i := range s.Nodes {
		n := &s.Nodes[i]
		out.Prefixes = append(out.Prefixes, &kvcastv1.SharedPrefix{
			Id: n.ID, ParentId: n.Parent, Model: n.Model, FirstBlock: uint64(n.First), Blocks: uint64(n.Blocks),
			Copies: uint64(n.Copies), MaxRanks: uint32(n.MaxRanks), TokensHashes: n.Tokens,
		})
	}
	return out
}
