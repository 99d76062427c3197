package server

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"

	"google.golang.org/grpc/status"

	"github.com/kvcast/kvcast/pipeline"
	kvcastv1 "github.com/kvcast/kvcast/proto/kvcast/v1"
)

// maxLookup is how many hashes a lookup may ask for.
const maxLookup = 10_000

// maxHolders is how many places an answer may name: where names are short, what
// clients take by default, 4 MiB, has room for about as many.
const maxHolders = 25_000

// GetStatus implements kvcastv1.RouterEventServiceServer.
func (s routerEvents) GetStatus(ctx context.Context, _ *kvcastv1.GetStatusRequest) (*kvcastv1.GetStatusResponse, error) {
	if err := s.workersQueries.turn(ctx, s.journal.Bounds()); err != nil {
		return nil, err
	}
	defer s.workersQueries.leave()
	b := s.journal.Bounds()
	out := &kvcastv1.GetStatusResponse{
		Epoch:        b.Epoch,
		OldestSeq:    b.Oldest,
		NewestSeq:    b.Newest,
		JournalBytes: uint64(s.journal.Bytes()),
		Subscribers:  uint64(s.subscribers.count()),
		Version:      s.cfg.Version,
	}
	for _, w := range s.state.Status((*filter)(nil).worker) {
		out.Workers++
		for _, r := range w.GetRanks() {
			for _, t := range r.GetBlocks() {
				out.Blocks += t.GetBlocks()
			}
		}
	}
	return out, nil
}

// ListWorkers implements kvcastv1.RouterEventServiceServer.
func (s routerEvents) ListWorkers(ctx context.Context, req *kvcastv1.ListWorkersRequest) (*kvcastv1.ListWorkersResponse, error) {
	filter, err := parseFilter(req.GetFilter(), s.journal.Bounds(), s.filterBytes)
	if err != nil {
		return nil, err
	}
	defer filter.release()
	if err := s.workersQueries.turn(ctx, s.journal.Bounds()); err != nil {
		return nil, err
	}
	defer s.workersQueries.leave()
	out := s.listWorkers(filter)
	if !fits(out) {
		return nil, errResponseTooLarge(fmt.Sprintf("the %d workers with their ranks and sources", len(out.GetWorkers())), "narrow the filter to a model, or to some of the workers", s.journal.Bounds())
	}
	return out, nil
}

// listWorkers is all that is known of the workers that a filter takes.
func (s routerEvents) listWorkers(filter *filter) *kvcastv1.ListWorkersResponse {
	out := &kvcastv1.ListWorkersResponse{Workers: s.state.Status(filter.worker)}
	if s.cfg.Sources == nil {
		return out
	}
	sources := s.cfg.Sources()
	for _, w := range out.GetWorkers() {
		w.Sources = sources[w.GetName()]
		w.State = workerState(w.GetSources())
		delete(sources, w.GetName())
	}
	// Those that are read, and not in the stream.
	for _, name := range slices.Sorted(maps.Keys(sources)) {
		if filter.worker(name, "") {
			out.Workers = append(out.Workers, &kvcastv1.WorkerStatus{Name: name, State: workerState(sources[name]), Sources: sources[name]})
		}
	}
	return out
}

// workerState is how a worker with these sources is doing as a whole.
func workerState(sources []*kvcastv1.SourceStatus) kvcastv1.WorkerState {
	var live, coming, gone, heard int
	for _, s := range sources {
		switch s.GetState() {
		case kvcastv1.SourceState_SOURCE_STATE_LIVE:
			live++
		case kvcastv1.SourceState_SOURCE_STATE_CONNECTING:
			gone++
		case kvcastv1.SourceState_SOURCE_STATE_CATCHING_UP:
			coming++
		default:
		}
		if s.GetStarted() {
			heard++
		}
	}
	switch {
	case heard == 0 && coming+gone == len(sources):
		return kvcastv1.WorkerState_WORKER_STATE_CONNECTING
	case live == len(sources):
		return kvcastv1.WorkerState_WORKER_STATE_LIVE
	case gone == len(sources):
		return kvcastv1.WorkerState_WORKER_STATE_DISCONNECTED
	}
	return kvcastv1.WorkerState_WORKER_STATE_DEGRADED
}

// LookupBlocks implements kvcastv1.RouterEventServiceServer.
func (s routerEvents) LookupBlocks(ctx context.Context, req *kvcastv1.LookupBlocksRequest) (*kvcastv1.LookupBlocksResponse, error) {
	if err := s.welcome(); err != nil {
		return nil, err
	}
	b := s.journal.Bounds()
	switch n := len(req.GetBlockHashes()) + len(req.GetTokensHashes()); {
	case n == 0:
		return nil, errInvalid("block_hashes", "no hash is given: want one at least, here or in tokens_hashes", b)
	case n > maxLookup:
		return nil, errInvalid("block_hashes", fmt.Sprintf("%d hashes are too many: at most %d are allowed, with tokens_hashes", n, maxLookup), b)
	}
	filter, err := parseFilter(req.GetFilter(), b, s.filterBytes)
	if err != nil {
		return nil, err
	}
	defer filter.release()
	limit := s.blockLookups
	if len(req.GetTokensHashes()) > 0 {
		limit = s.tokensLookups
	}
	if err := limit.turn(ctx, b); err != nil {
		return nil, err
	}
	defer limit.leave()
	holders, err := s.state.Lookup(ctx, pipeline.Query{
		BlockHashes:  req.GetBlockHashes(),
		TokensHashes: req.GetTokensHashes(),
		Match:        filter.worker,
		Tiers:        filter.tierSet(),
		Limit:        maxHolders,
	})
	switch {
	case errors.Is(err, pipeline.ErrTooManyHolders):
		return nil, errTooManyHolders(fmt.Sprintf("lie at more than %d places", maxHolders), b)
	case err != nil:
		return nil, status.FromContextError(err).Err()
	}
	out := &kvcastv1.LookupBlocksResponse{Holders: holders}
	if !fits(out) {
		return nil, errTooManyHolders(fmt.Sprintf("lie at %d places, which take more than %d MiB to name", len(holders), maxResponse>>20), b)
	}
	return out, nil
}
