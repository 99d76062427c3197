package hostile_test

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"maps"
	"net"
	"runtime"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"golang.org/x/net/http2"
	"golang.org/x/net/http2/hpack"
	"google.golang.org/grpc"
	"google.golang.org/protobuf/proto"

	"github.com/kvcast/kvcast/internal/core/testclass"
	"github.com/kvcast/kvcast/internal/zmtp"
	kvcastv1 "github.com/kvcast/kvcast/proto/kvcast/v1"
	"github.com/kvcast/kvcast/test/harness"
	"github.com/kvcast/kvcast/test/rawzmtp"
)

// queryFleet is how many workers hold the block that routers ask for.
const queryFleet = 500

// hostileIP is the address of hostile routers, of which correct ones have another.
var hostileIP = net.IPv4(127, 0, 0, 3)

// from returns how to connect from an address.
func from(ip net.IP) func(context.Context, string) (net.Conn, error) {
	return func(ctx context.Context, target string) (net.Conn, error) {
		return (&net.Dialer{LocalAddr: &net.TCPAddr{IP: ip}}).DialContext(ctx, "tcp", target)
	}
}

// dialFrom returns a connection from an address.
func dialFrom(t *testing.T, ip net.IP, target string, opts ...grpc.DialOption) *grpc.ClientConn {
	t.Helper()
	return harness.Dial(t, "passthrough:///"+target, append(opts, grpc.WithContextDialer(from(ip)))...)
}

// largestMatch is a request of as many prompts as are allowed, each of which all workers of the fleet hold.
func largestMatch() *kvcastv1.MatchPrefixRequest {
	return &kvcastv1.MatchPrefixRequest{Prompts: slices.Repeat([]*kvcastv1.Prompt{{TokenIds: []uint32{1, 2}}}, 64)}
}

// wideFilter has as many names as are allowed.
func wideFilter() *kvcastv1.Filter {
	f := new(kvcastv1.Filter)
	for i := range 10_000 {
		f.Workers = append(f.Workers, fmt.Sprintf("%080d", i))
	}
	return f
}

// correctRouter makes the calls of a correct router during an attack.
type correctRouter struct {
	t      *testing.T
	client kvcastv1.RouterEventServiceClient
	stream kvcastv1.RouterEventService_MatchPrefixesClient
	took   []time.Duration // of matches
}

func newRouter(t *testing.T, s *harness.Server) *correctRouter {
	t.Helper()
	r := &correctRouter{t: t, client: s.Client()}
	ctx, cancel := context.WithTimeout(t.Context(), 10*harness.Timeout)
	t.Cleanup(cancel)
	var err error
	if r.stream, err = r.client.MatchPrefixes(ctx); err != nil {
		t.Fatal(err)
	}
	return r
}

// round makes each call once. None may fail, or take longer than roundLimit.
func (r *correctRouter) round() {
	r.t.Helper()
	filter := &kvcastv1.Filter{Workers: []string{honestWorker}}
	for name, call := range map[string]func(context.Context) error{
		"MatchPrefix": func(ctx context.Context) error {
			began := time.Now()
			answer, err := r.client.MatchPrefix(ctx, &kvcastv1.MatchPrefixRequest{Prompts: largestMatch().GetPrompts()[:1], Limit: 8})
			if err == nil && len(answer.GetPrompts()[0].GetMatches()) == 0 {
				err = errors.New("no match") // not even of the honest worker
			}
			r.took = append(r.took, time.Since(began))
			return err
		},
		"MatchPrefixes": func(context.Context) error {
			began := time.Now()
			err := r.stream.Send(&kvcastv1.MatchPrefixesRequest{Id: 1, Request: &kvcastv1.MatchPrefixRequest{Prompts: largestMatch().GetPrompts()[:1], Limit: 8}})
			if err == nil {
				_, err = r.stream.Recv()
			}
			r.took = append(r.took, time.Since(began))
			return err
		},
		"LookupBlocks": func(ctx context.Context) error {
			_, err := r.client.LookupBlocks(ctx, &kvcastv1.LookupBlocksRequest{TokensHashes: []uint64{1}, Filter: filter})
			return err
		},
		"ListWorkers": func(ctx context.Context) error {
			_, err := r.client.ListWorkers(ctx, &kvcastv1.ListWorkersRequest{Filter: filter})
			return err
		},
		"Subscribe": func(ctx context.Context) error {
			stream, err := r.client.Subscribe(ctx, &kvcastv1.SubscribeRequest{Start: &kvcastv1.SubscribeRequest_Latest{Latest: &kvcastv1.FromLatest{}}, Filter: filter})
			if err == nil {
				_, err = stream.Recv()
			}
			return err
		},
		"Snapshot": func(ctx context.Context) error {
			stream, err := r.client.Snapshot(ctx, &kvcastv1.SnapshotRequest{Filter: filter})
			if err == nil {
				_, err = stream.Recv()
			}
			return err
		},
	} {
		ctx, cancel := context.WithTimeout(r.t.Context(), roundLimit)
		if err := call(ctx); err != nil {
			r.t.Errorf("%s: %v", name, err)
		}
		cancel()
	}
}

