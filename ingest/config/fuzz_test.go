package config_test

import (
	"net/netip"
	"strings"
	"testing"

	"github.com/kvcast/kvcast/ingest/config"
	"github.com/kvcast/kvcast/internal/feed"
)

// FuzzSource validates sources. The endpoints of a valid source's dp ranks are distinct and on one host, and parse to the same
// endpoints as text. Each error of an invalid source names a field, its value and what is allowed.
func FuzzSource(f *testing.F) {
	for _, s := range []struct{ engine, connect, replay, snapshot, topic string }{
		{"vllm", "tcp://10.0.0.5:5557", "tcp://10.0.0.5:5558", "tcp://10.0.0.5:5559", "kv@"}, {"trtllm", "ipc:///tmp/x", "", "", ""},
		{"trtllm", "ipc://" + strings.Repeat("p", 105), "", "", ""}, {"sglang", "smg://h:50051", "", "", ""},
		{"", "openengine://[::1%eth0]:1", "", "", ""}, {"vllm", "tcp://[::ffff:1.2.3.4]:65535", "", "", ""},
		{"vllm", "ipc:///tmp/x", "tcp://*:1", "tcp://h:0", "\x00"},
		{"kvbm", "tcp://:1", "tcp://h", "tcp://h:1", ""}, {"vllm", "smg://h:1", "tcp://h:2", "", "t"},
		{"vllm", "tcp://a;b:1", "tcp://[h]:1", "inproc://x", ""},
		{"vllm", "tcp://h:+1", "tcp://h:0x1", "tcp://h:065535", ""}, {"llm-d-sim", "", "://", "tcp://", "ipc://"},
	} {
		for _, dpSize := range []int{0, 1, 3, feed.MaxRanks, feed.MaxRanks + 1, -1, 1 << 62} {
			f.Add(s.engine, s.connect, s.replay, s.snapshot, s.topic, dpSize)
		}
	}
	f.Fuzz(func(t *testing.T, engine, connect, replay, snapshot, topic string, dpSize int) {
		c := config.Config{Workers: []config.Worker{{Name: "w", Sources: []config.Source{{
			Engine: feed.Engine(engine), Connect: connect, Replay: replay, Snapshot: snapshot, DPSize: dpSize, Topic: topic,
		}}}}}
		if err := c.Validate(); err != nil {
			fields := config.FieldErrors(err)
			for _, e := range fields {
				if !strings.HasPrefix(e.Path(), "workers") || e.Allowed == "" || e.Value == nil {
					t.Errorf("%+v", e)
				}
			}
			if all, ok := err.(interface{ Unwrap() []error }); !ok || len(all.Unwrap()) != len(fields) {
				t.Errorf("%d errors of fields in %v", len(fields), err)
			}
			return
		}
		source := c.WithDefaults().Workers[0].Sources[0]
		all := source.Endpoints()
		if len(all) != source.DPSize || len(all) > feed.MaxRanks {
			t.Errorf("%d ranks, want %d", len(all), source.DPSize)
		}
		first, _ := config.ParseSource(connect)
		seen := make(map[string]bool)
		for _, r := range all {
			e, ok := config.ParseSource(r.Connect)
			if !ok || e.String() != r.Connect || seen[r.Connect] && !e.Called() || e.Transport != first.Transport ||
				e.Transport != config.TransportIPC && e.Address != first.Address {
				t.Fatalf("rank %d is at %q, of %q", r.Rank, r.Connect, connect)
			}
			seen[r.Connect] = true
			for given, of := range map[string]string{replay: r.Replay, snapshot: r.Snapshot} {
				if e, ok := config.ParseEndpoint(of, false); (given != "") != ok || ok && e.String() != of {
					t.Fatalf("rank %d has %q, of %q", r.Rank, of, given)
				}
			}
		}
	})
}

// FuzzHosts parses lists of allowed hosts, and asks for the host of a peer's replay socket, which the peer's topic names. The
// result must be in the list, or be the peer's own address: otherwise a peer could make kvcast connect elsewhere.
func FuzzHosts(f *testing.F) {
	for _, list := range []string{
		"", "10.1.0.0/16,192.0.2.7,2001:db8::/32", "Engine-0.,*.vllm.svc", "*", "*.", "a b", "10.0.0.0/33", "::/0", "0.0.0.0/0",
		"::ffff:198.51.100.0/120", "fe80::1%eth0", "*.1.2.3.4", "1", "\xff",
	} {
		for _, named := range []string{"10.1.2.3", "::ffff:10.1.2.3", "ENGINE-0", "a.vllm.svc.", "127.0.0.1", "::1", "fe80::1%eth0",
			"169.254.169.254", "0.0.0.0", "", ".", "\n"} {
			f.Add(list, named, []byte{10, 0, 0, 5})
		}
		f.Add(list, "127.0.0.2", []byte{127, 0, 0, 1})
		f.Add(list, "198.51.100.1", []byte("\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\xff\xff\xc6\x33\x64\x01"))
	}
	f.Fuzz(func(t *testing.T, list, named string, address []byte) {
		hosts := strings.Split(list, ",")
		h, err := config.ParseHosts(hosts)
		if err != nil {
			if text := err.Error(); !strings.Contains(text, " is not allowed: want ") || !config.Printable(text) || !h.Empty() {
				t.Errorf("got %v and error %q", h, text)
			}
			return
		}
		for _, host := range hosts {
			_, isAddress := parseAddr(host)
			if !strings.ContainsAny(host, "*/") && !h.Contain(host) || !isAddress && h.Contain(host) != h.Contain(strings.ToUpper(host)) {
				t.Errorf("%q is not in %q", host, list)
			}
		}
		peer, _ := netip.AddrFromSlice(address)
		host, ok := config.ReplayHost(named, peer, h)
		if !ok || h.Contain(host) {
			return
		}
		a, isAddress := parseAddr(host)
		if own := a == peer.Unmap() || a.IsLoopback() && peer.Unmap().IsLoopback(); !isAddress || !own {
			t.Errorf("%s, which names %q, is asked at %q, which is not in %q", peer, named, host, list)
		}
	})
}

func parseAddr(s string) (netip.Addr, bool) {
	a, err := netip.ParseAddr(s)
	return a.Unmap(), err == nil
}
