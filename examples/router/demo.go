package main

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"os/exec"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"

	"github.com/kvcast/kvcast/client"
	"github.com/kvcast/kvcast/internal/simulator/blockpool"
	"github.com/kvcast/kvcast/internal/simulator/workload"
	kvcastv1 "github.com/kvcast/kvcast/proto/kvcast/v1"
)

const (
	demoModel     = "demo"
	demoEngines   = 4
	demoBlockSize = 16
	// demoBlocks is the number of blocks in an engine's cache: two million tokens.
	demoBlocks = 131_072
	// demoTimeout bounds a request, including the wait for its events.
	demoTimeout = 20 * time.Second
)

// demoRun is a run of the demo: a policy, and how many requests are at the engines at a time.
type demoRun struct {
	policy   policy
	together int
}

var (
	demoRuns = []demoRun{{policyRoundRobin, 1}, {policyPrefix, 1}, {policyMatch, 1}}
	// demoBursts are the runs with requests that come together and share a prompt.
	demoBursts = []demoRun{{policyRoundRobin, burst}, {policyMatch, burst}, {policyRouted, burst}}
)

// burst is the number of requests that come together, with the same prompt and a question of their own each: agents that begin with the same
// context, or several answers of which one is chosen.
const burst = 8

// bursts returns burst requests for each of some requests, with one more block of tokens each.
func bursts(requests []workload.TraceRequest) []workload.TraceRequest {
	const firstQuestion = 1 << 62 // ids of a trace count from 0
	var out []workload.TraceRequest
	for _, r := range requests {
		whole := r.Input / workload.TraceBlock
		for range burst {
			asked := r
			asked.IDs = append(slices.Clone(r.IDs[:whole]), firstQuestion+uint64(len(out)))
			asked.Input = len(asked.IDs) * workload.TraceBlock
			out = append(out, asked)
		}
	}
	return out
}

// runDemo sends the conversation trace through the router to simulated engines, several times, and prints the share of
// prompt tokens that were cached.
//
// Requests are routed one after the other, and computed in that order, one or some together: engines compute none of those that are together before the last of
// them was routed. Then the demo waits until the router's view equals the engines' caches, so that the result is reproducible. Real requests overlap in
// other ways, and the view is about a millisecond behind.
func runDemo(ctx context.Context, out io.Writer, kvcast string, requests int) error {
	trace, err := workload.ConversationTrace()
	if err != nil {
		return err
	}
	trace.Requests = trace.Requests[:min(requests, len(trace.Requests))]
	few := &workload.Trace{Requests: bursts(trace.Requests[:(len(trace.Requests)+burst-1)/burst])}
	for _, part := range []struct {
		title string
		trace *workload.Trace
		runs  []demoRun
	}{
		{fmt.Sprintf("the first %d requests of the conversation trace, one after the other, %d engines with %d tokens of cache each",
			len(trace.Requests), demoEngines, demoBlocks*demoBlockSize), trace, demoRuns},
		{fmt.Sprintf("the first %d of them, %d times each with different ends, %d at a time", len(few.Requests)/burst, burst, burst), few, demoBursts},
	} {
		_, _ = fmt.Fprintln(out, part.title)
		for _, r := range part.runs {
			began := time.Now()
			stats, predictions, err := measure(ctx, kvcast, r, part.trace)
			if err != nil {
				return fmt.Errorf("policy %s: %w", r.policy, err)
			}
			var all blockpool.Stats
			var shares []string
			for _, s := range stats {
				all.PromptTokens += s.PromptTokens
				all.HitTokens += s.HitTokens
				shares = append(shares, strconv.FormatUint(s.PromptTokens-s.HitTokens, 10))
			}
			_, _ = fmt.Fprintf(out, "%-12s hit rate %4.1f %%: %d of %d prompt tokens; computed by each engine: %s; predictions: %d exact, %d too long, %d too short (%.1f s)\n",
				r.policy, 100*float64(all.HitTokens)/float64(all.PromptTokens), all.HitTokens, all.PromptTokens,
				strings.Join(shares, ", "), predictions.GetExact(), predictions.GetOver(), predictions.GetUnder(), time.Since(began).Seconds())
		}
	}
	return nil
}

// measure starts engines, a kvcast server that reads them and a router, and sends the trace through the router. It
// returns the statistics of each engine's cache, and how right predictions were, by what the router has reported to the server.
func measure(ctx context.Context, kvcast string, r demoRun, trace *workload.Trace) (stats []blockpool.Stats, predictions *kvcastv1.Accuracy, err error) {
	outer := ctx
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	var engines []*backend
	defer func() {
		for _, b := range engines {
			err = errors.Join(err, b.close())
		}
	}()
	held := make(chan chan struct{})
	for i := range demoEngines {
		b, err := newBackend(ctx, fmt.Sprintf("engine-%d", i), held)
		if err != nil {
			return nil, nil, err
		}
		engines = append(engines, b)
	}
	addr, stop, err := startKvcast(outer, kvcast, engines)
	if err != nil {
		return nil, nil, err
	}
	defer stop()
	l, err := new(net.ListenConfig).Listen(ctx, "tcp", "127.0.0.1:0")
	if err != nil {
		return nil, nil, err
	}
	view, routed := client.NewView(), make(chan error, 1)
	routing, end := context.WithCancel(ctx)
	go func() {
		err := serve(routing, l, addr, r.policy, view, slog.New(slog.DiscardHandler))
		cancel(err) // ends calls of await
		routed <- err
	}()
	defer func() {
		end()
		if failed := <-routed; !errors.Is(err, failed) {
			err = errors.Join(err, failed)
		}
		if err == nil { // the router has reported all outcomes
			predictions, err = reported(outer, addr)
		}
	}()
	if err := await(ctx, view, func() bool { return len(view.Workers()) == demoEngines }); err != nil {
		return nil, nil, fmt.Errorf("wait for the engines: %w", err)
	}
	first := 0
	for some := range slices.Chunk(trace.Requests, r.together) {
		if err := completeAll(ctx, "http://"+l.Addr().String(), view, engines, held, some); err != nil {
			return nil, nil, fmt.Errorf("requests from %d on: %w", first, err)
		}
		first += len(some)
	}
	for _, b := range engines {
		stats = append(stats, b.stats())
	}
	return stats, nil, nil
}

