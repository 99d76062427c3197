package server

import (
	"context"
	"sync"
	"time"

	"google.golang.org/grpc/status"

	"github.com/kvcast/kvcast/internal/core/index"
	kvcastv1 "github.com/kvcast/kvcast/proto/kvcast/v1"
	"github.com/kvcast/kvcast/server/internal/callerror"
)

const (
	defaultSharedPrefixes = 100
	maxSharedPrefixes     = 500
	// sharedPrefixesAge is how old an answer may be, so that several who ask cost as much as one.
	sharedPrefixesAge = 5 * time.Second
	// sharingScanInterval is the minimum time from the end of a scan to the start of the next, so that clients that ask for one
	// model after another do not keep the server scanning.
	sharingScanInterval = time.Second
)

// sharingCache has the last scan for ListSharedPrefixes. A scan has enough nodes for the largest limit, and serves all limits.
type sharingCache struct {
	mu    sync.Mutex // guards all below
	model string
	began time.Time
	last  *index.Sharing // nil: none yet; never modified
	ended time.Time      // of the last scan, even if it failed
}

func (s inspection) ListSharedPrefixes(ctx context.Context, req *kvcastv1.ListSharedPrefixesRequest) (*kvcastv1.ListSharedPrefixesResponse, error) {
	b := s.journal.Bounds()
	limit := int(req.GetLimit())
	switch {
	case limit > maxSharedPrefixes:
		return nil, callerror.InvalidField(b, "limit", "%d is not allowed: want at most %d", limit, maxSharedPrefixes)
	case limit == 0:
		limit = defaultSharedPrefixes
	}
	if err := s.checkServing(); err != nil {
		return nil, err
	}
	if sharing, began, ok := s.sharing.recent(req.GetModel()); ok {
		return sharedPrefixesResponse(sharing, began, limit), nil
	}
	release, err := s.queries.sharingScans.Acquire(ctx, b)
	if err != nil {
		return nil, err
	}
	defer release()
	sharing, began, err := s.sharingOf(ctx, req.GetModel())
	if err != nil {
		return nil, status.FromContextError(err).Err()
	}
	return sharedPrefixesResponse(sharing, began, limit), nil
}

// sharingOf returns a recent scan of a model, or scans. The caller has the slot of sharingScans.
func (s inspection) sharingOf(ctx context.Context, model string) (*index.Sharing, time.Time, error) {
	if sharing, began, ok := s.sharing.recent(model); ok { // another call has scanned meanwhile
		return sharing, began, nil
	}
	select {
	case <-time.After(s.sharing.untilNextScan()):
	case <-ctx.Done():
		return nil, time.Time{}, ctx.Err()
	}
	began := time.Now()
	sharing, err := s.index.Sharing(ctx, model, maxSharedPrefixes)
	s.sharing.scanned(model, began, sharing)
	return sharing, began, err
}

// recent returns the last scan and when it began; ok is false if it is of another model or too old.
func (c *sharingCache) recent(model string) (_ *index.Sharing, began time.Time, ok bool) {
	c.mu.Lock()
	defer c.mu.Unlock()
	ok = c.last != nil && c.model == model && time.Since(c.began) < sharedPrefixesAge
	return c.last, c.began, ok
}

// untilNextScan returns the time to wait before a scan; it may be negative.
func (c *sharingCache) untilNextScan() time.Duration {
	c.mu.Lock()
	defer c.mu.Unlock()
	return time.Until(c.ended.Add(sharingScanInterval))
}

// scanned notes the end of a scan; sharing is nil if it failed.
func (c *sharingCache) scanned(model string, began time.Time, sharing *index.Sharing) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.ended = time.Now()
	if sharing != nil {
		c.model, c.began, c.last = model, began, sharing
	}
}

func sharedPrefixesResponse(s *index.Sharing, at time.Time, limit int) *kvcastv1.ListSharedPrefixesResponse {
	out := &kvcastv1.ListSharedPrefixesResponse{Blocks: s.Blocks, Copies: s.Copies, TimeUnixNano: at.UnixNano()}
	ranks := len(s.ByRanks)
	for ranks > 0 && s.ByRanks[ranks-1] == 0 {
		ranks--
	}
	out.BlocksByRanks = s.ByRanks[:ranks]
	nodes := s.Nodes
	if limit < maxSharedPrefixes {
		nodes = s.Heaviest(limit)
	}
	for i := range nodes {
		n := &nodes[i]
		out.Prefixes = append(out.Prefixes, &kvcastv1.SharedPrefix{
			Id: n.ID, ParentId: n.Parent, Model: n.Model, FirstBlock: uint64(n.First), Blocks: uint64(n.Blocks),
			Copies: uint64(n.Copies), MaxRanks: uint32(n.MaxRanks), TokensHashes: n.Tokens,
		})
	}
	return out
}
