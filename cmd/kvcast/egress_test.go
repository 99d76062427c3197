package main_test

import (
	"strings"
	"testing"

	"github.com/kvcast/kvcast/internal/core/testclass"
)

// TestEgressNeedsTokenIDs starts servers that could publish nothing.
func TestEgressNeedsTokenIDs(t *testing.T) {
	testclass.Process(t)
	t.Parallel()
	for _, flags := range [][]string{nil, {"--retain-token-ids"}} {
		got := kvcast(t, nil, append([]string{"serve", "--egress-zmq-bind", "tcp://127.0.0.1:*"}, flags...)...)
		if got.status != 2 || strings.Count(got.err, "\n") != 1 || !strings.Contains(got.err, "emit_token_ids: true as well") {
			t.Errorf("with %q: got status %d and %q", flags, got.status, got.err)
		}
	}
}
