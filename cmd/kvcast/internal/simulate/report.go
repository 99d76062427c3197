package simulate

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"strings"
	"time"

	"github.com/kvcast/kvcast/cmd/kvcast/internal/cli"
	"github.com/kvcast/kvcast/cmd/kvcast/internal/output"
	"github.com/kvcast/kvcast/internal/simulator"
)

// started is the JSON line of an engine that was started.
type started struct {
	Engine   string `json:"engine"`
	Endpoint string `json:"endpoint"`
	Replay   string `json:"replay,omitempty"`
}

// finished is the JSON line of an engine that has published all its batches, or the total of all engines.
type finished struct {
	Engine  string `json:"engine"`
	Engines int    `json:"engines,omitempty"` // only in the total
	simulator.Summary
	HitRate float64 `json:"hit_rate"`
}

// report writes the start and the result of engines to standard output.
type report struct {
	out    io.Writer
	isJSON bool
}

func (r report) started(name string, e *simulator.Engine) error {
	if r.isJSON {
		return json.NewEncoder(r.out).Encode(started{Engine: name, Endpoint: e.Endpoint(), Replay: e.ReplayEndpoint()})
	}
	replay := "no replay"
	if e.ReplayEndpoint() != "" {
		replay = "replay at " + e.ReplayEndpoint()
	}
	_, err := fmt.Fprintf(r.out, "%s publishes at %s, %s\n", name, e.Endpoint(), replay)
	return err
}

// finished writes the result of an engine, or the total of several engines.
func (r report) finished(name string, engines int, sum simulator.Summary) error {
	if r.isJSON {
		return json.NewEncoder(r.out).Encode(finished{Engine: name, Engines: engines, Summary: sum, HitRate: sum.HitRate()})
	}
	cache := fmt.Sprintf("it holds %d blocks with digest %016x", sum.Blocks, sum.Digest)
	if engines > 0 {
		name, cache = fmt.Sprintf("all %d engines", engines), fmt.Sprintf("they hold %d blocks", sum.Blocks)
	}
	_, err := fmt.Fprintf(r.out, "%s published %d batches with %d events: %d blocks stored, %d removed; %s; %s%s\n",
		name, sum.Batches, sum.Events, sum.Stored, sum.Removed, cache, requestsText(sum), faultsText(sum))
	return err
}

func total(engines []*simulator.Engine) (sum simulator.Summary) {
	for _, e := range engines {
		sum.Add(e.Summary())
	}
	return sum
}

func requestsText(sum simulator.Summary) string {
	text := fmt.Sprintf("%d requests, hit rate %.1f%% (%d of %d prompt tokens)",
		sum.Requests, 100*sum.HitRate(), sum.HitTokens, sum.PromptTokens)
	if sum.Rejected > 0 {
		text += fmt.Sprintf(", %d rejected as longer than the cache", sum.Rejected)
	}
	if sum.CutShort > 0 {
		text += fmt.Sprintf(", %d cut short", sum.CutShort)
	}
	return text
}

func faultsText(sum simulator.Summary) string {
	var all []string
	for _, f := range simulator.AllFaults() {
		if n := sum.Faults[f]; n > 0 {
			all = append(all, fmt.Sprintf("%s %d", f, n))
		}
	}
	if all == nil {
		return ""
	}
	return "; faults: " + strings.Join(all, ", ")
}

// progress reports the progress of engines.
type progress struct {
	out      io.Writer
	engines  []*simulator.Engine
	requests int    // number of requests in the traces; 0 without a trace
	batches  uint64 // total number of batches to publish; 0 means no limit
}

// barInterval is the interval at which a bar is updated.
const barInterval = 200 * time.Millisecond

// report reports until ctx is done. It draws a bar on a terminal if the total is known, and otherwise writes a line per interval.
func (p progress) report(ctx context.Context, interval time.Duration) {
	if interval == 0 {
		return
	}
	var bar *output.ProgressBar
	if _, end := p.done(simulator.Summary{}); end > 0 && cli.IsTerminal(p.out) {
		bar, interval = output.NewProgressBar(p.out, end), barInterval
		defer bar.Remove()
	}
	ticker := time.NewTicker(interval)
	defer ticker.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-ticker.C:
		}
		sum := total(p.engines)
		if bar == nil {
			_, _ = fmt.Fprintln(p.out, p.line(sum))
			continue
		}
		done, _ := p.done(sum)
		bar.Update(done, fmt.Sprintf("%s batches, %s blocks held, hit rate %.1f%%", output.Grouped(sum.Batches), output.Grouped(uint64(sum.Blocks)), 100*sum.HitRate()))
	}
}

// done returns the numbers of finished requests and of all requests of the traces; without traces, of batches. The end
// is 0 if it is unknown.
func (p progress) done(sum simulator.Summary) (done, end uint64) {
	if p.requests > 0 {
		return sum.Requests + sum.Rejected, uint64(p.requests)
	}
	return sum.Batches, p.batches
}

func (p progress) line(sum simulator.Summary) string {
	part := ""
	if p.requests > 0 {
		part = fmt.Sprintf("%d%% of the trace, ", (sum.Requests+sum.Rejected)*100/uint64(p.requests))
	}
	return fmt.Sprintf("kvcast: %s%d batches, %d events, %d blocks held, %s%s",
		part, sum.Batches, sum.Events, sum.Blocks, requestsText(sum), faultsText(sum))
}
