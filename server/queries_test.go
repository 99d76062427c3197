package server_test

import (
	"context"
	"fmt"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"google.golang.org/grpc/codes"
	"google.golang.org/protobuf/proto"

	"github.com/kvcast/kvcast/ingest/config"
	"github.com/kvcast/kvcast/internal/core/kvblock"
	"github.com/kvcast/kvcast/internal/feed"
	"github.com/kvcast/kvcast/internal/journal"
	"github.com/kvcast/kvcast/internal/wire"
	kvcastv1 "github.com/kvcast/kvcast/proto/kvcast/v1"
	"github.com/kvcast/kvcast/server"
	"github.com/kvcast/kvcast/test/harness"
)

// queryKinds are the limited calls, with the number that may run concurrently.
var queryKinds = map[string]struct {
	running int
	call    func(*fixture, context.Context) error
}{
	"tokens_lookup": {1, func(h *fixture, ctx context.Context) error {
		_, err := h.client.LookupBlocks(ctx, &kvcastv1.LookupBlocksRequest{BlockHashes: []uint64{1}, TokensHashes: []uint64{1}})
		return err
	}},
	"block_lookup": {4, func(h *fixture, ctx context.Context) error {
		_, err := h.client.LookupBlocks(ctx, &kvcastv1.LookupBlocksRequest{BlockHashes: []uint64{1}})
		return err
	}},
	"workers": {2, func(h *fixture, ctx context.Context) error {
		_, err := h.client.ListWorkers(ctx, &kvcastv1.ListWorkersRequest{})
		return err
	}},
}

// TestQueriesAreLimited starts more queries than may run and wait.
func TestQueriesAreLimited(t *testing.T) {
	const waiting, excess = 64, 3
	for kind, tt := range queryKinds {
		t.Run(kind, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				reg := prometheus.NewRegistry()
				h := inMemory(t, server.Config{Registerer: reg}, journal.Config{})
				h.addWorker()
				h.append(1)
				open := h.queries.close()
				ended := make(chan error, 100)
				for range tt.running + waiting + excess {
					go func() { ended <- tt.call(h, t.Context()) }()
				}
				synctest.Wait()
				if got := h.queries.inside.Load(); got != int64(tt.running) {
					t.Errorf("%d queries run, want %d", got, tt.running)
				}
				if len(ended) != excess {
					t.Errorf("%d queries have ended, want %d", len(ended), excess)
				}
				for range len(ended) {
					wantStatus(t, <-ended, codes.ResourceExhausted, "TOO_MANY_QUERIES")
				}
				if got := harness.Gather(t, reg).Value(t, "kvcast_server_queries_waiting", "kind", kind); got != waiting {
					t.Errorf("queries_waiting: got %v, want %d", got, waiting)
				}
				open()
				for range tt.running + waiting {
					if err := <-ended; err != nil {
						t.Error(err)
					}
				}
				if got := harness.Gather(t, reg).Value(t, "kvcast_server_queries_refused_total", "kind", kind); got != excess {
					t.Errorf("queries_refused_total: got %v, want %d", got, excess)
				}
			})
		})
	}
}

// TestGetStatusSharesTheLimitOfListWorkers calls GetStatus while as many ListWorkers run as may.
func TestGetStatusSharesTheLimitOfListWorkers(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		h := inMemory(t, server.Config{}, journal.Config{})
		open := h.queries.close()
		var running sync.WaitGroup
		for range queryKinds["workers"].running {
			running.Go(func() {
				if err := queryKinds["workers"].call(h, t.Context()); err != nil {
					t.Error(err)
				}
			})
		}
		synctest.Wait()
		answered := make(chan error, 1)
		go func() {
			_, err := h.client.GetStatus(t.Context(), &kvcastv1.GetStatusRequest{})
			answered <- err
		}()
		synctest.Wait()
		if len(answered) != 0 {
			t.Error("GetStatus did not wait")
		}
		open()
		running.Wait()
		if err := <-answered; err != nil {
			t.Error(err)
		}
	})
}

// TestQueryKindsAreIndependent runs queries of each kind while a query of another kind blocks its kind.
func TestQueryKindsAreIndependent(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		h := inMemory(t, server.Config{}, journal.Config{})
		h.addWorker()
		h.append(1)
		open := h.queries.close()
		var running sync.WaitGroup
		for _, kind := range []string{"tokens_lookup", "tokens_lookup", "block_lookup", "workers"} {
			running.Go(func() {
				if err := queryKinds[kind].call(h, t.Context()); err != nil {
					t.Errorf("%s: %v", kind, err)
				}
			})
		}
		synctest.Wait()
		if got := h.queries.inside.Load(); got != 3 {
			t.Errorf("%d queries run, want one of each kind", got)
		}
		open()
		running.Wait()
	})
}

