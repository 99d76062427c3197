//go:build cgo

package bench_test

import (
	"context"
	"errors"
	"fmt"
	"testing"
	"time"

	"google.golang.org/grpc"

	"github.com/kvcast/kvcast/internal/core/testclass"
)

// herdBlocks is the number of blocks of BenchmarkHerd's engine.
const herdBlocks = 204_800

// BenchmarkHerd measures snapshots for many clients that come at once, each with a connection of its own, as routers do that are
// restarted together. b.N is consecutive herds. Beside the time of a herd, all figures are for one client: the server's CPU
// time, and the time until the last one has its snapshot; and for the process: how much its memory grows over that of a single
// snapshot.
//
// Check: each snapshot has the position and, but for 1 %, the size of the first one, which was decoded.
func BenchmarkHerd(b *testing.B) {
	requireProc(b)
	for _, clients := range []int{50, 500} {
		open := func() (*herd, error) { return openHerd(herdBlocks, clients) }
		benchmarkWith(b, fmt.Sprintf("clients=%d", clients), open, func(b *testing.B, h *herd) {
			single, err := h.residentBytes()
			if err != nil {
				b.Fatal(err)
			}
			peak := single
			b.ResetTimer()
			f, err := h.rig.measure(func() error { return h.run(b.N, &peak) })
			b.StopTimer()
			if err != nil {
				b.Fatal(err)
			}
			n := float64(b.N) * float64(clients)
			b.ReportMetric(f.elapsed.Seconds()/float64(b.N), "s/herd")
			b.ReportMetric(milliseconds(f.cpu)/n, "server-cpu-ms/client")
			b.ReportMetric(float64(peak-single)/(1<<20), "grown-MiB")
		})
	}
}

// herd is a rig with clients that request snapshots at once.
type herd struct {
	*snapshots
	conns []*grpc.ClientConn
}

func openHerd(blocks, clients int) (*herd, error) {
	s, err := openSnapshots(blocks)
	if err != nil {
		return nil, err
	}
	h := &herd{snapshots: s}
	for range clients {
		conn, err := dial(s.server.grpc)
		if err != nil {
			return nil, closeAfter(err, h)
		}
		conn.Connect()
		h.conns = append(h.conns, conn)
	}
	return h, nil
}

func (h *herd) residentBytes() (int64, error) { return h.server.residentBytes() }

// run lets all clients request snapshots n times, and raises peak to the server's memory.
func (h *herd) run(n int, peak *int64) error {
	for range n {
		ended := make(chan error)
		for _, conn := range h.conns {
			go func() {
				r, err := readSnapshot(context.Background(), conn, nil)
				if err == nil && (r.end != h.first.end || r.bytes < h.first.bytes-h.first.bytes/100) {
					err = fmt.Errorf("check snapshot: got %+v, want %+v", r, h.first)
				}
				ended <- err
			}()
		}
		sample := time.NewTicker(20 * time.Millisecond)
		var errs []error
		for left := len(h.conns); left > 0; {
			select {
			case err := <-ended:
				errs = append(errs, err)
				left--
			case <-sample.C:
				resident, err := h.residentBytes()
				errs = append(errs, err)
				*peak = max(*peak, resident)
			}
		}
		sample.Stop()
		if err := errors.Join(errs...); err != nil {
			return err
		}
	}
	return nil
}

// Close closes all parts.
func (h *herd) Close() error {
	errs := make([]error, 0, len(h.conns)+1)
	for _, conn := range h.conns {
		errs = append(errs, conn.Close())
	}
	return errors.Join(append(errs, h.snapshots.Close())...)
}

// TestHerdGetsSnapshots runs with few blocks.
func TestHerdGetsSnapshots(t *testing.T) {
	testclass.Process(t)
	requireProc(t)
	h, err := openHerd(16_000, 50)
	if err != nil {
		t.Fatal(err)
	}
	defer func() {
		if err := h.Close(); err != nil {
			t.Error(err)
		}
	}()
	var peak int64
	if err := h.run(2, &peak); err != nil {
		t.Fatal(err)
	}
}
