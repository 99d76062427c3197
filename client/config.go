package client

import (
	"fmt"
	"log/slog"
	"time"

	kvcastv1 "github.com/kvcast/kvcast/proto/kvcast/v1"
)

// Defaults and limits of a Config.
const (
	// DefaultIdleTimeout is three times what a server waits by default before it says
	// Progress.
	DefaultIdleTimeout = 30 * time.Second
	// IdleIntervals is how many times as long as a server says it is silent at most a
	// client waits that has no IdleTimeout, but LeastIdleTimeout at least.
	IdleIntervals    = 3
	LeastIdleTimeout = 5 * time.Second
	// MinIdleTimeout is the shortest IdleTimeout.
	MinIdleTimeout = 10 * time.Millisecond
	// DefaultBackoffMin and DefaultBackoffMax are what the contract asks of clients.
	DefaultBackoffMin = time.Second
	DefaultBackoffMax = 30 * time.Second
	// MaxRetryDelay bounds what a server may ask for with RetryInfo.
	MaxRetryDelay = 5 * time.Minute
)

// GapPolicy is what to do where the stream can not go on from the position.
type GapPolicy uint8

const (
	// GapSnapshot begins anew with a snapshot, and tells so.
	GapSnapshot GapPolicy = iota
	// GapFail ends the subscription: with an *Error whose reason is
	// ReasonPositionCompacted or ReasonEpochMismatch, or with a *ViolationError.
	GapFail
)

// Config is a subscription. The zero value follows everything from a snapshot.
type Config struct {
	// Start is where to begin: FromSnapshot unless set.
	Start Start
	// Filter narrows the stream; nil means everything. It is copied.
	Filter *kvcastv1.Filter
	// GapPolicy is what to do where the position is no longer retained, where the
	// journal was lost, or where what comes is not to be trusted.
	GapPolicy GapPolicy
	// IdleTimeout is how long nothing may come, connecting included, before the
	// connection is given up and another made. Unless set it is IdleIntervals times
	// what the server says it is silent at most (its --subscribers-progress, 10 s by
	// default), and until it has said so DefaultIdleTimeout. One that is set has to be
	// some times as long as well; MinIdleTimeout at least. Negative means for ever. The
	// time that the caller takes for an update does not count.
	IdleTimeout time.Duration
	// BackoffMin and BackoffMax bound the wait before another stream, which doubles
	// with each that fails, and is shortened by up to a half at random so that many
	// clients do not come back at once. A server that asks for more, with RetryInfo,
	// gets it, up to MaxRetryDelay. DefaultBackoffMin and DefaultBackoffMax unless
	// set.
	BackoffMin, BackoffMax time.Duration
	// Digests asks the server to prove a View from time to time: see
	// View.Apply. A server that can not is followed without, which is logged.
	Digests bool
	// Logger gets a line for each stream that begins or ends; nil discards them.
	Logger *slog.Logger
}

// ConfigError is a field of a Config that holds what it must not.
type ConfigError struct {
	// Field is its name.
	Field string
	// Problem is what it holds, and what is allowed.
	Problem string
}

func (e *ConfigError) Error() string { return fmt.Sprintf("check config: %s %s", e.Field, e.Problem) }

// withDefaults returns the config with its defaults, or a *ConfigError.
func (c Config) withDefaults() (Config, error) {
	for _, d := range []struct {
		field *time.Duration
		value time.Duration
	}{{&c.BackoffMin, DefaultBackoffMin}, {&c.BackoffMax, max(DefaultBackoffMax, c.BackoffMin)}} {
		if *d.field == 0 {
			*d.field = d.value
		}
	}
	switch {
	case c.IdleTimeout > 0 && c.IdleTimeout < MinIdleTimeout:
		return c, &ConfigError{"IdleTimeout", fmt.Sprintf("is %v: want %v or more, or a negative one for ever", c.IdleTimeout, MinIdleTimeout)}
	case c.BackoffMin < 0:
		return c, &ConfigError{"BackoffMin", fmt.Sprintf("is %v: want more than 0", c.BackoffMin)}
	case c.BackoffMax < c.BackoffMin:
		return c, &ConfigError{"BackoffMax", fmt.Sprintf("is %v: want BackoffMin, %v, or more", c.BackoffMax, c.BackoffMin)}
	case c.GapPolicy > GapFail:
		return c, &ConfigError{"GapPolicy", fmt.Sprintf("is %d: want GapSnapshot or GapFail", c.GapPolicy)}
	}
	if c.Logger == nil {
		c.Logger = slog.New(slog.DiscardHandler)
	}
	return c, nil
}
