//go:build cgo

package bench_test

import (
	"context"
	"errors"
	"fmt"
	"io"
	"slices"
	"testing"
	"time"

	"google.golang.org/grpc"
	healthpb "google.golang.org/grpc/health/grpc_health_v1"

	"github.com/kvcast/kvcast/internal/core/kvblock"
	"github.com/kvcast/kvcast/internal/core/testclass"
	"github.com/kvcast/kvcast/internal/wire"
	kvcastv1 "github.com/kvcast/kvcast/proto/kvcast/v1"
)

const (
	matchWorkers = 64
	// matchPrompts is the number of prompts that the engine stores.
	matchPrompts = 256
	// matchBlocks is the number of blocks of the prompts that are looked up. The engine has chainBlocks of each.
	matchBlocks = 32
	// matchInFlight is the number of requests in flight on a MatchPrefixes stream, if the load does not say another.
	matchInFlight = 8
	// matchRate is the rate in MatchPrefix calls per second, and applyRate the rate in batches per second meanwhile.
	matchRate, applyRate = 500, 5_000
)

// matchLoad is the form of the requests.
type matchLoad struct {
	name    string
	prompts int    // of each request
	limit   uint32 // matches of each prompt; 0: all
	tokens  bool   // whether prompts are token ids, instead of tokens hashes
	alone   bool   // whether one request is in flight
}

// matchLoads are the requests of BenchmarkMatchPrefixes.
var matchLoads = []matchLoad{
	{name: "1PromptBest8OneInFlight", prompts: 1, limit: 8, alone: true},
	{name: "1PromptBest8", prompts: 1, limit: 8},
	{name: "16PromptsBest8", prompts: 16, limit: 8},
	{name: "64PromptsBest8", prompts: 64, limit: 8},
	{name: "64PromptsAll", prompts: 64},
	{name: "64PromptsOfTokensBest8", prompts: 64, limit: 8, tokens: true},
}

// BenchmarkMatchPrefixes measures the MatchPrefixes call: prompts of 32 blocks, of which each of 64 workers has all, over
// one stream with 8 requests in flight, or one. b.N is requests. The names say how many prompts a request has, how many matches
// the answer has, and whether prompts are token ids, which the server hashes.
//
// prompts/s/core is prompts per second of the server's CPU time, and server-cpu-ns/prompt its inverse. prompts/s is the
// wall-clock rate of the whole machine, with a client that decodes the answers. The server is confined to one core: with several, Go's scheduler looks for
// work on the others at each message, which costs several times as much CPU time and is no work.
//
// Check: each answer has the workers and the length of the prefix.
func BenchmarkMatchPrefixes(b *testing.B) {
	requireOneCore(b)
	for _, l := range matchLoads {
		benchmarkWith(b, l.name, func() (*matching, error) { return openMatching(oneCore) }, func(b *testing.B, m *matching) {
			b.ResetTimer()
			cpu, err := m.matchAll(b.N, l)
			b.StopTimer()
			if err != nil {
				b.Fatal(err)
			}
			prompts := float64(b.N * l.prompts)
			b.ReportMetric(prompts/cpu.Seconds(), "prompts/s/core")
			b.ReportMetric(float64(cpu.Nanoseconds())/prompts, "server-cpu-ns/prompt")
			b.ReportMetric(prompts/b.Elapsed().Seconds(), "prompts/s")
		})
	}
}

// BenchmarkMatchPrefixCost measures the MatchPrefix call, one after the other, with one prompt and 8 matches: prompts/s/core and
// server-cpu-ns/prompt as in BenchmarkMatchPrefixes. b.N is calls.
func BenchmarkMatchPrefixCost(b *testing.B) {
	requireOneCore(b)
	m, err := openMatching(oneCore)
	if err != nil {
		b.Fatal(err)
	}
	defer func() {
		if err := m.Close(); err != nil {
			b.Error(err)
		}
	}()
	began, err := m.server.cpu()
	if err != nil {
		b.Fatal(err)
	}
	calls := 0
	l := matchLoad{prompts: 1, limit: 8}
	for b.Loop() {
		if err := m.callOnce(calls, l); err != nil {
			b.Fatal(err)
		}
		calls++
	}
	ended, err := m.server.cpu()
	if err != nil {
		b.Fatal(err)
	}
	b.ReportMetric(float64(calls)/(ended-began).Seconds(), "prompts/s/core")
	b.ReportMetric(float64((ended-began).Nanoseconds())/float64(calls), "server-cpu-ns/prompt")
}

// callOnce calls MatchPrefix with the prompts from an index on, and checks the answer.
func (m *matching) callOnce(first int, l matchLoad) error {
	r, err := kvcastv1.NewRouterEventServiceClient(m.conn).MatchPrefix(context.Background(), m.request(first, l))
	if err != nil {
		return err
	}
	return l.check(r)
}

