package server

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/peer"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"

	"github.com/kvcast/kvcast/internal/core/index"
	"github.com/kvcast/kvcast/internal/history"
	kvcastv1 "github.com/kvcast/kvcast/proto/kvcast/v1"
	"github.com/kvcast/kvcast/server/internal/callerror"
)

const (
	maxLookup = 10_000 // hashes in a LookupBlocksRequest
	// maxHolders bounds the holders in a response. About as many with short names fit into callerror.MaxResponse.
	maxHolders = 25_000

	// Bounds of a SubscriberStatus. A response then has room for DefaultMaxSubscribers of them.
	maxListedNames = 8   // elements of each list of the filter
	maxListedBytes = 128 // bytes of each name, and of the user agent
)

// fits reports whether clients accept a response.
func fits(m proto.Message) bool { return proto.Size(m) <= callerror.MaxResponse }

func (s routerEvents) GetStatus(ctx context.Context, _ *kvcastv1.GetStatusRequest) (*kvcastv1.GetStatusResponse, error) {
	release, err := s.queries.workers.Acquire(ctx, s.journal.Bounds())
	if err != nil {
		return nil, err
	}
	defer release()
	b := s.journal.Bounds()
	workers, blocks := s.index.Len()
	out := &kvcastv1.GetStatusResponse{
		Epoch:        b.Epoch,
		OldestSeq:    b.Oldest,
		NewestSeq:    b.Newest,
		JournalBytes: uint64(s.journal.Bytes()),
		Workers:      uint64(workers),
		Blocks:       blocks,
		Subscribers:  uint64(s.quotas.subscribers.Total().Used()),
		Version:      s.cfg.Version,

		Snapshots: uint64(s.snapshots.sending.Load()), SnapshotsWaiting: uint64(s.snapshots.waiting.Load()), Replays: uint64(s.quotas.replays.Total().Used()),
		JournalMaxBytes: uint64(s.cfg.Retention.MaxBytes), JournalMaxAgeNano: uint64(s.cfg.Retention.MaxAge),
		JournalEvictedBytes: uint64(s.journal.EvictedBytes()), NewestIncidentId: s.cfg.Incidents.Newest(),
	}
	if s.cfg.Recovery != nil {
		out.Recovery = s.cfg.Recovery()
	}
	if s.cfg.Cluster != nil {
		out.InstanceId, out.Instances = s.cfg.Cluster.ID(), s.cfg.Cluster.Instances()
	}
	return out, nil
}

func (s routerEvents) ListWorkers(ctx context.Context, req *kvcastv1.ListWorkersRequest) (*kvcastv1.ListWorkersResponse, error) {
	filter, err := parseFilter(ctx, req.GetFilter(), s.journal.Bounds(), s.quotas.filterBytes)
	if err != nil {
		return nil, err
	}
	defer filter.release()
	release, err := s.queries.workers.Acquire(ctx, s.journal.Bounds())
	if err != nil {
		return nil, err
	}
	defer release()
	workers, _ := s.index.Workers(filter.worker)
	out := &kvcastv1.ListWorkersResponse{}
	for i := range workers {
		out.Workers = append(out.Workers, workerStatus(&workers[i]))
	}
	s.addSourcesAndOwners(out, filter.worker)
	if !fits(out) {
		return nil, callerror.LargeResponse(s.journal.Bounds(), fmt.Sprintf("the %d workers with their ranks and sources", len(out.GetWorkers())),
			"narrow the filter to a model, or to some of the workers")
	}
	return out, nil
}

// addSourcesAndOwners adds to the workers with entries what does not follow from entries, and the selected workers without entries.
func (s routerEvents) addSourcesAndOwners(out *kvcastv1.ListWorkersResponse, selected func(worker, model string) bool) {
	var sources map[string][]*kvcastv1.SourceStatus
	if s.cfg.Sources != nil {
		sources = s.cfg.Sources()
	}
	var owners map[string]*kvcastv1.WorkerOwner
	var states map[string]kvcastv1.WorkerState
	if s.cfg.Cluster != nil {
		owners, states = s.cfg.Cluster.Owners(), s.cfg.Cluster.WorkerStates()
	}
	others := make(map[string]bool) // the workers without entries
	for name := range sources {
		others[name] = true
	}
	for name := range owners {
		others[name] = true
	}
	for _, w := range out.GetWorkers() {
		delete(others, w.GetName())
	}
	for _, name := range slices.Sorted(maps.Keys(others)) {
		if selected(name, "") {
			out.Workers = append(out.Workers, &kvcastv1.WorkerStatus{Name: name})
		}
	}
	standing := s.standing.lookup(time.Now())
	for _, w := range out.GetWorkers() {
		w.Sources = sources[w.GetName()]
		if w.State = WorkerState(w.GetSources()); w.State == kvcastv1.WorkerState_WORKER_STATE_UNSPECIFIED {
			w.State = states[w.GetName()]
		}
		if w.Owner = owners[w.GetName()]; w.Owner == nil && s.cfg.Cluster != nil {
			w.Owner = &kvcastv1.WorkerOwner{} // it was released to no instance
		}
		for _, r := range w.GetRanks() {
			r.Accuracy = s.outcomes.accuracy(w.GetName(), r.GetDpRank())
			if standing == nil {
				continue
			}
			of := standing(w.GetName(), r.GetDpRank())
			r.DownNano, r.AgeNano = of.Down, of.Age
			of.Degrade(&r.Trust, &r.Reasons)
			if of.Stale && w.State == kvcastv1.WorkerState_WORKER_STATE_LIVE {
				w.State = kvcastv1.WorkerState_WORKER_STATE_DEGRADED
			}
		}
	}
}

