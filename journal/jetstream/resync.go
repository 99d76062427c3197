package jetstream

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"

	"github.com/kvcast/kvcast/journal"
)

const (
	// requestTimeout bounds one request to JetStream.
	requestTimeout = 5 * time.Second
	// ackTimeout is how long acknowledgements may stay away before the journal looks what the stream has.
	ackTimeout = 5 * time.Second
)

// publishLoop publishes appends. When the fate of messages is unknown, it finds out, and publishes again what the
// stream does not have.
func (j *Journal) publishLoop() {
	ticker := time.NewTicker(time.Second)
	defer ticker.Stop()
	suspect := false
	for {
		var faults <-chan struct{}
		if j.server != nil {
			faults = j.server.faults
		}
		select {
		case <-j.wake:
		case <-j.suspect:
			suspect = true
		case <-faults:
			j.checkServer()
		case <-ticker.C:
			suspect = suspect || j.overdue()
		case <-j.failed:
			return
		case <-j.ctx.Done():
			return
		}
		if suspect {
			suspect = !j.resync()
		}
		if !suspect {
			suspect = !j.publish()
		}
	}
}

// overdue reports whether appends wait for an acknowledgement for too long.
func (j *Journal) overdue() bool {
	j.mu.Lock()
	since := j.since
	stalled := j.w.sent > 0 && time.Since(since) > ackTimeout
	j.mu.Unlock()
	if j.server == nil {
		return stalled
	}
	// The embedded server loses no message, so it is slow, or stuck.
	if !stalled {
		j.overdueTicks = 0
		return false
	}
	if j.overdueTicks++; j.overdueTicks >= stuckTicks && time.Since(since) > stuckTime {
		j.failStuck("acknowledged nothing", stuckTime)
		return false
	}
	j.checkServer()
	return false
}

const (
	// stuckTime is the time without an acknowledgement after which the embedded server counts as stuck. stuckTicks ticks of
	// publishLoop in a row must see that it acknowledges nothing: after a pause of the process, only the first one does.
	stuckTime  = time.Minute
	stuckTicks = 10
)

// failStuck fails the journal because the embedded server is stuck: it can deadlock after an error of its files. Only a restart
// of the process ends a deadlock.
func (j *Journal) failStuck(what string, d time.Duration) {
	j.fail(fmt.Errorf("the NATS server in %s has %s for %v, which can follow an error of its files: start kvcast again", j.cfg.Dir, what, d))
}

// checkServer fails the journal if the embedded nats-server cannot write to one of the streams. It does not answer then,
// and does not write to the stream any more before it is started again.
func (j *Journal) checkServer() {
	for _, stream := range []string{j.cfg.Stream, bucketStream(j.cfg.Stream), workersStream(j.cfg.Stream)} {
		if err := j.server.health(stream); err != nil && !errors.Is(err, errNoHealth) {
			j.fail(fmt.Errorf("write to stream %q of %s: %w", stream, j.where(), err))
		}
	}
}

// resync reads which appends in flight the stream has, acknowledges them, and makes the rest be published again. It
// returns false if the stream cannot be read now.
func (j *Journal) resync() bool {
	j.mu.Lock()
	acked, sent := j.w.acked, j.w.everSent
	j.mu.Unlock()
	s, info, err := j.streamInfo(j.ctx)
	switch {
	case errors.Is(err, jetstream.ErrStreamNotFound):
		j.fail(fmt.Errorf("%w: %s is gone", ErrUnreadable, j.place()))
		return true
	case err != nil:
		j.log.Debug("The stream does not answer.", "error", err)
		return false
	}
	last := info.State.LastSeq
	switch {
	case last < acked:
		j.fail(fmt.Errorf("%w: %s has lost the acknowledged entries %d to %d", ErrUnreadable, j.place(), last+1, acked))
		return true
	case last > acked+uint64(sent):
		j.fail(fmt.Errorf("%w: %s has entry %d, which this process did not append", journal.ErrFenced, j.place(), last))
		return true
	}
	for seq := acked + 1; seq <= last; seq++ {
		mine, err := j.isMine(s, seq)
		switch {
		case err != nil:
			j.log.Debug("A message of the stream cannot be read.", "seq", seq, "error", err)
			return false
		case !mine:
			j.fail(fmt.Errorf("%w: entry %d of %s was appended by another process", journal.ErrFenced, seq, j.place()))
			return true
		}
	}
	j.mu.Lock()
	for seq := acked + 1; seq <= last; seq++ {
		j.w.receive(seq)
	}
	j.mu.Unlock()
	j.acknowledge()
	j.mu.Lock()
	j.w.retry()
	j.mu.Unlock()
	return true
}

// isMine reports whether the message of a seq is the one in flight. An append that was acknowledged meanwhile is.
func (j *Journal) isMine(s jetstream.Stream, seq uint64) (bool, error) {
	ctx, cancel := context.WithTimeout(j.ctx, requestTimeout)
	defer cancel()
	m, err := s.GetMsg(ctx, seq)
	if err != nil {
		return false, err
	}
	j.mu.Lock()
	defer j.mu.Unlock()
	if seq <= j.w.acked || j.err != nil {
		return true, nil
	}
	return j.w.appends[seq-j.w.acked-1].equal(m.Subject, m.Header, m.Data), nil
}

// connect connects to Config.Servers. The connection is restored for ever.
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
	return j.dial(func(o *nats.Options) error {
		o.Servers = j.cfg.Servers
		return nil
	}, opts)
}

func (j *Journal) dial(to nats.Option, opts []nats.Option) error {
	conn, err := nats.Connect("", append(opts, to)...)
	if err != nil {
		return err
	}
	j.conn = conn
	j.js, err = jetstream.New(conn)
	return err
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
			if errors.Is(err, nats.ErrPermissionViolation) {
				j.denied.Store(&err)
			}
			j.log.Warn("NATS reports an error.", "error", err)
		}),
	}
}
