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
	// DefaultIdleTimeout is the idle timeout until a stream is accepted.
	DefaultIdleTimeout = 30 * time.Second
	// If Config.IdleTimeout is 0, the idle timeout is IdleIntervals times the server's progress interval, but at least LeastIdleTimeout.
	IdleIntervals    = 3
	LeastIdleTimeout = 10 * time.Second
	// MinIdleTimeout is the shortest IdleTimeout allowed.
	MinIdleTimeout = 10 * time.Millisecond
	// DefaultBackoffMin and DefaultBackoffMax are the bounds that the contract requires.
	DefaultBackoffMin = time.Second
	DefaultBackoffMax = 30 * time.Second
	// MaxRetryDelay bounds the delay that a server may request with RetryInfo.
	MaxRetryDelay = 5 * time.Minute
)

// GapPolicy is what a subscription does when it cannot continue after its position.
type GapPolicy uint8

const (
	// GapSnapshot continues with a snapshot.
	GapSnapshot GapPolicy = iota
	// GapFail ends the subscription with an *Error whose reason is ReasonPositionCompacted or
	// ReasonEpochMismatch, with a *ViolationError, or with the cause passed to Resnapshot.
	GapFail
)

// Config of a subscription. The zero value subscribes to everything, starting with a snapshot.
type Config struct {
	// Start is where the subscription starts; default FromSnapshot.
	Start Start
	// Filter selects events; nil selects all. Subscribe copies it.
	Filter *kvcastv1.Filter
	// GapPolicy applies if the server does not retain the entries after the position, if it has lost its
	// journal, or if a stream violates the contract.
	GapPolicy GapPolicy
	// IdleTimeout is the time limit to connect and to receive the next message. After it, the stream is replaced. The time in which the caller
	// processes an update does not count. It is at least MinIdleTimeout, and should be several progress intervals of the server
	// (--subscribers-progress, 1 s by default); negative: no limit. Default: DefaultIdleTimeout until the stream is accepted, then
	// IdleIntervals times the progress interval of the server.
	IdleTimeout time.Duration
	// BackoffMin and BackoffMax bound the wait before another stream. The wait doubles with each failure, and up
	// to half of it is subtracted at random. A longer delay that the server requests with RetryInfo takes
	// precedence, up to MaxRetryDelay. With several servers this is the wait after all have failed, and before the next
	// one it is at most a tenth of BackoffMin. Defaults: DefaultBackoffMin and DefaultBackoffMax.
	BackoffMin, BackoffMax time.Duration
	// Digests requests digests from the server, which View.Apply compares with its state. If the server does not
	// support digests, the subscription continues without them.
	Digests bool
	// ClientID names the router for people, in kvcast top and the console: at most 128 bytes of printable ASCII. It need not be unique.
	ClientID string
	// Logger receives a record for each stream that starts or ends; nil: none.
	Logger *slog.Logger
}

// ConfigError reports an invalid field of a Config.
type ConfigError struct {
	// Field is the field's name.
	Field string
	// Problem describes the value and the allowed values.
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
