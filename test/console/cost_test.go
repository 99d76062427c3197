package console_test

import (
	"context"
	"flag"
	"fmt"
	"io"
	"net/http"
	"regexp"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/kvcast/kvcast/internal/core/testclass"
	"github.com/kvcast/kvcast/internal/wire"
	"github.com/kvcast/kvcast/test/harness"
	"github.com/kvcast/kvcast/test/harness/enginetest"
)

var cost = flag.Duration("cost", 4*time.Second, "measure for this time what open pages cost a server")

var listening = regexp.MustCompile(`msg=listening endpoint=(\S+)`)

// publisher publishes batches of many workers over one connection.
type publisher struct {
	t       *testing.T
	engine  *enginetest.Engine
	encoder wire.Encoder
	workers int
	seq     uint64
	payload []byte
}

// round publishes one batch of each worker: a store of eight blocks.
func (p *publisher) round() {
	p.t.Helper()
	for w := range p.workers {
		var hashes []uint64
		var tokens []uint32
		for n := range uint64(8) {
			hashes = append(hashes, uint64(w)<<40|p.seq<<8|n)
			tokens = append(tokens, uint32(p.seq), uint32(n), uint32(w%10), 1)
		}
		payload := p.encoder.AppendBatch(p.payload[:0], &wire.Batch{
			Time: float64(time.Now().UnixNano()) / 1e9, HasTime: true,
			Events: []wire.Event{{Kind: wire.KindStored, BlockHashes: hashes, Tokens: tokens, BlockSize: 4}},
		})
		p.payload = payload
		p.engine.Publish(fmt.Appendf(nil, "kv@worker-%d@m", w), p.seq, payload)
	}
	p.seq++
}

// TestCostOfPages prints the CPU time of a server whose workers publish a batch a second: without pages, with ten that show the
// fleet, and with ten that show a worker.
func TestCostOfPages(t *testing.T) {
	testclass.Exhaustive(t)
	const pages = 10
	for _, workers := range []int{10, 100, 1000} {
		t.Run(fmt.Sprint(workers), func(t *testing.T) {
			p, url := serve(t, "--bind", "tcp://127.0.0.1:*,replay_port=0")
			endpoint, err := p.Logged(listening)
			if err != nil {
				t.Fatal(err)
			}
			engine := enginetest.New(enginetest.Config{HighWaterMark: -1})
			t.Cleanup(engine.Close)
			if err := engine.Connect(endpoint); err != nil {
				t.Fatal(err)
			}
			if _, err := engine.AwaitSubscription(); err != nil {
				t.Fatal(err)
			}
			fleetOf := &publisher{t: t, engine: engine, workers: workers}
			fleetOf.round()
			if err := p.AwaitMetric(t.Context(), fmt.Sprintf(`kvcast_ingest_batches_total{worker="worker-%d"} 1`, workers-1)); err != nil {
				t.Fatal(err)
			}
			// share is the CPU time of the server while the engines publish, as a share of one core.
			share := func() float64 {
				before, err := harness.CPUTime(p.PID())
				if err != nil {
					t.Fatal(err)
				}
				began := time.Now()
				for time.Since(began) < *cost {
					fleetOf.round()
					time.Sleep(time.Second)
				}
				after, err := harness.CPUTime(p.PID())
				if err != nil {
					t.Fatal(err)
				}
				return 100 * float64(after-before) / float64(time.Since(began))
			}
			without := share()
			var bodies []io.Closer
			received := make(chan int64, pages)
			for range pages {
				body := follow(t, url)
				bodies = append(bodies, body)
				go func() {
					n, _ := io.Copy(io.Discard, body)
					received <- n
				}()
			}
			with := share()
			ctx, cancel := context.WithCancel(t.Context())
			var asking sync.WaitGroup
			for range pages { // as the view of a worker does, for one whose entries are not found
				asking.Go(func() {
					for n := 0; ctx.Err() == nil; n++ {
						if n%3 == 0 {
							ask(ctx, url, "ListEntries", `{"worker": "nobody", "limit": 25}`)
						}
						ask(ctx, url, "ListIncidents", `{"worker": "worker-1", "limit": 500}`)
						time.Sleep(time.Second)
					}
				})
			}
			ofWorkers := share()
			cancel()
			asking.Wait()
			total := int64(0)
			for _, b := range bodies {
				_ = b.Close()
				total += <-received
			}
			again := share()
			before := (without + again) / 2
			t.Logf("%d workers, 1 batch/s each: %.2f %% of a core without pages, %.2f %% with %d (%.2f %% more; %d KiB/s each), %.2f %% if they show a worker (%.2f %% more), %.2f %% after them",
				workers, without, with, pages, with-before, total/pages/int64(2*cost.Seconds())/1024, ofWorkers, ofWorkers-before, again)
		})
	}
}

// ask calls a method of InspectionService, unless ctx ends.
func ask(ctx context.Context, url, method, request string) {
	r, err := http.NewRequestWithContext(ctx, http.MethodPost, url+"console/rpc/kvcast.v1.InspectionService/"+method, strings.NewReader(request))
	if err != nil {
		panic(err)
	}
	r.Header.Set("Content-Type", "application/json")
	response, err := http.DefaultClient.Do(r)
	if err != nil {
		return
	}
	_, _ = io.Copy(io.Discard, response.Body)
	_ = response.Body.Close()
}

// follow opens the stream of a page.
func follow(t *testing.T, url string) io.ReadCloser {
	t.Helper()
	r, err := http.NewRequestWithContext(t.Context(), http.MethodPost, url+"console/stream", strings.NewReader("{}"))
	if err != nil {
		t.Fatal(err)
	}
	r.Header.Set("Content-Type", "application/json")
	transport := &http.Transport{}
	t.Cleanup(transport.CloseIdleConnections)
	response, err := transport.RoundTrip(r)
	if err != nil {
		t.Fatal(err)
	}
	return response.Body
}