// unreadCalls makes calls over a connection of the hostile address whose flow-control windows are empty, so that the server can send no answer, until the context is
// done or the connection ends.
func unreadCalls(ctx context.Context, t *testing.T, s *harness.Server, method string, request proto.Message) {
	c, err := (&net.Dialer{LocalAddr: &net.TCPAddr{IP: hostileIP}}).DialContext(t.Context(), "tcp", s.Address())
	if err != nil {
		t.Error(err)
		return
	}
	defer func() { _ = c.Close() }()
	defer context.AfterFunc(ctx, func() { _ = c.Close() })()
	body, err := proto.Marshal(request)
	if err != nil {
		t.Error(err)
		return
	}
	body = append(binary.BigEndian.AppendUint32([]byte{0}, uint32(len(body))), body...)
	_, _ = c.Write([]byte(http2.ClientPreface))
	f := http2.NewFramer(c, c)
	_ = f.WriteSettings(http2.Setting{ID: http2.SettingInitialWindowSize, Val: 0})
	done := make(chan struct{})
	defer func() { <-done }()
	go func() {
		defer close(done)
		for err := error(nil); err == nil; {
			_, err = f.ReadFrame() // there is nothing to answer
		}
	}()
	var block bytes.Buffer
	e := hpack.NewEncoder(&block)
	for stream := uint32(1); ctx.Err() == nil && stream < 2*2600; stream += 2 {
		block.Reset()
		for _, field := range [][2]string{{":method", "POST"}, {":scheme", "http"}, {":path", method}, {":authority", "kvcast"}, {"content-type", "application/grpc"}, {"te", "trailers"}} {
			_ = e.WriteField(hpack.HeaderField{Name: field[0], Value: field[1]})
		}
		if f.WriteHeaders(http2.HeadersFrameParam{StreamID: stream, BlockFragment: block.Bytes(), EndHeaders: true}) != nil || f.WriteData(stream, true, body) != nil {
			return
		}
	}
	<-ctx.Done()
}

// queryAttack is an attack of a hostile router, and a metric that shows that it has its way.
type queryAttack struct {
	attack func(ctx context.Context, t *testing.T, s *harness.Server)
	begun  func(harness.Metrics) bool
}

func isRefused(resource string) func(harness.Metrics) bool {
	return func(m harness.Metrics) bool { return m.Sum("kvcast_budget_refused_total", "resource", resource) > 0 }
}

// concurrently calls a function again and again in so many goroutines, each with a connection of the hostile address, until the context is done.
func concurrently(ctx context.Context, t *testing.T, s *harness.Server, n int, call func(client kvcastv1.RouterEventServiceClient)) {
	var group sync.WaitGroup
	defer group.Wait()
	for range n {
		client := kvcastv1.NewRouterEventServiceClient(dialFrom(t, hostileIP, s.Address()))
		group.Go(func() {
			for ctx.Err() == nil {
				call(client)
			}
		})
	}
}

