package engineclient

import (
	"context"
	"log/slog"
)

// leveled is a slog.Handler whose level can change. The level of the inner handler is ignored.
type leveled struct {
	slog.Handler
	level *slog.LevelVar
}

func (h leveled) Enabled(_ context.Context, l slog.Level) bool { return l >= h.level.Level() }

func (h leveled) WithAttrs(attrs []slog.Attr) slog.Handler {
	return leveled{h.Handler.WithAttrs(attrs), h.level}
}

func (h leveled) WithGroup(name string) slog.Handler {
	return leveled{h.Handler.WithGroup(name), h.level}
}

// SetLogLevel sets the lowest level that is logged.
func (c *Client) SetLogLevel(l slog.Level) { c.level.Set(l) }

// LogLevel returns the lowest level that is logged.
func (c *Client) LogLevel() slog.Level { return c.level.Level() }
