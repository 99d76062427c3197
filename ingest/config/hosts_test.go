package config

import (
	"net/netip"
	"strings"
	"testing"
)

func TestHosts(t *testing.T) {
	h, err := ParseHosts([]string{"10.1.0.0/16", "192.0.2.7", "2001:db8::/32", "::ffff:198.51.100.1", "Engine-0.", "*.vllm.svc"})
	if err != nil {
		t.Fatal(err)
	}
	for host, want := range map[string]bool{
		"10.1.2.3": true, "::ffff:10.1.2.3": true, "10.2.0.1": false,
		"192.0.2.7": true, "192.0.2.8": false,
		"2001:db8::1": true, "2001:db9::1": false, "198.51.100.1": true,
		"engine-0": true, "ENGINE-0.": true, "engine-0.vllm": false,
		"a.vllm.svc": true, "a.b.VLLM.svc.": true, "vllm.svc": false, ".vllm.svc": false, "avllm.svc": false,
		"": false,
	} {
		if got := h.Contain(host); got != want {
			t.Errorf("Contain(%q) = %v", host, got)
		}
	}
	if !h.ContainEndpoint("tcp://10.1.2.3:5558") || h.ContainEndpoint("tcp://10.2.2.3:5558") || h.ContainEndpoint("ipc://engine-0") {
		t.Error("ContainEndpoint does not go by the host of a tcp endpoint")
	}
	if !h.ContainEndpoint("smg://10.1.2.3:50051") || h.ContainEndpoint("openengine://10.2.2.3:50051") {
		t.Error("ContainEndpoint does not go by the host of a gRPC endpoint")
	}
	if (Hosts{}).Contain("10.1.2.3") || !(Hosts{}).Empty() || h.Empty() {
		t.Error("the zero Hosts is not empty")
	}
}

func TestParseHostsRefuses(t *testing.T) {
	for _, s := range []string{"", "*", "*.", "*vllm", "a b", "a/b", "10.0.0.0/33", "host:80", "a*b", "*.a.*", "*.::1", "*.1.2.3.4", "::1.", "a\x00", strings.Repeat("a", 254)} {
		if _, err := ParseHosts([]string{"fine", s}); err == nil || !strings.Contains(err.Error(), allowedHosts) {
			t.Errorf("ParseHosts(%q) = %v, want what is allowed", s, err)
		}
	}
}

func TestReplayHost(t *testing.T) {
	allowed, err := ParseHosts([]string{"10.9.0.0/16", "*.pods"})
	if err != nil {
		t.Fatal(err)
	}
	tests := []struct {
		name, named, peer, want string
	}{
		{"the peer's own address", "10.0.0.5", "10.0.0.5", "10.0.0.5"},
		{"the same, mapped", "10.0.0.5", "::ffff:10.0.0.5", "10.0.0.5"},
		{"another's", "10.0.0.6", "10.0.0.5", ""},
		{"this machine's from afar", "127.0.0.1", "10.0.0.5", ""},
		{"this machine's metadata service", "169.254.169.254", "127.0.0.1", ""},
		{"this machine's", "127.0.0.2", "127.0.0.1", "127.0.0.2"},
		{"a name", "vllm-0", "10.0.0.5", "10.0.0.5"},
		{"a name of a peer without an address", "vllm-0", "", ""},
		{"an allowed address", "10.9.1.1", "10.0.0.5", "10.9.1.1"},
		{"an allowed name", "vllm-0.pods", "10.0.0.5", "vllm-0.pods"},
		{"an allowed name without a peer's address", "vllm-0.pods", "", "vllm-0.pods"},
		{"IPv6", "2001:db8::1", "2001:db8::1", "2001:db8::1"},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			peer, _ := netip.ParseAddr(tt.peer)
			if got, ok := ReplayHost(tt.named, peer, allowed); got != tt.want || ok != (tt.want != "") {
				t.Errorf("replayHost(%q, %q) = %q, %v, want %q", tt.named, tt.peer, got, ok, tt.want)
			}
		})
	}
}