var queryAttacks = map[string]queryAttack{
	"matches that are not read": {
		func(ctx context.Context, t *testing.T, s *harness.Server) {
			var group sync.WaitGroup
			defer group.Wait()
			for range 4 {
				group.Go(func() { unreadCalls(ctx, t, s, kvcastv1.RouterEventService_MatchPrefix_FullMethodName, largestMatch()) })
			}
		}, isRefused("unread_answer_bytes"),
	},
	"largest matches": {
		func(ctx context.Context, t *testing.T, s *harness.Server) {
			concurrently(ctx, t, s, 4*runtime.GOMAXPROCS(0), func(c kvcastv1.RouterEventServiceClient) { _, _ = c.MatchPrefix(ctx, largestMatch()) })
		}, func(m harness.Metrics) bool { return m.Sum("kvcast_server_queries_waiting", "kind", "match") > 0 },
	},
	"matches that wait for a position": {
		func(ctx context.Context, t *testing.T, s *harness.Server) {
			tokens := &kvcastv1.Prompt{TokenIds: slices.Repeat([]uint32{1}, 1<<18)}
			concurrently(ctx, t, s, 30, func(c kvcastv1.RouterEventServiceClient) {
				_, _ = c.MatchPrefix(ctx, &kvcastv1.MatchPrefixRequest{
					Prompts: []*kvcastv1.Prompt{tokens, tokens, tokens}, After: &kvcastv1.Position{Seq: 1 << 62}, MaxWaitNano: uint64(10 * time.Second),
				})
			})
		}, isRefused("match_bytes"),
	},
	"lookups": {
		func(ctx context.Context, t *testing.T, s *harness.Server) {
			hashes := make([]uint64, 10_000)
			for i := range hashes {
				hashes[i] = 1<<63 + uint64(i)
			}
			concurrently(ctx, t, s, 100, func(c kvcastv1.RouterEventServiceClient) {
				_, _ = c.LookupBlocks(ctx, &kvcastv1.LookupBlocksRequest{TokensHashes: hashes})
			})
		}, func(m harness.Metrics) bool {
			return m.Sum("kvcast_server_queries_refused_total", "kind", "tokens_lookup") > 0
		},
	},
	"streams that are left, with wide filters": {
		func(ctx context.Context, t *testing.T, s *harness.Server) {
			filter := wideFilter()
			concurrently(ctx, t, s, 60, func(c kvcastv1.RouterEventServiceClient) {
				stream, err := c.Subscribe(ctx, &kvcastv1.SubscribeRequest{Start: &kvcastv1.SubscribeRequest_Latest{Latest: &kvcastv1.FromLatest{}}, Filter: filter})
				for err == nil {
					_, err = stream.Recv()
				}
				<-ctx.Done()
			})
		}, isRefused("filter_bytes"),
	},
	"all subscribers": {
		func(ctx context.Context, t *testing.T, s *harness.Server) {
			client := kvcastv1.NewRouterEventServiceClient(dialFrom(t, hostileIP, s.Address()))
			var group sync.WaitGroup
			defer group.Wait()
			for range 1100 {
				group.Go(func() {
					stream, err := client.Subscribe(ctx, &kvcastv1.SubscribeRequest{
						Start: &kvcastv1.SubscribeRequest_Latest{Latest: &kvcastv1.FromLatest{}}, Filter: &kvcastv1.Filter{Workers: []string{"none"}},
					})
					for err == nil {
						_, err = stream.Recv()
					}
				})
			}
		}, isRefused("subscribers"),
	},
	"streams of matches that are left": {
		func(ctx context.Context, t *testing.T, s *harness.Server) {
			concurrently(ctx, t, s, 140, func(c kvcastv1.RouterEventServiceClient) {
				stream, err := c.MatchPrefixes(ctx)
				for i := 0; i < 4 && err == nil; i++ { // of which nothing is read
					err = stream.Send(&kvcastv1.MatchPrefixesRequest{Request: largestMatch()})
				}
				<-ctx.Done()
			})
		}, isRefused("match_streams"),
	},
}

// TestHonestRouterBesideHostileRouters has a router that makes all that its address may, and reads nothing. A router of another address must get
// each answer, in a time that does not depend on the attack, and the process must keep its bounds of memory and its log.
func TestHonestRouterBesideHostileRouters(t *testing.T) {
	testclass.Process(t)
	for _, name := range slices.Sorted(maps.Keys(queryAttacks)) {
		t.Run(name, func(t *testing.T) {
			s := harness.Serve(t, harness.ProcessConfig{Args: []string{"--bind", "tcp://127.0.0.1:*"}})
			h, r := newHonest(t, s, s.Client()), newRouter(t, s)
			h.round()
			publishFleet(t, s)
			r.round()
			slices.Sort(r.took)
			quiet := r.took
			attack := queryAttacks[name]
			trial{
				attack: func(ctx context.Context, _ func()) { attack.attack(ctx, t, s) }, begun: attack.begun,
				round: func() {
					h.round()
					r.round()
				},
				rounds: patientRounds, forget: func() { h.took, r.took = nil, nil },
				mostMiB: s.ResidentMiB() + 512, mostLogged: maxLogBytes,
			}.run(t, s)
			slices.Sort(r.took)
			t.Logf("matches: %v when it is quiet, p50 %v and most %v during the attack; batches most %v",
				quiet[len(quiet)-1], r.took[len(r.took)/2], r.took[len(r.took)-1], slices.Max(h.took))
		})
	}
}

// publishFleet publishes a block of each of queryFleet workers, and waits until all are known.
func publishFleet(t *testing.T, s *harness.Server) {
	t.Helper()
	c, err := rawzmtp.DialFrom(t.Context(), net.IPv4(127, 0, 0, 2), zmtp.PUB, strings.TrimPrefix(s.Endpoint(), "tcp://"), harness.Timeout)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = c.Close() })
	go c.Answer()
	for i := range queryFleet {
		c.Message(fmt.Appendf(nil, "kv@%040d@m", i), make([]byte, 8), batchOf(t, 1))
	}
	if err := c.Flush(); err != nil {
		t.Fatal(err)
	}
	harness.WaitFor(t, func() bool {
		m, err := s.Metrics(t.Context())
		return err == nil && m.Sum("kvcast_index_blocks") > queryFleet
	})
}