// BenchmarkMatchPrefix measures the latency of MatchPrefix: 500 calls per second, each with one prompt of 32 blocks that
// 64 workers have, and 8 matches, while another worker's engine publishes 5,000 B2 batches per second. b.N is calls. A p99
// requires more than a second: -benchtime 20s. The floor is a health check after each call, which shows the cost of the
// machine and of gRPC.
//
// Check: as in BenchmarkMatchPrefixes, and the other engine's batches were all ingested.
func BenchmarkMatchPrefix(b *testing.B) {
	requireProc(b)
	benchmarkWith(b, "While5000Batches", func() (*matching, error) { return openMatching(nil) }, func(b *testing.B, m *matching) {
		b.ResetTimer()
		latencies, floor, err := m.callWhileApplying(b.N)
		b.StopTimer()
		if err != nil {
			b.Fatal(err)
		}
		for prefix, d := range map[string][]time.Duration{"": latencies, "floor-": floor} {
			b.ReportMetric(microseconds(quantile(d, 0.5)), prefix+"p50-us")
			b.ReportMetric(microseconds(quantile(d, 0.99)), prefix+"p99-us")
			b.ReportMetric(microseconds(quantile(d, 1)), prefix+"max-us")
		}
	})
}

// matching is a rig of 64 workers with the same blocks, one more worker, and a subscriber.
type matching struct {
	*rig
	other     *publisher // engine of the other worker
	otherLoad *load
	conn      *grpc.ClientConn
	// hashes and tokens describe the first matchBlocks blocks of prompts that the engine has stored: the tokens hashes
	// and the token ids.
	hashes [][]uint64
	tokens [][]uint32
}

// openMatching starts the server through a wrapper command.
func openMatching(wrapper []string) (_ *matching, err error) {
	other, err := newPublisher()
	if err != nil {
		return nil, err
	}
	m := &matching{other: other, otherLoad: newLoad(shapeB2)}
	defer func() {
		if err != nil {
			err = closeAfter(err, m)
		}
	}()
	if err = m.readPrompts(); err != nil {
		return nil, err
	}
	m.rig, err = newRigOfWorkers(matchWorkers, wrapper, shapeB1, 1,
		"--worker", fmt.Sprintf("name=other,model=%s,connect=%s", modelName, other.endpoint))
	if err != nil {
		return nil, err
	}
	m.others = 1 // WorkerAdded
	if err = other.subscribed(); err != nil {
		return nil, err
	}
	if err = m.deliver(matchPrompts * chainBlocks / m.load.shape.blocks); err != nil {
		return nil, err
	}
	m.conn, err = dial(m.grpc)
	return m, err
}

// readPrompts decodes the batches that the engine will publish.
func (m *matching) readPrompts() error {
	var d wire.Decoder
	l := newLoad(shapeB1)
	for range matchPrompts {
		var tokens []uint32
		for range chainBlocks / l.shape.blocks {
			b, err := d.Decode(l.next(time.Now()))
			if err != nil {
				return fmt.Errorf("read prompts: %w", err)
			}
			tokens = append(tokens, b.Events[0].Tokens...)
		}
		tokens = tokens[:matchBlocks*blockSize]
		m.tokens = append(m.tokens, tokens)
		m.hashes = append(m.hashes, kvblock.AppendTokensHashes(nil, tokens, blockSize, kvblock.Seed("", ""), false, nil))
	}
	return nil
}

// request returns a request for a number of prompts, from the one with an index on.
func (m *matching) request(first int, l matchLoad) *kvcastv1.MatchPrefixRequest {
	req := &kvcastv1.MatchPrefixRequest{Model: modelName, Limit: l.limit}
	for i := range l.prompts {
		prompt, k := &kvcastv1.Prompt{}, (first+i)%matchPrompts
		if l.tokens {
			prompt.TokenIds = m.tokens[k]
		} else {
			prompt.TokensHashes = m.hashes[k]
		}
		req.Prompts = append(req.Prompts, prompt)
	}
	return req
}

// check returns an error unless a response has the answers to a request.
func (l matchLoad) check(r *kvcastv1.MatchPrefixResponse) error {
	want := matchWorkers
	if l.limit > 0 {
		want = int(l.limit)
	}
	for _, p := range r.GetPrompts() {
		if len(p.GetMatches()) != want {
			return fmt.Errorf("check match: %d workers, want %d", len(p.GetMatches()), want)
		}
		for _, w := range p.GetMatches() {
			if w.GetBlocks() != matchBlocks {
				return fmt.Errorf("check match: %d blocks, want %d", w.GetBlocks(), matchBlocks)
			}
		}
	}
	if len(r.GetPrompts()) != l.prompts {
		return fmt.Errorf("check match: %d prompts, want %d", len(r.GetPrompts()), l.prompts)
	}
	return nil
}