// workerStatus returns the status of a worker as far as it follows from entries.
func workerStatus(w *index.Worker) *kvcastv1.WorkerStatus {
	s := &kvcastv1.WorkerStatus{
		Name: w.Name, Model: w.Model, BlockSize: w.BlockSize, LastEventId: w.LastEventID,
		Endpoint: w.Added.GetEndpoint(), Labels: w.Added.GetLabels(), Pool: w.Added.GetPool(), Pools: w.Added.GetPools(),
	}
	for i := range w.Ranks {
		r := &w.Ranks[i]
		rank := &kvcastv1.RankStatus{
			DpRank: r.Rank, Incomplete: r.Reasons != 0, Gaps: r.Gaps, MissedBatches: r.MissedBatches,
			Trust: r.Trust(), Reasons: r.Reasons.List(), TierReasons: r.ListTierReasons(), Detail: r.Detail, Groups: r.Groups,
		}
		for tier, d := range r.Blocks {
			if d.Blocks > 0 {
				rank.Blocks = append(rank.Blocks, &kvcastv1.TierBlocks{Tier: kvcastv1.Tier(tier + 1), Blocks: d.Blocks})
			}
		}
		s.Ranks = append(s.Ranks, rank)
	}
	return s
}

// WorkerState returns the state of a worker with these sources.
func WorkerState(sources []*kvcastv1.SourceStatus) kvcastv1.WorkerState {
	count := make(map[kvcastv1.SourceState]int)
	started := false
	for _, s := range sources {
		count[s.GetState()]++
		started = started || s.GetStarted()
	}
	connecting := count[kvcastv1.SourceState_SOURCE_STATE_CONNECTING]
	switch all := len(sources); {
	case all == 0:
		return kvcastv1.WorkerState_WORKER_STATE_UNSPECIFIED
	case !started && connecting+count[kvcastv1.SourceState_SOURCE_STATE_CATCHING_UP] == all:
		return kvcastv1.WorkerState_WORKER_STATE_CONNECTING
	case count[kvcastv1.SourceState_SOURCE_STATE_LIVE] == all:
		return kvcastv1.WorkerState_WORKER_STATE_LIVE
	case connecting == all:
		return kvcastv1.WorkerState_WORKER_STATE_DISCONNECTED
	}
	return kvcastv1.WorkerState_WORKER_STATE_DEGRADED
}

func (s routerEvents) LookupBlocks(ctx context.Context, req *kvcastv1.LookupBlocksRequest) (*kvcastv1.LookupBlocksResponse, error) {
	if err := s.checkServing(); err != nil {
		return nil, err
	}
	b := s.journal.Bounds()
	switch n := len(req.GetBlockHashes()) + len(req.GetTokensHashes()); {
	case n == 0:
		return nil, callerror.InvalidField(b, "block_hashes", "no hash is given: want at least one, here or in tokens_hashes")
	case n > maxLookup:
		return nil, callerror.InvalidField(b, "block_hashes", "%d hashes are too many: at most %d are allowed, with tokens_hashes", n, maxLookup)
	}
	filter, err := parseFilter(ctx, req.GetFilter(), b, s.quotas.filterBytes)
	if err != nil {
		return nil, err
	}
	defer filter.release()
	lookups := s.queries.blockLookups
	if len(req.GetTokensHashes()) > 0 {
		lookups = s.queries.tokensLookups
	}
	release, err := lookups.Acquire(ctx, b)
	if err != nil {
		return nil, err
	}
	defer release()
	holders, err := s.index.Holders(ctx, &index.Lookup{
		BlockHashes:  req.GetBlockHashes(),
		TokensHashes: req.GetTokensHashes(),
		Match:        filter.worker,
		Tiers:        filter.tiers,
		Limit:        maxHolders,
		Alias:        s.cfg.Aliases,
	})
	switch {
	case errors.Is(err, index.ErrTooManyHolders):
		return nil, callerror.ManyHolders(b, "have more than %d holders", maxHolders)
	case err != nil:
		return nil, status.FromContextError(err).Err()
	}
	out := &kvcastv1.LookupBlocksResponse{Holders: holders}
	if !fits(out) {
		return nil, callerror.ManyHolders(b, "have %d holders, which take more than %d MiB", len(holders), callerror.MaxResponse>>20)
	}
	return out, nil
}

