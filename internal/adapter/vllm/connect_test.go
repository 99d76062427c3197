package vllm_test

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/kvcast/kvcast/internal/adapter/vllm"
	"github.com/kvcast/kvcast/internal/transport"
	"github.com/kvcast/kvcast/internal/transport/native"
)

// TestConsumersBehindAName connects to all addresses of a name, which changes: one is added, one is missing while its connection lasts, the lookup fails, and
// one that has gone is connected to again when the name has it again.
func TestConsumersBehindAName(t *testing.T) {
	vllm.SetResolveInterval(t, 20*time.Millisecond)
	const first, second = "127.0.0.2", "127.0.0.3"
	bind := func(endpoint string) (transport.Receiver, string) {
		r, bound, err := native.New(native.Config{}).Bind(endpoint, nil)
		if err != nil {
			t.Fatal(err)
		}
		return r, bound
	}
	a, aBound := bind("tcp://" + first + ":*")
	port := aBound[strings.LastIndexByte(aBound, ':')+1:]
	b, _ := bind("tcp://" + second + ":" + port)

	var answer atomic.Pointer[[]netip.Addr] // nil: an error
	lookups := make(chan struct{})
	resolve := func(hosts ...string) {
		var addresses []netip.Addr
		for _, h := range hosts {
			addresses = append(addresses, netip.MustParseAddr(h))
		}
		answer.Store(&addresses)
	}
	awaitLookup := func() { // the answer of the first one was acted on when the third begins, and may have been an earlier one
		for range 3 {
			select {
			case <-lookups:
			case <-time.After(patience):
				t.Fatal("the name is not looked up")
			}
		}
	}
	resolve(first)
	s := start(t, vllm.Config{
		Endpoints: []vllm.EndpointConfig{{Connect: "tcp://pickers.llm.svc:" + port}},
		Lookup: func(_ context.Context, _, host string) ([]netip.Addr, error) {
			select {
			case lookups <- struct{}{}:
			default:
			}
			if found := answer.Load(); found != nil && host == "pickers.llm.svc" {
				return *found, nil
			}
			return nil, errors.New("no such host")
		},
	})
	s.apply("a", added(), chain(1, 2))
	consumerA, consumerB := newSubscriber(t), newSubscriber(t)
	consumerA.read(a)
	consumerB.read(b)
	consumerA.await("kv@a@m", 1, 2)
	s.awaitMetric("kvcast_egress_consumers", 1)

	resolve(first, second)
	consumerB.await("kv@a@m", 1, 2)
	s.awaitMetric("kvcast_egress_consumers", 2)

	resolve(second) // the connection to the first stays
	awaitLookup()
	s.apply("a", removal(2))
	consumerA.await("kv@a@m", 1)
	consumerB.await("kv@a@m", 1)
	answer.Store(nil)
	awaitLookup()
	s.apply("a", chain(1, 2))
	consumerA.await("kv@a@m", 1, 2)
	consumerB.await("kv@a@m", 1, 2)

	resolve(second)
	a.Interrupt()
	s.awaitMetric("kvcast_egress_consumers", 1)
	awaitLookup()
	s.awaitMetric("kvcast_egress_consumers", 1)
}

func TestAddressesOfConsumers(t *testing.T) {
	t.Parallel()
	var many, manyWant []string
	for i := range 100 {
		many = append(many, fmt.Sprintf("10.0.1.%d", i+100))
		manyWant = append(manyWant, fmt.Sprintf("10.0.1.%d:5557", i+100))
	}
	for name, tt := range map[string]struct{ found, want []string }{
		"none":          {nil, nil},
		"one":           {[]string{"10.0.0.1"}, []string{"10.0.0.1:5557"}},
		"several, once": {[]string{"10.0.0.2", "10.0.0.1", "10.0.0.2", "::ffff:10.0.0.1"}, []string{"10.0.0.1:5557", "10.0.0.2:5557"}},
		"of IPv6":       {[]string{"fd00::2", "fd00::1"}, []string{"[fd00::1]:5557", "[fd00::2]:5557"}},
		"of both":       {[]string{"fd00::2", "10.0.0.1", "fd00::1"}, []string{"10.0.0.1:5557"}},
		"too many":      {many, manyWant[:64]},
	} {
		var found []netip.Addr
		for _, a := range tt.found {
			found = append(found, netip.MustParseAddr(a))
		}
		before := slices.Clone(found)
		got, left := vllm.AddressesOf(found, "5557")
		if diff := cmp.Diff(tt.want, got); diff != "" {
			t.Errorf("%s (-want +got):\n%s", name, diff)
		}
		if wantLeft := max(0, len(tt.found)-64); left != wantLeft {
			t.Errorf("%s: %d addresses are left, want %d", name, left, wantLeft)
		}
		if !slices.Equal(found, before) {
			t.Errorf("%s: the lookup's answer was changed", name)
		}
	}
}

func TestTopicOfRanks(t *testing.T) {
	t.Parallel()
	for _, tt := range []struct {
		endpoint    string
		rank, first uint32
		want        string
	}{
		{"10.0.0.5:8000", 0, 0, "kv@10.0.0.5:8000@m"},
		{"10.0.0.5:8000", 3, 0, "kv@10.0.0.5:8003@m"},
		{"10.0.0.5:8000", 11, 8, "kv@10.0.0.5:8003@m"},
		{"http://10.0.0.5:8000", 1, 0, "kv@http://10.0.0.5:8001@m"},
		{"[fd00::1]:8000", 1, 0, "kv@[fd00::1]:8001@m"},
		{"10.0.0.5", 3, 0, "kv@10.0.0.5@m"},
		{"10.0.0.5:8000", 3, 8, "kv@10.0.0.5:8000@m"}, // the worker was added without the rank
		{"", 3, 0, "kv@w@m"},
	} {
		if got := vllm.Topic("kv@{rank_endpoint}@{model}", "w", tt.endpoint, "m", tt.rank, tt.first); got != tt.want {
			t.Errorf("topic of %q, rank %d from %d: got %q, want %q", tt.endpoint, tt.rank, tt.first, got, tt.want)
		}
	}
}
