package jetstream

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"time"

	"github.com/nats-io/nats.go"

	"github.com/kvcast/kvcast/internal/journal/jetstream/embedded"
	"github.com/kvcast/kvcast/internal/journal/jetstream/internal/checkpoints"
	"github.com/kvcast/kvcast/internal/journal/jetstream/internal/kv"
)

// openEmbedded starts a nats-server in Config.Dir and connects to it.
func (j *Journal) openEmbedded(ctx context.Context) error {
	entries, checkpoints, registrations := j.cfg.Stream, checkpoints.Stream(j.cfg.Stream), kv.WorkersStream(j.cfg.Stream)
	var err error
	j.server, err = embedded.Start(embedded.Config{
		Dir: j.cfg.Dir, SyncAlways: j.cfg.SyncAlways, SyncInterval: j.cfg.SyncInterval, Log: j.log,
	}, entries, checkpoints, registrations)
	if err != nil {
		return fmt.Errorf("open journal: %w", err)
	}
	for _, streams := range [][]string{
		{entries, checkpoints}, // checkpoints belong to the entries, so they are moved away together
		{checkpoints},
		{registrations},
	} {
		if _, err := j.server.MoveUnreadable(streams...); err != nil {
			return fmt.Errorf("open journal: %w", err)
		}
	}
	if err := ctx.Err(); err != nil {
		return err
	}
	return j.client.Connect(nats.InProcessServer(j.server.NATS()), j.options()...)
}

// connect connects to Config.Servers. It reconnects without a limit of attempts.
func (j *Journal) connect() error {
	opts := j.options()
	if j.cfg.Credentials != "" {
		opts = append(opts, nats.UserCredentials(j.cfg.Credentials))
	}
	if j.cfg.TLSCA != "" {
		opts = append(opts, nats.RootCAs(j.cfg.TLSCA))
	}
	if j.cfg.TLSCert != "" {
		opts = append(opts, nats.ClientCert(j.cfg.TLSCert, j.cfg.TLSKey))
	}
	return j.client.Connect(func(o *nats.Options) error {
		o.Servers = j.cfg.Servers
		return nil
	}, opts...)
}

// options returns the options of every connection.
func (j *Journal) options() []nats.Option {
	return []nats.Option{
		nats.Name("kvcast"),
		nats.MaxReconnects(-1),
		nats.ReconnectBufSize(-1), // what is in flight is published again by resync
		nats.ReconnectWait(500 * time.Millisecond),
		nats.PingInterval(2 * time.Second), // a connection that has ended unnoticed is replaced after two that are not answered
		nats.DisconnectErrHandler(func(_ *nats.Conn, err error) {
			j.mu.Lock()
			if j.since.IsZero() && j.err == nil {
				j.since = time.Now()
			}
			j.mu.Unlock()
			if j.ctx.Err() == nil {
				j.log.Warn("The connection to the journal's servers is lost; entries wait for it.", "error", err)
			}
		}),
		nats.ReconnectHandler(func(*nats.Conn) {
			j.mu.Lock()
			if len(j.w.appends) == 0 {
				j.since = time.Time{}
			}
			j.mu.Unlock()
			j.log.Info("The connection to the journal's servers is back.")
			if sub := j.following.Load(); sub != nil { // it may have missed deliveries
				_ = sub.Unsubscribe()
			}
			signal(j.suspect)
		}),
		nats.ErrorHandler(func(_ *nats.Conn, _ *nats.Subscription, err error) {
			j.log.Warn("NATS reports an error.", "error", err)
			if !errors.Is(err, nats.ErrPermissionViolation) {
				return
			}
			j.client.Deny(err)
			if strings.Contains(err.Error(), `Publish to "`+j.subjects) { // an entry, which is never answered
				j.fail(fmt.Errorf("append an entry: %w; permit the NATS user to publish to %q", err, j.subjects+">"))
			}
		}),
	}
}