// reported returns how right the predictions for all workers were.
func reported(ctx context.Context, addr string) (*kvcastv1.Accuracy, error) {
	conn, err := grpc.NewClient(addr, grpc.WithTransportCredentials(insecure.NewCredentials()))
	if err != nil {
		return nil, err
	}
	list, err := kvcastv1.NewRouterEventServiceClient(conn).ListWorkers(ctx, &kvcastv1.ListWorkersRequest{})
	if err = errors.Join(err, conn.Close()); err != nil {
		return nil, err
	}
	all := new(kvcastv1.Accuracy)
	for _, w := range list.GetWorkers() {
		for _, r := range w.GetRanks() {
			all.Exact += r.GetAccuracy().GetExact()
			all.Over += r.GetAccuracy().GetOver()
			all.Under += r.GetAccuracy().GetUnder()
		}
	}
	return all, nil
}

// completeAll sends requests that are computed after all of them were routed, and waits until the view equals the caches of the engines.
func completeAll(ctx context.Context, router string, view *client.View, engines []*backend, held <-chan chan struct{}, requests []workload.TraceRequest) error {
	ctx, cancel := context.WithTimeout(ctx, demoTimeout)
	defer cancel()
	var release []chan struct{}
	var completed []chan error
	for i := range requests {
		done := make(chan error, 1)
		completed = append(completed, done)
		go func() { done <- complete(ctx, router, requests[i].Prompt()) }()
		select {
		case r := <-held:
			release = append(release, r)
		case err := <-done:
			return fmt.Errorf("no engine was sent a request: %w", err)
		}
	}
	for i, r := range release {
		close(r)
		if err := <-completed[i]; err != nil {
			return err
		}
	}
	for _, b := range engines {
		want := b.digest()
		err := await(ctx, view, func() bool {
			w, _ := view.Worker(b.name)
			return want.Blocks == 0 || len(w.Ranks) > 0 && w.Ranks[0].Blocks[kvcastv1.Tier_TIER_DEVICE] == want
		})
		if err != nil {
			return err
		}
	}
	return nil
}

// complete sends a request.
func complete(ctx context.Context, router string, prompt []uint32) error {
	body, err := json.Marshal(map[string]any{"model": demoModel, "prompt": prompt, "max_tokens": 1})
	if err != nil {
		return err
	}
	req, err := http.NewRequestWithContext(ctx, http.MethodPost, router+"/v1/completions", bytes.NewReader(body))
	if err != nil {
		return err
	}
	res, err := http.DefaultClient.Do(req)
	if err != nil {
		return err
	}
	answer, err := io.ReadAll(res.Body)
	if err = errors.Join(err, res.Body.Close()); err != nil {
		return err
	}
	if res.StatusCode != http.StatusOK {
		return fmt.Errorf("%s: %s", res.Status, answer)
	}
	return nil
}

// await waits until a condition is true, which it checks after each change of a view, or returns the cause of ctx's end.
func await(ctx context.Context, view *client.View, condition func() bool) error {
	for range view.Changes(ctx) {
		if condition() {
			return nil
		}
	}
	return context.Cause(ctx)
}

// startKvcast starts a kvcast server that reads the engines, and returns its address.
func startKvcast(ctx context.Context, program string, engines []*backend) (addr string, stop func(), err error) {
	args := []string{"serve", "--listen", "127.0.0.1:0", "--admin", ""}
	for _, b := range engines {
		args = append(args, "--worker", fmt.Sprintf("name=%s,model=%s,block_size=%d,connect=%s,replay=%s,endpoint=%s",
			b.name, demoModel, demoBlockSize, b.publisher.Endpoint(), b.publisher.ReplayEndpoint(), b.listener.Addr()))
	}
	cmd := exec.CommandContext(ctx, program, args...)
	cmd.Cancel = func() error { return cmd.Process.Signal(syscall.SIGTERM) }
	log, err := cmd.StderrPipe()
	if err == nil {
		err = cmd.Start()
	}
	if err != nil {
		return "", nil, fmt.Errorf("start kvcast: %w", err)
	}
	lines := bufio.NewScanner(log)
	var output strings.Builder
	for lines.Scan() {
		_, _ = fmt.Fprintln(&output, lines.Text())
		if _, rest, ok := strings.Cut(lines.Text(), "msg=serving grpc="); ok {
			addr, _, _ = strings.Cut(rest, " ")
			break
		}
	}
	read := make(chan struct{})
	go func() {
		defer close(read)
		_, _ = io.Copy(io.Discard, log)
	}()
	stop = func() {
		_ = cmd.Process.Signal(syscall.SIGTERM) // an error means that the process has ended
		<-read
		_ = cmd.Wait()
	}
	if addr == "" {
		stop()
		return "", nil, fmt.Errorf("start kvcast: the process ended: %s", &output)
	}
	return addr, stop, nil
}