// TestQueryWaitEnds has one query time out while others run, and cancels another query.
func TestQueryWaitEnds(t *testing.T) {
	for kind, tt := range queryKinds {
		t.Run(kind, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				h := inMemory(t, server.Config{}, journal.Config{})
				h.addWorker()
				h.append(1)
				open := h.queries.close()
				var running sync.WaitGroup
				for range tt.running {
					running.Go(func() {
						if err := tt.call(h, t.Context()); err != nil {
							t.Error(err)
						}
					})
				}
				synctest.Wait()
				began := time.Now()
				wantStatus(t, tt.call(h, t.Context()), codes.ResourceExhausted, "TOO_MANY_QUERIES")
				if took := time.Since(began); took != 5*time.Second {
					t.Errorf("the query waited for %v, want 5s", took)
				}
				ctx, cancel := context.WithTimeout(t.Context(), time.Second)
				defer cancel()
				if err := tt.call(h, ctx); err == nil {
					t.Error("a canceled query was answered")
				}
				open()
				running.Wait()
				if err := tt.call(h, t.Context()); err != nil {
					t.Errorf("query after the others: %v", err)
				}
			})
		})
	}
}

// TestLookupResponseFitsClientLimit looks up holders with long names.
func TestLookupResponseFitsClientLimit(t *testing.T) {
	t.Parallel()
	h := overTCP(t, server.Config{}, journal.Config{})
	hashes := make([]uint64, 10_000)
	for i := range hashes {
		hashes[i] = uint64(i) + 1 // no 0, so that all hashes have the same encoded size
	}
	lane := h.Pipeline.AddWorker(feed.Worker{Name: strings.Repeat("w", config.MaxNameBytes), Model: strings.Repeat("m", config.MaxModelBytes)})
	h.batch(lane, wire.Event{Kind: wire.KindStored, Tier: kvblock.TierDevice, BlockHashes: hashes, BlockSize: 16})
	_, err := h.client.LookupBlocks(t.Context(), &kvcastv1.LookupBlocksRequest{BlockHashes: hashes})
	wantStatus(t, err, codes.ResourceExhausted, "TOO_MANY_HOLDERS")
	// n holders fit into the default limit of clients.
	one, err := h.client.LookupBlocks(t.Context(), &kvcastv1.LookupBlocksRequest{BlockHashes: hashes[:1]})
	if err != nil {
		t.Fatal(err)
	}
	n := 4 << 20 / proto.Size(one)
	if _, err := h.client.LookupBlocks(t.Context(), &kvcastv1.LookupBlocksRequest{BlockHashes: hashes[:n]}); err != nil {
		t.Errorf("%d holders: %v", n, err)
	}
	_, err = h.client.LookupBlocks(t.Context(), &kvcastv1.LookupBlocksRequest{BlockHashes: hashes[:n+1]})
	wantStatus(t, err, codes.ResourceExhausted, "TOO_MANY_HOLDERS")
}

// manySources returns sources whose encoding exceeds the size limit of a response.
func manySources() map[string][]*kvcastv1.SourceStatus {
	all := make(map[string][]*kvcastv1.SourceStatus)
	for n := range 4096 {
		all[fmt.Sprintf("worker-%d", n)] = []*kvcastv1.SourceStatus{{Endpoint: strings.Repeat("e", 1024)}}
	}
	return all
}

func TestWorkersResponseFitsClientLimit(t *testing.T) {
	t.Parallel()
	h := overTCP(t, server.Config{Sources: manySources}, journal.Config{})
	_, err := h.client.ListWorkers(t.Context(), &kvcastv1.ListWorkersRequest{})
	wantStatus(t, err, codes.ResourceExhausted, "RESPONSE_TOO_LARGE")
	list, err := h.client.ListWorkers(t.Context(), &kvcastv1.ListWorkersRequest{Filter: &kvcastv1.Filter{Workers: []string{"worker-1", "worker-2"}}})
	if err != nil || len(list.GetWorkers()) != 2 {
		t.Errorf("with a filter: got %v, %v", list, err)
	}
}
