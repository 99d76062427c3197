package member

import (
	"fmt"
	"net"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/kvcast/kvcast/ingest"
	ingestconfig "github.com/kvcast/kvcast/ingest/config"
	"github.com/kvcast/kvcast/internal/zmtp"
)

func TestBatchesOfEnginesAreHeard(t *testing.T) {
	const restored, read, connected, pool = "restored", "read", "connected", "pool"
	r := reach{}
	reading := map[string]ingestconfig.Worker{restored: {}, read: {}, pool: {}}
	for i, tt := range []struct {
		name    string
		sources []ingest.SourceStatus
		want    bool
	}{
		{"nothing", nil, false},
		{"not started", []ingest.SourceStatus{{Worker: read}}, false},
		{"restored", []ingest.SourceStatus{{Worker: restored, Started: true, LastSeq: 7}}, false},
		{"no batch since", []ingest.SourceStatus{{Worker: restored, Started: true, LastSeq: 7}}, false},
		{"a batch", []ingest.SourceStatus{{Worker: restored, Started: true, LastSeq: 8}}, true},
		{"a restart of the engine", []ingest.SourceStatus{{Worker: restored, Started: true, LastSeq: 1}}, true},
		{"another rank", []ingest.SourceStatus{{Worker: restored, Started: true, Rank: 1, LastSeq: 2}}, false},
		{"an engine that has connected", []ingest.SourceStatus{{Worker: connected, Started: true, LastSeq: 1}}, false},
		{"its batch", []ingest.SourceStatus{{Worker: connected, Started: true, LastSeq: 2}}, false},
		{"a pool of what workers announce", []ingest.SourceStatus{{Worker: pool, Endpoint: "workers://disk", Started: true, LastSeq: 1}}, false},
		{"its batch", []ingest.SourceStatus{{Worker: pool, Endpoint: "workers://disk", Started: true, LastSeq: 2}}, false},
	} {
		if got := r.heard(tt.sources, reading); got != tt.want {
			t.Errorf("%d: %s: got %t, want %t", i, tt.name, got, tt.want)
		}
	}
}

func TestEndpointsThatHaveGreetedAreTriedFirst(t *testing.T) {
	r := reach{}
	var wanted []string
	for i := range 100 {
		wanted = append(wanted, fmt.Sprintf("tcp://10.0.0.%d:5557", i))
		r.remember(wanted[i])
	}
	r.remember(wanted[95])
	gone := wanted[99]
	chosen := r.choose(wanted[:99], firstProbes)
	want := []string{wanted[95], wanted[98], wanted[97], wanted[96], wanted[94], wanted[93], wanted[92]}
	if len(chosen) != firstProbes || !slices.Equal(chosen[:len(want)], want) || slices.Contains(chosen, gone) {
		t.Errorf("got %v, want %v and others, and not %s", chosen, want, gone)
	}
	slices.Sort(chosen)
	if len(slices.Compact(chosen)) != firstProbes {
		t.Errorf("an endpoint is chosen twice: %v", chosen)
	}
	if got := r.choose(wanted[:3], secondProbes); len(got) != 3 {
		t.Errorf("got %v, want all that there are", got)
	}
}

func TestFirstGreetingEndsTheProbes(t *testing.T) {
	listen := func(greeting []byte) string {
		l, err := (&net.ListenConfig{}).Listen(t.Context(), "tcp", "127.0.0.1:0")
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { _ = l.Close() })
		go func() {
			for {
				c, err := l.Accept()
				if err != nil {
					return
				}
				_, _ = c.Write(greeting)
				t.Cleanup(func() { _ = c.Close() })
			}
		}()
		return "tcp://" + l.Addr().String()
	}
	silent, greeting := listen(nil), listen(zmtp.AppendGreeting(nil))
	if got := greets(t.Context(), []string{silent, "nonsense", greeting}, time.Hour); got != greeting {
		t.Errorf("got %q, want %q", got, greeting)
	}
	settings := strings.Replace(listen([]byte("\x00\x00\x00\x04\x00\x00\x00\x00\x00")), "tcp", "smg", 1)
	noServer := strings.Replace(listen([]byte("HTTP/1.1 400 Bad Request")), "tcp", "smg", 1)
	if got := greets(t.Context(), []string{silent, noServer, settings}, time.Hour); got != settings {
		t.Errorf("got %q, want the gRPC server %q", got, settings)
	}
	if got := greets(t.Context(), []string{silent}, time.Millisecond); got != "" {
		t.Errorf("got %q from a listener that says nothing", got)
	}
}
