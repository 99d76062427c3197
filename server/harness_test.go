package server_test

import (
	"context"
	"crypto/tls"
	"fmt"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"go.uber.org/goleak"
	"google.golang.org/grpc"

	"github.com/kvcast/kvcast/internal/core/kvblock"
	"github.com/kvcast/kvcast/internal/feed"
	"github.com/kvcast/kvcast/internal/journal"
	"github.com/kvcast/kvcast/internal/wire"
	kvcastv1 "github.com/kvcast/kvcast/proto/kvcast/v1"
	"github.com/kvcast/kvcast/server"
	"github.com/kvcast/kvcast/test/checker"
	"github.com/kvcast/kvcast/test/harness"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// fixture is a server with a client. The test appends entries of one worker, w.
type fixture struct {
	*harness.Instance
	t      testing.TB
	conn   *grpc.ClientConn
	client kvcastv1.RouterEventServiceClient
	// registry has the metrics, unless the test's config has another.
	registry *prometheus.Registry

	lane    feed.Lane // lane of worker w
	batches int64
	queries gate // blocks queries
}

// overTCP starts a server on a TCP port.
func overTCP(t testing.TB, cfg server.Config, jcfg journal.Config) *fixture {
	t.Helper()
	return start(t, harness.InstanceConfig{Server: cfg, Journal: jcfg})
}

// startingOverTCP starts a server without calling StartServing.
func startingOverTCP(t testing.TB, cfg server.Config) *fixture {
	t.Helper()
	return start(t, harness.InstanceConfig{Server: cfg, Starting: true})
}

// inMemory starts a server without a network, for tests under synctest.
func inMemory(t testing.TB, cfg server.Config, jcfg journal.Config) *fixture {
	t.Helper()
	return start(t, harness.InstanceConfig{Server: cfg, Journal: jcfg, InMemory: true})
}

// start starts a server, and a client with the options.
func start(t testing.TB, cfg harness.InstanceConfig, opts ...grpc.DialOption) *fixture {
	t.Helper()
	h := &fixture{t: t}
	if !cfg.InMemory && cfg.Server.StallTimeout == 0 {
		cfg.Server.StallTimeout = time.Hour // a client on a busy machine may read nothing for the default
	}
	if !cfg.InMemory && cfg.Server.ProgressInterval == 0 {
		cfg.Server.ProgressInterval = time.Hour // a test on a busy machine may append nothing for the default
	}
	sources := cfg.Server.Sources
	cfg.Server.Sources = func() map[string][]*kvcastv1.SourceStatus {
		h.queries.pass()
		if sources == nil {
			return nil
		}
		return sources()
	}
	cfg.Server.Aliases = func(worker string, rank uint32, hashes []uint64) map[uint64][]string {
		h.queries.pass()
		return h.Pipeline.Aliases(worker, rank, hashes)
	}
	if cfg.Server.Registerer == nil {
		h.registry = prometheus.NewRegistry()
		cfg.Server.Registerer = h.registry
	}
	h.Instance = harness.StartInstance(t, cfg)
	h.conn = h.Dial(t, opts...)
	h.client = kvcastv1.NewRouterEventServiceClient(h.conn)
	return h
}

// secured returns TLS configs for a server at 127.0.0.1 and for its clients.
func secured(t testing.TB) (server, client *tls.Config) {
	t.Helper()
	known := httptest.NewTLSServer(nil) // has a certificate for 127.0.0.1
	defer known.Close()
	return &tls.Config{Certificates: known.TLS.Certificates}, known.Client().Transport.(*http.Transport).TLSClientConfig
}

// as returns a connection that sends the authorization header with each call.
func (h *fixture) as(authorization string) *grpc.ClientConn {
	h.t.Helper()
	return h.Dial(h.t, grpc.WithPerRPCCredentials(header(authorization)))
}

// header is the value of an authorization header, as gRPC credentials.
type header string

func (h header) GetRequestMetadata(context.Context, ...string) (map[string]string, error) {
	return map[string]string{"authorization": string(h)}, nil
}

func (header) RequireTransportSecurity() bool { return false }

// append appends an entry in which worker w stores blocks.
func (h *fixture) append(hashes ...uint64) {
	h.batch(h.lane, wire.Event{Kind: wire.KindStored, Tier: kvblock.TierDevice, BlockHashes: hashes, BlockSize: 16})
}

// batch passes a batch to a lane.
func (h *fixture) batch(l feed.Lane, events ...wire.Event) {
	h.batches++
	l.Batch(&feed.Batch{EngineTime: h.batches, IngestTime: h.batches, Events: events})
}

// addWorker adds worker w, which appends the first entry.
func (h *fixture) addWorker() {
	h.lane = h.Pipeline.AddWorker(feed.Worker{Name: "w", Model: "m"})
}

// fill appends entries that store one block each.
func (h *fixture) fill(entries int) {
	h.t.Helper()
	for n := range entries {
		h.append(uint64(n))
	}
}

// store appends entries that store blocks, 500 each.
func (h *fixture) store(blocks int) {
	h.t.Helper()
	hashes := make([]uint64, 500)
	for n := 0; n < blocks; n += len(hashes) {
		for i := range hashes {
			hashes[i] = uint64(n + i)
		}
		h.append(hashes...)
	}
}

// flood appends 64 MiB of entries, more than a transport buffers for a client that does not read.
func (h *fixture) flood() {
	h.t.Helper()
	h.load(1024)
}

// load appends entries of 64 KiB each, which store the same block.
func (h *fixture) load(entries int) {
	h.t.Helper()
	for range entries {
		h.largeEntry(0)
	}
}

// storeLargeBlocks stores blocks whose snapshot has 26 MB, more than a transport buffers for a client that does not
// read.
func (h *fixture) storeLargeBlocks() {
	h.t.Helper()
	for n := range 400 {
		h.largeEntry(uint64(n))
	}
}

// largeEntry appends an entry of 64 KiB that stores one block with a long LoRA name, which is faster than many
// blocks.
func (h *fixture) largeEntry(hash uint64) {
	h.batch(h.lane, wire.Event{
		Kind: wire.KindStored, Tier: kvblock.TierDevice, BlockHashes: []uint64{hash}, TokensHashes: []uint64{hash}, BlockSize: 16,
		LoRAName: largeName,
	})
}

var largeName = strings.Repeat("x", 64<<10)

// withSmallWindow returns a client whose connection buffers 64 KiB of unread data. Other clients adapt their window.
func (h *fixture) withSmallWindow() *fixture {
	conn := h.Dial(h.t, grpc.WithStaticStreamWindowSize(64<<10), grpc.WithStaticConnWindowSize(64<<10))
	return &fixture{Instance: h.Instance, t: h.t, conn: conn, client: kvcastv1.NewRouterEventServiceClient(conn)}
}

// subscription is a stream whose messages are checked.
type subscription struct {
	stream  kvcastv1.RouterEventService_SubscribeClient
	checker *checker.Checker
	cancel  context.CancelFunc
}

func (h *fixture) subscribe(c *checker.Checker, req *kvcastv1.SubscribeRequest) *subscription {
	h.t.Helper()
	ctx, cancel := context.WithCancel(context.Background())
	h.t.Cleanup(cancel)
	stream, err := h.client.Subscribe(ctx, req)
	if err != nil {
		h.t.Fatal(err)
	}
	if err := c.Begin(req); err != nil {
		h.t.Fatal(err)
	}
	return &subscription{stream: stream, checker: c, cancel: cancel}
}

// next receives and checks a message. The error comes from the stream or from the checker.
func (s *subscription) next() (*kvcastv1.SubscribeResponse, error) {
	m, err := s.stream.Recv()
	if err != nil {
		return nil, fmt.Errorf("receive: %w", err)
	}
	if err := s.checker.Receive(m); err != nil {
		return nil, fmt.Errorf("check: %w", err)
	}
	return m, nil
}

// until receives messages up to a position.
func (s *subscription) until(t testing.TB, seq uint64) {
	t.Helper()
	for s.checker.Position().GetSeq() < seq {
		if _, err := s.next(); err != nil {
			t.Fatalf("at %v: %v", s.checker.Position(), err)
		}
	}
}

// untilMessage receives messages until is returns true.
func (s *subscription) untilMessage(t testing.TB, is func(*kvcastv1.SubscribeResponse) bool) {
	t.Helper()
	for {
		m, err := s.next()
		if err != nil {
			t.Fatalf("at %v: %v", s.checker.Position(), err)
		}
		if is(m) {
			return
		}
	}
}

func isSnapshotBegin(m *kvcastv1.SubscribeResponse) bool { return m.GetSnapshotBegin() != nil }
func isSnapshotEnd(m *kvcastv1.SubscribeResponse) bool   { return m.GetSnapshotEnd() != nil }

// end receives messages until the stream ends, and returns the error.
func (s *subscription) end() error {
	for {
		if _, err := s.next(); err != nil {
			return err
		}
	}
}

// subscribers returns the number of Subscribe streams.
func (h *fixture) subscribers(t testing.TB) uint64 {
	t.Helper()
	s, err := h.client.GetStatus(t.Context(), &kvcastv1.GetStatusRequest{})
	if err != nil {
		t.Fatal(err)
	}
	return s.GetSubscribers()
}

func earliest() *kvcastv1.SubscribeRequest {
	return &kvcastv1.SubscribeRequest{Start: &kvcastv1.SubscribeRequest_Earliest{Earliest: &kvcastv1.FromEarliest{}}}
}

func latest() *kvcastv1.SubscribeRequest {
	return &kvcastv1.SubscribeRequest{Start: &kvcastv1.SubscribeRequest_Latest{Latest: &kvcastv1.FromLatest{}}}
}

// orFail adds GAP_POLICY_FAIL to a request.
func orFail(req *kvcastv1.SubscribeRequest) *kvcastv1.SubscribeRequest {
	req.GapPolicy = kvcastv1.GapPolicy_GAP_POLICY_FAIL
	return req
}

func after(p *kvcastv1.Position) *kvcastv1.SubscribeRequest {
	return &kvcastv1.SubscribeRequest{Start: &kvcastv1.SubscribeRequest_After{After: p}}
}
