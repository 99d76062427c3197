package ingest

import (
	"context"
	"log/slog"
)

// leveled is a handler of log records whose level can be changed while it is used.
// The level of the handler in it is not asked for.
type leveled struct {
	slog.Handler
	level *slog.LevelVar
}

// withLevel returns a logger that leaves out what is below a level.
func withLevel(l *slog.Logger, level *slog.LevelVar) *slog.Logger {
	return slog.New(leveled{l.Handler(), level})
}

// Enabled tells whether records of a level are logged.
func (h leveled) Enabled(_ context.Context, l slog.Level) bool { return l >= h.level.Level() }

// WithAttrs returns a handler of the same level.
func (h leveled) WithAttrs(attrs []slog.Attr) slog.Handler {
	return leveled{h.Handler.WithAttrs(attrs), h.level}
}

// WithGroup returns a handler of the same level.
func (h leveled) WithGroup(name string) slog.Handler {
	return leveled{h.Handler.WithGroup(name), h.level}
}

// SetLogLevel sets the least level that is logged from now on.
func (c *Client) SetLogLevel(l slog.Level) { c.level.Set(l) }

// LogLevel returns the least level that is logged.
func (c *Client) LogLevel() slog.Level { return c.level.Level() }
