package jetstream

import (
	"context"
	"crypto/rand"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"

	"github.com/kvcast/kvcast/journal"
)

// handOverTimeout bounds how long a journal waits for its appends in flight before it hands over to the next owner.
const handOverTimeout = 2 * time.Second

// owner is a process that uses the streams in Servers. Open claims them: it stores its owner in the object store of the
// checkpoints, under a subject of its own. Each description of a checkpoint is published with the seq that this message
// must have, so that the servers refuse those of former owners. In a directory, the lock has the same effect.
type owner struct {
	Token string    `json:"token"` // random
	Host  string    `json:"host"`
	PID   int       `json:"pid"`
	Since time.Time `json:"since"`

	seq uint64 // of the message
}

func (o owner) String() string {
	return fmt.Sprintf("process %d on host %q, since %s", o.PID, o.Host, o.Since.Format(time.RFC3339))
}

// handOverSubject is where a process asks a former owner to stop. It is none of the subjects of entries, which have three
// tokens.
func (j *Journal) handOverSubject(token string) string { return j.subjects + "owner." + token }

// claim makes this process the owner of the streams, and waits until the former owner has stopped, if there is one that
// runs.
func (c *Checkpoints) claim(ctx context.Context) error {
	host, err := os.Hostname()
	if err != nil {
		return err
	}
	me := owner{Token: rand.Text(), Host: host, PID: os.Getpid(), Since: time.Now().UTC()}
	data, err := json.Marshal(me)
	if err != nil {
		return err
	}
	if _, err := c.j.conn.Subscribe(c.j.handOverSubject(me.Token), c.j.handOver); err != nil {
		return err
	}
	for {
		former, err := c.readOwner(ctx)
		if err != nil && !errors.Is(err, jetstream.ErrMsgNotFound) {
			return err
		}
		m := &nats.Msg{Subject: c.ownerSubject(), Data: data, Header: nats.Header{jetstream.MsgRollup: {jetstream.MsgRollupSubject}}}
		ack, err := c.j.js.PublishMsg(ctx, m, jetstream.WithExpectLastSequencePerSubject(former.seq))
		if isWrongLastSeq(err) {
			continue // another process has claimed the streams meanwhile
		}
		if err != nil {
			return err
		}
		me.seq = ack.Sequence
		c.owner = me
		if former.Token != "" {
			c.j.awaitHandOver(ctx, former, data)
		}
		return nil
	}
}

func (c *Checkpoints) ownerSubject() string { return c.prefix + "owner" }

// readOwner returns the owner of the streams.
func (c *Checkpoints) readOwner(ctx context.Context) (o owner, err error) {
	m, err := c.stream.GetLastMsgForSubject(ctx, c.ownerSubject())
	if err != nil {
		return o, err
	}
	o.seq = m.Sequence
	if json.Unmarshal(m.Data, &o) != nil {
		o.Token = "" // it is damaged: there is nobody to ask
	}
	return o, nil
}

// checkOwner returns an ErrFenced if another process is the owner now.
func (c *Checkpoints) checkOwner(ctx context.Context) error {
	if c.owner.Token == "" {
		return nil
	}
	ctx, cancel := context.WithTimeout(ctx, requestTimeout)
	defer cancel()
	switch o, err := c.readOwner(ctx); {
	case errors.Is(err, jetstream.ErrMsgNotFound):
		return fmt.Errorf("%w: the record of the owner of %s is gone", journal.ErrFenced, c.j.place())
	case err != nil:
		return err
	case o.Token != c.owner.Token:
		return c.j.fencedBy(o)
	}
	return nil
}

func (j *Journal) fencedBy(o owner) error {
	return fmt.Errorf("%w: %s is used by %v", journal.ErrFenced, j.place(), o)
}

// awaitHandOver asks a former owner to stop, and waits until it has. It does not wait for one that does not run.
func (j *Journal) awaitHandOver(ctx context.Context, former owner, data []byte) {
	ctx, cancel := context.WithTimeout(ctx, 2*handOverTimeout)
	defer cancel()
	_, err := j.conn.RequestWithContext(ctx, j.handOverSubject(former.Token), data)
	switch {
	case err == nil:
		j.log.Warn("Another process used the journal, and has stopped to append: this one continues. Give each kvcast a stream of its own.",
			"former", former.String())
	case !errors.Is(err, nats.ErrNoResponders):
		j.log.Warn("The process that used the journal before does not answer. If it appends before this one does, this one ends with an error.",
			"former", former.String(), "error", err)
	}
}

// handOver answers the next owner of the streams.
func (j *Journal) handOver(m *nats.Msg) {
	var next owner
	if json.Unmarshal(m.Data, &next) == nil && j.yield(j.fencedBy(next)) {
		_ = m.Respond(nil)
	}
}

// yield fails the journal when its appends in flight are acknowledged, so that the next owner finds them. It returns false
// if the journal was closed.
func (j *Journal) yield(err error) bool {
	j.yielding.Do(func() {
		timeout := time.NewTimer(handOverTimeout)
		defer timeout.Stop()
		for range cap(j.slots) { // with all slots taken, nothing is in flight
			select {
			case j.slots <- struct{}{}:
				continue
			case <-j.failed:
			case <-j.ctx.Done():
			case <-timeout.C:
			}
			break
		}
		if j.ctx.Err() == nil {
			j.fail(err)
		}
	})
	return j.ctx.Err() == nil
}

func isWrongLastSeq(err error) bool {
	var apiErr *jetstream.APIError
	return errors.As(err, &apiErr) && (apiErr.ErrorCode == codeWrongLastSeq || apiErr.ErrorCode == codeWrongLastSeqConst)
}
