package jetstream

import (
	"errors"
	"fmt"
	"strings"
	"time"

	"github.com/nats-io/nats.go"
)

// options returns the options of every connection.
func (j *Journal) options() []nats.Option {
	return []nats.Option{
		nats.Name("kvcast"),
		nats.MaxReconnects(-1),
		nats.ReconnectBufSize(-1), // what is in flight is published again by resync
		nats.ReconnectWait(500 * time.Millisecond),
		nats.PingInterval(2 * time.Second), // a connection that has ended unnoticed is replaced after two that are not answered
		nats.DisconnectErrHandler(func(_ *nats.Conn, err error) {
			if j.Err() == nil {
				j.stall.begin()
			}
			if j.ctx.Err() == nil {
				j.log.Warn("The connection to the journal's servers is lost; entries wait for it.", "error", err)
			}
		}),
		nats.ReconnectHandler(func(*nats.Conn) {
			j.log.Info("The connection to the journal's servers is back.")
			j.mode.reconnected()
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
