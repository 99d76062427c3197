package server_test

import (
	"context"
	"fmt"
	"testing"

	"github.com/prometheus/client_golang/prometheus"
	"google.golang.org/grpc/codes"

	"github.com/kvcast/kvcast/journal"
	kvcastv1 "github.com/kvcast/kvcast/proto/kvcast/v1"
	"github.com/kvcast/kvcast/server"
	"github.com/kvcast/kvcast/test/checker"
	"github.com/kvcast/kvcast/test/harness"
)

// wide returns a filter of many names: 600 KB to 1 MB in memory.
func wide() *kvcastv1.Filter {
	f := &kvcastv1.Filter{Workers: []string{"w"}}
	for n := range 9000 {
		f.Workers = append(f.Workers, fmt.Sprintf("%020d", n))
	}
	return f
}

// TestFilterBytesAreLimited has room for one wide filter, of any call, until the call ends.
func TestFilterBytesAreLimited(t *testing.T) {
	reg := prometheus.NewRegistry()
	h := overTCP(t, server.Config{MaxFilterBytes: server.MinFilterBytes, Registerer: reg}, journal.Config{})
	h.addWorker()
	req := earliest()
	req.Filter = wide()
	first := h.subscribe(checker.New(checker.Options{}), req)
	first.until(t, 1)

	calls := map[string]func(ctx context.Context) error{
		"Subscribe": func(ctx context.Context) error {
			stream, err := h.client.Subscribe(ctx, req)
			if err == nil {
				_, err = stream.Recv()
			}
			return err
		},
		"Replay": func(ctx context.Context) error {
			stream, err := h.client.Replay(ctx, &kvcastv1.ReplayRequest{Filter: wide()})
			if err == nil {
				_, err = stream.Recv()
			}
			return err
		},
		"Snapshot": func(ctx context.Context) error {
			stream, err := h.client.Snapshot(ctx, &kvcastv1.SnapshotRequest{Filter: wide()})
			if err == nil {
				_, err = stream.Recv()
			}
			return err
		},
		"ListWorkers": func(ctx context.Context) error {
			_, err := h.client.ListWorkers(ctx, &kvcastv1.ListWorkersRequest{Filter: wide()})
			return err
		},
		"LookupBlocks": func(ctx context.Context) error {
			_, err := h.client.LookupBlocks(ctx, &kvcastv1.LookupBlocksRequest{BlockHashes: []uint64{1}, Filter: wide()})
			return err
		},
	}
	for name, call := range calls {
		t.Run(name+" beside another", func(t *testing.T) {
			err := call(t.Context())
			wantStatus(t, err, codes.ResourceExhausted, "FILTERS_TOO_LARGE")
		})
	}
	if first.cancel(); first.end() == nil {
		t.Fatal("the first stream goes on")
	}
	for name, call := range calls {
		t.Run(name+" alone", func(t *testing.T) {
			h.filterBytesAreFree(t, reg)
			ctx, cancel := context.WithCancel(t.Context())
			defer cancel()
			if err := call(ctx); err != nil {
				t.Error(err)
			}
		})
	}
	h.filterBytesAreFree(t, reg)
	// A filter without names uses none.
	if _, err := h.client.ListWorkers(t.Context(), &kvcastv1.ListWorkersRequest{}); err != nil {
		t.Error(err)
	}
	if got := harness.Gather(t, reg).Value(t, "kvcast_budget_refused_total", "resource", "filter_bytes"); got != 5 {
		t.Errorf("%v refusals are counted, want 5", got)
	}
}

// filterBytesAreFree waits until no filter is counted: a client can see the end of a stream
// before its handler returns.
func (h *fixture) filterBytesAreFree(t *testing.T, reg *prometheus.Registry) {
	t.Helper()
	for harness.Gather(t, reg).Value(t, "kvcast_budget_used", "resource", "filter_bytes") != 0 {
		if err := t.Context().Err(); err != nil {
			t.Fatal(err)
		}
	}
}
