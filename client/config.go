package client

import (
	"cmp"
	"fmt"
	"log/slog"
	"time"

	kvcastv1 "github.com/kvcast/kvcast/proto/kvcast/v1"
)

// Defaults and limits of a Config.
const (
	// DefaultIdleTimeout is three times the server's default progress interval.
	DefaultIdleTimeout = 30 * time.Second
	// IdleIntervals times the progress interval that the server announces is the idle
	// timeout if the Config has none, but at least LeastIdleTimeout.
	IdleIntervals    = 3
	LeastIdleTimeout = 5 * time.Second
	// MinIdleTimeout is the shortest IdleTimeout allowed.
	MinIdleTimeout = 10 * time.Millisecond
	// DefaultBackoffMin and DefaultBackoffMax are what the contract asks of clients.
	DefaultBackoffMin = time.Second
	DefaultBackoffMax = 30 * time.Second
	// MaxRetryDelay bounds the delay that a server may request with RetryInfo.
	MaxRetryDelay = 5 * time.Minute
)

// GapPolicy is what happens when the stream cannot continue after the position.
type GapPolicy uint8

const (
	// GapSnapshot continues with a snapshot.
	GapSnapshot GapPolicy = iota
	// GapFail ends the subscription: with an *Error whose reason is
	// ReasonPositionCompacted or ReasonEpochMismatch, or with a *ViolationError.
	GapFail
)

// Config of a subscription. The zero value subscribes to everything, starting with a snapshot.
type Config struct {
	// Start is where the subscription starts; default FromSnapshot.
	Start Start
	// Filter selects a part of the stream; nil selects all. It is copied.
	Filter *kvcastv1.Filter
	// GapPolicy applies when the position is not retained any more, the journal was lost,
	// or a stream violates the contract.
	GapPolicy GapPolicy
	// IdleTimeout is how long to wait for a message, connecting included, before the stream is replaced; at
	// least MinIdleTimeout, and it should be several progress intervals of the server (--subscribers-progress,
	// 10 s by default). Negative: no limit. Default: IdleIntervals times the interval that the server
	// announces, DefaultIdleTimeout before it has. The time that the caller spends on an update does not count.
	IdleTimeout time.Duration
	// BackoffMin and BackoffMax bound the wait before another stream. It doubles with each failure, and up to a
	// half is subtracted at random. If the server requests a longer delay with RetryInfo, that applies, up to
	// MaxRetryDelay. Defaults: DefaultBackoffMin and DefaultBackoffMax.
	BackoffMin, BackoffMax time.Duration
	// Digests requests digests from the server, with which View.Apply verifies its state. If
	// the server does not support them, this is logged and the stream continues without.
	Digests bool
	// Logger receives a record for each stream that starts or ends; nil: none.
	Logger *slog.Logger
}

// ConfigError is an invalid field of a Config.
type ConfigError struct {
	// Field is the field's name.
	Field string
	// Problem is the field's value and what is allowed.
	Problem string
}

func (e *ConfigError) Error() string { return fmt.Sprintf("check config: %s %s", e.Field, e.Problem) }

// withDefaults returns the config with its defaults, or a *ConfigError.
func (c Config) withDefaults() (Config, error) {
	c.BackoffMin = cmp.Or(c.BackoffMin, DefaultBackoffMin)
	c.BackoffMax = cmp.Or(c.BackoffMax, max(DefaultBackoffMax, c.BackoffMin))
	switch {
	case c.IdleTimeout > 0 && c.IdleTimeout < MinIdleTimeout:
		return c, &ConfigError{"IdleTimeout", fmt.Sprintf("is %v: want %v or more, or a negative one for no limit", c.IdleTimeout, MinIdleTimeout)}
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