// StreamState returns what the history remembers of the stream.
func (s *Server) StreamState() history.Stream {
	return history.Stream{
		NewestSeq: s.journal.Bounds().Newest, Subscribers: uint64(s.quotas.subscribers.Total().Used()), SubscriberLag: s.subscribers.lag(s.journal),
	}
}

func (s routerEvents) ListSubscribers(context.Context, *kvcastv1.ListSubscribersRequest) (*kvcastv1.ListSubscribersResponse, error) {
	out := &kvcastv1.ListSubscribersResponse{Subscribers: s.subscribers.list()}
	for _, sub := range out.GetSubscribers() {
		sub.Behind = s.journal.Bounds().Newest - sub.GetSeq() // the newest seq is read after sub.Seq, so it is not less
	}
	if !fits(out) {
		return nil, callerror.LargeResponse(s.journal.Bounds(), fmt.Sprintf("the %d subscribers with their filters", len(out.GetSubscribers())),
			"use GetStatus for their number")
	}
	return out, nil
}

// subscribers lists the open Subscribe streams.
type subscribers struct {
	mu   sync.Mutex // guards open
	open map[*subscriber]struct{}
}

// subscriber is the record of an open Subscribe stream.
type subscriber struct {
	status *kvcastv1.SubscriberStatus // immutable; without the fields below
	// seq is the last entry that the stream has read. Only the stream writes seq and inSnapshot.
	seq        atomic.Uint64
	inSnapshot atomic.Bool
}

func newSubscribers() *subscribers {
	return &subscribers{open: make(map[*subscriber]struct{})}
}

// add lists a stream that has acquired a slot and starts after a seq, or with a snapshot.
func (s *subscribers) add(ctx context.Context, req *kvcastv1.SubscribeRequest, after uint64, inSnapshot bool) *subscriber {
	sub := &subscriber{status: &kvcastv1.SubscriberStatus{
		Filter: truncateFilter(req.GetFilter()), ClientId: req.GetClientId(), StartTimeUnixNano: time.Now().UnixNano(),
	}}
	sub.seq.Store(after)
	sub.inSnapshot.Store(inSnapshot)
	if p, ok := peer.FromContext(ctx); ok {
		sub.status.Peer = p.Addr.String()
	}
	if agent := metadata.ValueFromIncomingContext(ctx, "user-agent"); len(agent) > 0 {
		sub.status.UserAgent = truncate(agent[0])
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	s.open[sub] = struct{}{}
	return sub
}

func (s *subscribers) remove(sub *subscriber) {
	s.mu.Lock()
	defer s.mu.Unlock()
	delete(s.open, sub)
}

// lag returns how many entries the stream furthest behind has not read yet, without those that send a snapshot.
func (s *subscribers) lag(j Journal) (most uint64) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for sub := range s.open {
		if !sub.inSnapshot.Load() {
			seq := sub.seq.Load()
			most = max(most, j.Bounds().Newest-seq) // the newest seq is read after seq, so it is not less
		}
	}
	return most
}

// list returns the status of the open streams, without the field behind. The oldest stream comes first.
func (s *subscribers) list() []*kvcastv1.SubscriberStatus {
	s.mu.Lock()
	defer s.mu.Unlock()
	var out []*kvcastv1.SubscriberStatus
	for sub := range s.open {
		status := proto.CloneOf(sub.status)
		status.Seq, status.InSnapshot = sub.seq.Load(), sub.inSnapshot.Load()
		out = append(out, status)
	}
	slices.SortFunc(out, func(a, b *kvcastv1.SubscriberStatus) int {
		return cmp.Compare(a.GetStartTimeUnixNano(), b.GetStartTimeUnixNano())
	})
	return out
}

func truncateFilter(f *kvcastv1.Filter) *kvcastv1.Filter {
	if f == nil {
		return nil
	}
	names := func(all []string) (first []string) {
		for _, name := range all[:min(len(all), maxListedNames)] {
			first = append(first, truncate(name))
		}
		return first
	}
	return &kvcastv1.Filter{Workers: names(f.GetWorkers()), Models: names(f.GetModels()), Tiers: f.GetTiers()[:min(len(f.GetTiers()), maxListedNames)]}
}

func truncate(s string) string { return strings.ToValidUTF8(s[:min(len(s), maxListedBytes)], "") }
