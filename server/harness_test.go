package server_test

import (
	"context"
	"crypto/tls"
	"fmt"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"

	"go.uber.org/goleak"
	"google.golang.org/grpc"

	"github.com/kvcast/kvcast/feed"
	"github.com/kvcast/kvcast/ingest/wire"
	"github.com/kvcast/kvcast/journal"
	"github.com/kvcast/kvcast/pipeline"
	kvcastv1 "github.com/kvcast/kvcast/proto/kvcast/v1"
	"github.com/kvcast/kvcast/server"
	"github.com/kvcast/kvcast/test/checker"
	"github.com/kvcast/kvcast/test/harness"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// fixture is an instance with a client, and a worker whose entries the test writes.
type fixture struct {
	*harness.Instance
	t      testing.TB
	conn   *grpc.ClientConn
	client kvcastv1.RouterEventServiceClient

	lane    feed.Lane // of the worker
	batches int64
	lent    lent // of the cuts of its state
	queries gate // of its state
}

// overTCP starts a server on a TCP port of its own.
func overTCP(t testing.TB, cfg server.Config, jcfg journal.Config) *fixture {
	t.Helper()
	return start(t, harness.InstanceConfig{Server: cfg, Journal: jcfg})
}

// startingOverTCP starts a server that stays in its starting state.
func startingOverTCP(t testing.TB, cfg server.Config) *fixture {
	t.Helper()
	return start(t, harness.InstanceConfig{Server: cfg, Starting: true})
}

// inMemory starts a server without a network, for tests under synctest.
func inMemory(t testing.TB, cfg server.Config, jcfg journal.Config) *fixture {
	t.Helper()
	return start(t, harness.InstanceConfig{Server: cfg, Journal: jcfg, InMemory: true})
}

// start starts a server, and a client with the given options.
func start(t testing.TB, cfg harness.InstanceConfig, opts ...grpc.DialOption) *fixture {
	t.Helper()
	h := &fixture{t: t}
	cfg.WrapState = func(p *pipeline.Pipeline) server.State { return countedState{p, &h.lent, &h.queries} }
	h.Instance = harness.StartInstance(t, cfg)
	h.conn = h.Dial(t, opts...)
	h.client = kvcastv1.NewRouterEventServiceClient(h.conn)
	return h
}

// secured returns TLS configs for a server at 127.0.0.1 and for its clients.
func secured(t testing.TB) (server, client *tls.Config) {
	t.Helper()
	known := httptest.NewTLSServer(nil) // for its certificate
	defer known.Close()
	return &tls.Config{Certificates: known.TLS.Certificates}, known.Client().Transport.(*http.Transport).TLSClientConfig
}

// as returns a connection whose calls have an authorization header.
func (h *fixture) as(authorization string) *grpc.ClientConn {
	h.t.Helper()
	return h.Dial(h.t, grpc.WithPerRPCCredentials(header(authorization)))
}

// header is credentials with the value of the authorization header.
type header string

func (h header) GetRequestMetadata(context.Context, ...string) (map[string]string, error) {
	return map[string]string{"authorization": string(h)}, nil
}

func (header) RequireTransportSecurity() bool { return false }

// append adds an entry that stores blocks of the worker.
func (h *fixture) append(hashes ...uint64) {
	h.batch(h.lane, wire.Event{Kind: wire.KindStored, Tier: wire.TierDevice, BlockHashes: hashes, BlockSize: 16})
}

// batch passes a batch to a lane.
func (h *fixture) batch(l feed.Lane, events ...wire.Event) {
	h.batches++
	l.Batch(&feed.Batch{EngineTime: h.batches, IngestTime: h.batches, Events: events})
}

// addWorker adds the worker, which is the first entry.
func (h *fixture) addWorker() {
	h.lane = h.Pipeline.AddWorker(feed.Worker{Name: "w", Model: "m"})
}

// fill adds entries of one block each.
func (h *fixture) fill(entries int) {
	h.t.Helper()
	for n := range entries {
		h.append(uint64(n))
	}
}

// flood adds 64 MiB, more than a transport buffers for a client that does not read.
func (h *fixture) flood() {
	h.t.Helper()
	h.load(1024)
}

// load adds entries of 64 KiB each, all of one block.
func (h *fixture) load(entries int) {
	h.t.Helper()
	for range entries {
		h.largeEntry(0)
	}
}

// hold adds blocks whose snapshot has 26 MB, more than a transport buffers for a client that
// does not read.
func (h *fixture) hold() {
	h.t.Helper()
	for n := range 400 {
		h.largeEntry(uint64(n))
	}
}

// largeEntry adds an entry of 64 KiB that stores a block. A long name takes less time than
// many blocks.
func (h *fixture) largeEntry(hash uint64) {
	h.batch(h.lane, wire.Event{
		Kind: wire.KindStored, Tier: wire.TierDevice, BlockHashes: []uint64{hash}, TokensHashes: []uint64{hash}, BlockSize: 16,
		LoRAName: largeName,
	})
}

var largeName = strings.Repeat("x", 64<<10)

// narrow returns a client whose connection buffers 64 KiB of unread data. Others adapt their
// window.
func (h *fixture) narrow() *fixture {
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

// next receives a message. The error is the stream's or the checker's.
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

// until receives up to a seq.
func (s *subscription) until(t testing.TB, seq uint64) {
	t.Helper()
	for s.checker.Position().GetSeq() < seq {
		if _, err := s.next(); err != nil {
			t.Fatalf("at %v: %v", s.checker.Position(), err)
		}
	}
}

// untilMessage receives up to a message of a kind.
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

// end receives all messages and returns the error that ends the stream.
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

// orFail sets GAP_POLICY_FAIL.
func orFail(req *kvcastv1.SubscribeRequest) *kvcastv1.SubscribeRequest {
	req.GapPolicy = kvcastv1.GapPolicy_GAP_POLICY_FAIL
	return req
}

func after(p *kvcastv1.Position) *kvcastv1.SubscribeRequest {
	return &kvcastv1.SubscribeRequest{Start: &kvcastv1.SubscribeRequest_After{After: p}}
}
