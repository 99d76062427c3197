//go:build !cgo

package main_test

import (
	"strings"
	"testing"
)

func TestVersionWithoutLibzmq(t *testing.T) {
	if got := kvcast(t, nil, "version"); got.status != 0 || !strings.HasSuffix(got.out, " (without libzmq)\n") {
		t.Errorf("got status %d and %q", got.status, got.out)
	}
}

// TestLibzmqIsNotAllowedWithoutCgo selects the transport that is not in this build in each way.
func TestLibzmqIsNotAllowedWithoutCgo(t *testing.T) {
	for _, key := range []string{"connect", "listen"} {
		flag := "--ingest-" + key + "-transport"
		got := kvcast(t, nil, "serve", "--check", flag, "libzmq")
		want := flag + `: "libzmq" is not allowed: want native: libzmq is not in this build, which has no cgo`
		if got.status == 0 || !strings.Contains(got.err, want) {
			t.Errorf("status %d, error %q, want %q", got.status, got.err, want)
		}
		if got := kvcast(t, nil, "serve", "--check", flag, "native"); got.status != 0 || !strings.Contains(got.out, key+"_transport: native\n") {
			t.Errorf("%s native: status %d, error %q, output:\n%s", flag, got.status, got.err, got.out)
		}
	}
	got := kvcast(t, nil, "serve", "--check")
	if got.status != 0 || strings.Count(got.out, "_transport: native\n") != 2 {
		t.Errorf("the default: status %d, output:\n%s", got.status, got.out)
	}
}
