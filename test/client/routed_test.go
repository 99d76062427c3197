package client_test

import (
	"strings"
	"testing"
	"time"

	"github.com/kvcast/kvcast/client"
	"github.com/kvcast/kvcast/internal/journal"
	"github.com/kvcast/kvcast/server"
)

// TestRoutedPromptsAreExpected notes prompts by calls and over a Matcher's stream.
func TestRoutedPromptsAreExpected(t *testing.T) {
	t.Parallel()
	h := start(t, server.Config{}, journal.Config{})
	h.batch("w", storing(0, 1, 2, 3))
	c := client.FromConn(h.Dial(t))
	matcher := c.NewMatcher()
	defer matcher.Close()
	prompt := func(hashes ...uint64) client.Prompt { return client.Prompt{Model: "m", TokensHashes: hashes} }
	match := func(p client.Prompt) client.Match {
		t.Helper()
		res, err := matcher.Match(t.Context(), client.MatchRequest{Prompts: []client.Prompt{p}})
		if err != nil || len(res.Matches[0]) != 1 {
			t.Fatalf("got %v, error %v, want one match", res, err)
		}
		return res.Matches[0][0]
	}
	if m := match(prompt(1, 2, 9)); m.Blocks != 2 || m.Expected != 0 {
		t.Errorf("before: got %+v", m)
	}
	var all []client.Routed
	for n := range uint64(200) { // in several calls
		all = append(all, client.Routed{Worker: "w", Prompt: prompt(1, 2, 100+n), TTL: time.Minute}, client.Routed{Worker: "absent", Prompt: prompt(1)})
	}
	if ignored, err := c.NoteRouted(t.Context(), all...); err != nil || ignored != 200 {
		t.Errorf("ignored %d, error %v, want 200", ignored, err)
	}
	if m := match(prompt(1, 2, 299)); m.Blocks != 2 || m.Expected != 3 {
		t.Errorf("noted by a call: got %+v", m)
	}
	if err := matcher.NoteRouted(t.Context(), client.Routed{Worker: "w", Prompt: prompt(7, 8), TTL: time.Minute}, client.Routed{Worker: "w", Prompt: prompt(7), TTL: time.Minute}); err != nil {
		t.Error(err)
	}
	if m := match(prompt(7, 8, 9)); m.Blocks != 0 || m.Expected != 2 {
		t.Errorf("noted by the matcher: got %+v", m)
	}
	if err := matcher.NoteRouted(t.Context()); err != nil {
		t.Errorf("nothing: %v", err)
	}
	if _, err := c.NoteRouted(t.Context(), client.Routed{Worker: "w"}); err == nil || !strings.Contains(err.Error(), "routed[0].prompt.token_ids: is empty") {
		t.Errorf("an empty prompt: got %v", err)
	}
	if err := matcher.NoteRouted(t.Context(), client.Routed{Worker: "w", Prompt: prompt(7), TTL: time.Hour}); err == nil || !strings.Contains(err.Error(), "routed[0].ttl_nano: 3600000000000 is not allowed") {
		t.Errorf("an hour: got %v", err)
	}
	if m := match(prompt(7)); m.Expected != 1 { // over another stream
		t.Errorf("after an error: got %+v", m)
	}
}
