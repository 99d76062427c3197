package server_test

import (
	"context"
	"fmt"
	"testing"

	"github.com/prometheus/client_golang/prometheus"
	"google.golang.org/grpc/codes"

	"github.com/kvcast/kvcast/internal/journal"
	kvcastv1 "github.com/kvcast/kvcast/proto/kvcast/v1"
	"github.com/kvcast/kvcast/server"
	"github.com/kvcast/kvcast/test/checker"
	"github.com/kvcast/kvcast/test/harness"
)

// wide returns a filter with 9,001 names, which takes 500 KB to 1 MB of memory.
func wide() *kvcastv1.Filter {
	f := &kvcastv1.Filter{Workers: []string{"w"}}
	for n := range 9000 {
		f.Workers = append(f.Workers, fmt.Sprintf("%020d", n))
	}
	return f
}

// TestFilterBytesAreLimited sets a limit that admits one wide filter at a time.
func TestFilterBytesAreLimited(t *testing.T) {
	t.Parallel()
	reg := prometheus.NewRegistry()
	h := overTCP(t, server.Config{Limits: server.Limits{MaxFilterBytes: server.MinFilterBytes}, Registerer: reg}, journal.Config{})
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
		t.Run(name+" while another call has a filter", func(t *testing.T) {
			err := call(t.Context())
			wantStatus(t, err, codes.ResourceExhausted, "FILTERS_TOO_LARGE")
		})
	}
	if first.cancel(); first.end() == nil {
		t.Fatal("the first stream has not ended")
	}
	for name, call := range calls {
		t.Run(name+" without another call", func(t *testing.T) {
			h.awaitNoFilterBytes(t, reg)
			ctx, cancel := context.WithCancel(t.Context())
			defer cancel()
			if err := call(ctx); err != nil {
				t.Error(err)
			}
		})
	}
	h.awaitNoFilterBytes(t, reg)
	// A call without a filter reserves no memory.
	if _, err := h.client.ListWorkers(t.Context(), &kvcastv1.ListWorkersRequest{}); err != nil {
		t.Error(err)
	}
	if got := harness.Gather(t, reg).Value(t, "kvcast_budget_refused_total", "resource", "filter_bytes"); got != 5 {
		t.Errorf("refused_total: got %v, want 5", got)
	}
}

// awaitNoFilterBytes waits until no memory is reserved for filters. The handler of a call may return after the client
// has received the end of the stream.
func (h *fixture) awaitNoFilterBytes(t *testing.T, reg *prometheus.Registry) {
	t.Helper()
	for harness.Gather(t, reg).Value(t, "kvcast_budget_used", "resource", "filter_bytes") != 0 {
		if err := t.Context().Err(); err != nil {
			t.Fatal(err)
		}
	}
}
