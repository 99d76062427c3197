package loglimit_test

import (
	"bytes"
	"fmt"
	"log/slog"
	"net/netip"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/kvcast/kvcast/internal/loglimit"
)

// limited returns a logger with limits, and what it has written.
func limited() (*slog.Logger, *bytes.Buffer) {
	written := new(bytes.Buffer)
	return slog.New(loglimit.NewHandler(slog.NewTextHandler(written, nil))), written
}

// lines returns how many lines were written since the last call.
func lines(written *bytes.Buffer) int {
	defer written.Reset()
	return strings.Count(written.String(), "\n")
}

func TestLinesOfASubjectAreLimited(t *testing.T) {
	t.Parallel()
	same := func(args ...any) func(int) []any { return func(int) []any { return args } }
	for name, tt := range map[string]struct {
		args func(i int) []any // of the nth line
		want int
	}{
		"without a subject": {func(i int) []any { return []any{"error", i} }, loglimit.Burst},
		"of a worker":       {same("worker", "w"), loglimit.Burst},
		"of workers":        {func(i int) []any { return []any{"worker", i} }, loglimit.KindBurst},
		"of pods":           {func(i int) []any { return []any{"pod", i} }, loglimit.KindBurst},
		"of a pod with several workers": {
			func(i int) []any { return []any{"pod", "p", "worker", i % 2} }, 2 * loglimit.Burst,
		},
		"of an address with any names and ports": {
			func(i int) []any { return []any{"worker", i, loglimit.PeerAddress, fmt.Sprintf("192.0.2.1:%d", i)} }, loglimit.Burst,
		},
		"of an address without port": {same(loglimit.PeerAddress, netip.MustParseAddr("192.0.2.1")), loglimit.Burst},
		"of an IPv6 network": {
			func(i int) []any { return []any{loglimit.PeerAddress, fmt.Sprintf("[2001:db8::%x]:1", i)} }, loglimit.Burst,
		},
		"of addresses": {
			func(i int) []any { return []any{loglimit.PeerAddress, fmt.Sprintf("10.0.%d.%d:1", i/256, i%256)} }, loglimit.KindBurst,
		},
		"of what has no address": {same(loglimit.PeerAddress, "bufconn"), loglimit.Burst},
		"of an operator":         {same("role", "operator", loglimit.PeerAddress, "192.0.2.1:1"), loglimit.KindBurst},
		"of a router":            {same("role", "router", loglimit.PeerAddress, "192.0.2.1:1"), loglimit.Burst},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				log, written := limited()
				for i := range 2 * loglimit.KindBurst {
					log.Info("a", tt.args(i)...)
				}
				if got := lines(written); got != tt.want {
					t.Errorf("%d lines, want %d", got, tt.want)
				}
				log.Info("b", tt.args(0)...)
				if got := lines(written); got != 1 {
					t.Errorf("%d lines of another kind, want 1", got)
				}
			})
		})
	}
}

func TestSuppressedLinesAreCounted(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		log, written := limited()
		noisy := log.With("worker", "noisy")
		for range loglimit.Burst + 5 {
			noisy.Warn("a")
		}
		if got := written.String(); lines(written) != loglimit.Burst || strings.Contains(got, "suppressed") {
			t.Errorf("first:\n%s", got)
		}
		for _, step := range []struct {
			after time.Duration
			log   *slog.Logger
			want  string
		}{
			{0, log.With("worker", "other"), "msg=a worker=other suppressed=5\n"},
			{0, log.With("worker", "other"), "msg=a worker=other\n"},
			{loglimit.Interval - 1, noisy, ""},
			{1, noisy, "msg=a worker=noisy suppressed=1\n"},
			{0, noisy, ""},
			{2 * loglimit.Interval, noisy, "msg=a worker=noisy suppressed=1\n"},
			{0, noisy, "msg=a worker=noisy\n"},
			{0, noisy, ""},
		} {
			time.Sleep(step.after)
			step.log.Warn("a")
			if _, got, _ := strings.Cut(written.String(), "level=WARN "); got != step.want {
				t.Errorf("got %q, want %q", got, step.want)
			}
			written.Reset()
		}
	})
}

// TestLinesOfAKindAreLimited has subjects without end, at a rate of ten for each line that is allowed.
func TestLinesOfAKindAreLimited(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		log, written := limited()
		const seconds = 1000
		for i := range 10 * seconds * int(time.Second/loglimit.KindInterval) {
			log.Info("a", "worker", i)
			time.Sleep(loglimit.KindInterval / 10)
		}
		if got, most := lines(written), loglimit.KindBurst+seconds; got > most || got < most-1 {
			t.Errorf("%d lines, want %d", got, most)
		}
	})
}

// TestMessagesAreBounded has messages that are not constants.
func TestMessagesAreBounded(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		log, written := limited()
		for i := range 10_000 {
			log.Info(fmt.Sprint("message ", i))
		}
		if got, want := lines(written), 1024+loglimit.Burst; got != want {
			t.Errorf("%d lines, want %d", got, want)
		}
	})
}

func TestAttributesAndGroupsAreKept(t *testing.T) {
	t.Parallel()
	log, written := limited()
	log.With("a", 1).WithGroup("g").With("b", 2).Info("m", "c", 3)
	log.Debug("m")
	if _, got, _ := strings.Cut(written.String(), "level="); got != "INFO msg=m a=1 g.b=2 g.c=3\n" {
		t.Errorf("got %q", got)
	}
}

func TestLinesOfALibraryAreOfOneKind(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		log, written := limited()
		library := loglimit.Writer(log, slog.LevelWarn, "library")
		if _, err := fmt.Fprintln(library, "line 0"); err != nil {
			t.Fatal(err)
		}
		if _, got, _ := strings.Cut(written.String(), "level="); got != "WARN msg=library line=\"line 0\"\n" {
			t.Errorf("got %q", got)
		}
		for i := range 100 {
			_, _ = fmt.Fprintln(library, "line", i)
		}
		if got := lines(written); got != loglimit.Burst {
			t.Errorf("%d lines, want %d", got, loglimit.Burst)
		}
	})
}