// matchAll sends n requests over a stream, and returns the server's CPU time.
func (m *matching) matchAll(n int, l matchLoad) (time.Duration, error) {
	began, err := m.server.cpu()
	if err != nil {
		return 0, err
	}
	err = l.exchange(m.conn, n, m.requests(l))
	ended, cpuErr := m.server.cpu()
	return ended - began, errors.Join(err, cpuErr)
}

// requests returns requests of all prompts, with their indices as ids.
func (m *matching) requests(l matchLoad) []*kvcastv1.MatchPrefixesRequest {
	all := make([]*kvcastv1.MatchPrefixesRequest, matchPrompts/l.prompts)
	for i := range all {
		all[i] = &kvcastv1.MatchPrefixesRequest{Id: uint64(i), Request: m.request(i*l.prompts, l)}
	}
	return all
}

// exchange sends n requests over a stream, and checks the answers.
func (l matchLoad) exchange(conn *grpc.ClientConn, n int, requests []*kvcastv1.MatchPrefixesRequest) error {
	ctx, cancel := context.WithCancel(context.Background())
	defer cancel()
	stream, err := kvcastv1.NewRouterEventServiceClient(conn).MatchPrefixes(ctx)
	if err != nil {
		return fmt.Errorf("match prompts: %w", err)
	}
	most := matchInFlight
	if l.alone {
		most = 1
	}
	inFlight := make(chan struct{}, most)
	sent := make(chan error, 1)
	go func() {
		for i := range n {
			select {
			case inFlight <- struct{}{}:
			case <-ctx.Done():
				sent <- ctx.Err()
				return
			}
			if err := stream.Send(requests[i%len(requests)]); err != nil {
				sent <- err
				return
			}
		}
		sent <- stream.CloseSend()
	}()
	for i := range n {
		var r *kvcastv1.MatchPrefixesResponse
		if r, err = stream.Recv(); err == nil && r.GetId() != uint64(i%len(requests)) {
			err = fmt.Errorf("check match: the id is %d, want %d", r.GetId(), i%len(requests))
		}
		if err == nil {
			err = l.check(r.GetResponse())
		}
		if err != nil {
			cancel()
			break
		}
		<-inFlight
	}
	if err = errors.Join(err, <-sent); err != nil {
		return fmt.Errorf("match prompts: %w", err)
	}
	return nil
}

// callWhileApplying calls MatchPrefix n times at matchRate while the other engine publishes at applyRate. It returns the
// latencies, and those of health checks, sorted.
func (m *matching) callWhileApplying(n int) (latencies, floor []time.Duration, err error) {
	l := matchLoad{prompts: 1, limit: 8}
	health := healthpb.NewHealthClient(m.conn)
	published := make(chan error, 1)
	batches := n * applyRate / matchRate
	go func() {
		published <- paced(batches, applyRate, func() error { return m.other.send(m.otherLoad.next(time.Now())) })
	}()
	err = paced(n, matchRate, func() error {
		start := time.Now()
		err := m.callOnce(len(latencies), l)
		latencies = append(latencies, time.Since(start))
		if err != nil {
			return err
		}
		start = time.Now()
		_, err = health.Check(context.Background(), &healthpb.HealthCheckRequest{})
		floor = append(floor, time.Since(start))
		return err
	})
	err = errors.Join(err, <-published)
	m.others += uint64(batches)
	if err == nil {
		err = m.arrive()
	}
	slices.Sort(latencies)
	slices.Sort(floor)
	return latencies, floor, err
}

// Close closes all parts.
func (m *matching) Close() error {
	var closers []io.Closer
	if m.conn != nil {
		closers = append(closers, m.conn)
	}
	if m.rig != nil {
		closers = append(closers, m.rig)
	}
	return closeAll(append(closers, m.other)...)
}

// TestMatchesAreAnswered runs the requests of the benchmarks once.
func TestMatchesAreAnswered(t *testing.T) {
	testclass.Process(t)
	requireProc(t)
	m, err := openMatching(nil)
	if err != nil {
		t.Fatal(err)
	}
	for _, l := range matchLoads {
		if _, err := m.matchAll(2*matchInFlight, l); err != nil {
			t.Errorf("%s: %v", l.name, err)
		}
	}
	if latencies, floor, err := m.callWhileApplying(20); err != nil || len(latencies) != 20 || len(floor) != 20 {
		t.Errorf("%d and %d latencies: %v", len(latencies), len(floor), err)
	}
	if err := m.Close(); err != nil {
		t.Error(err)
	}
}
