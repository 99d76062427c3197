package embedded

import (
	"context"
	"fmt"
	"log/slog"
	"strings"
	"sync"
	"sync/atomic"
)

// serverLog writes nats-server's log lines to a slog.Logger.
type serverLog struct {
	log    *slog.Logger
	faults chan struct{}

	failed atomic.Bool // the server does not start
	mu     sync.Mutex
	lines  []string // the first warnings and errors
}

// maxLines bounds the lines that warnings returns.
const maxLines = 8

// warnings returns the first warnings and errors.
func (l *serverLog) warnings() string {
	l.mu.Lock()
	defer l.mu.Unlock()
	return strings.Join(l.lines, "; ")
}

func (l *serverLog) Debugf(format string, v ...any) { _ = l.write(slog.LevelDebug, format, v) }

func (l *serverLog) Tracef(format string, v ...any) { _ = l.write(slog.LevelDebug, format, v) }

func (l *serverLog) Noticef(format string, v ...any) { _ = l.write(slog.LevelDebug, format, v) }

func (l *serverLog) Warnf(format string, v ...any) {
	line := l.write(slog.LevelWarn, format, v)
	l.mu.Lock()
	defer l.mu.Unlock()
	if len(l.lines) < maxLines {
		l.lines = append(l.lines, line)
	}
}

func (l *serverLog) Errorf(format string, v ...any) {
	l.Warnf(format, v...)
	select {
	case l.faults <- struct{}{}:
	default: // it has not been read yet
	}
}

// Fatalf implements server.Logger. nats-server continues after it, without JetStream.
func (l *serverLog) Fatalf(format string, v ...any) {
	l.Errorf(format, v...)
	l.failed.Store(true)
}

func (l *serverLog) write(level slog.Level, format string, v []any) string {
	line := strings.TrimSpace(fmt.Sprintf(format, v...))
	l.log.Log(context.Background(), level, "nats-server", "line", line)
	return line
}
