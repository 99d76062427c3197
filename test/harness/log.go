package harness

import (
	"bytes"
	"log/slog"
	"strings"
	"testing"
)

// Log records log lines without their times. A test reads it after the last write: it has no lock.
type Log struct{ bytes.Buffer }

// Logger returns a logger that writes to the log.
func (l *Log) Logger() *slog.Logger {
	return slog.New(slog.NewTextHandler(l, &slog.HandlerOptions{
		ReplaceAttr: func(_ []string, a slog.Attr) slog.Attr {
			if a.Key == slog.TimeKey {
				return slog.Attr{}
			}
			return a
		},
	}))
}

// Want fails the test unless each of these lines was logged exactly once.
func (l *Log) Want(t testing.TB, lines ...string) {
	t.Helper()
	for _, line := range lines {
		if n := strings.Count("\n"+l.String(), "\n"+line+"\n"); n != 1 {
			t.Errorf("logged %d times: %s\nin:\n%s", n, line, l.String())
		}
	}
}
