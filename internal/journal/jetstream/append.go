package jetstream

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"math"
	"strconv"
	"strings"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"

	"github.com/kvcast/kvcast/internal/journal"
	"github.com/kvcast/kvcast/internal/journal/jetstream/internal/client"
)

// Append starts to append an entry. It blocks while Config.InFlight appends are not acknowledged, until ctx ends or the
// journal fails.
func (j *Journal) Append(ctx context.Context, r journal.Record) (journal.Pending, error) {
	if j.cfg.Follow {
		return journal.Pending{}, errFollowing
	}
	if j.shared == nil {
		j.startLoops()
	}
	m, err := j.encode(r)
	if err == nil {
		select {
		case j.slots <- struct{}{}:
		case <-ctx.Done():
			err = ctx.Err()
		case <-j.closing:
			return journal.Pending{}, journal.ErrClosed
		case <-j.failed:
			return journal.Pending{}, j.Err()
		}
	}
	if j.shared != nil {
		if err != nil { // no later entry of the worker may be visible without this one
			j.shared.cancel(r.Source, err)
			return journal.Pending{}, err
		}
		return j.shared.append(r, m)
	}
	j.mu.Lock()
	defer j.mu.Unlock()
	switch {
	case err != nil: // no later entry of the source may be visible without this one
		j.canceled[r.Source] = err
		return journal.Pending{}, err
	case j.refusing:
		err = journal.ErrClosed
	case j.err != nil:
		err = j.err
	default:
		err = j.canceled[r.Source]
	}
	if err != nil {
		<-j.slots
		return journal.Pending{}, err
	}
	r.Body, r.State = m.Data[:len(r.Body)], nil // the caller may reuse its memory
	a := &inFlight{record: r, message: m, ack: journal.NewAck()}
	if len(j.w.appends) == 0 && j.since.IsZero() {
		j.since = time.Now()
	}
	j.w.push(a)
	signal(j.wake)
	return a.ack.Pending(), nil
}

// refusal returns why no append is taken any more; nil if appends are.
func (j *Journal) refusal() error {
	j.mu.Lock()
	defer j.mu.Unlock()
	if j.refusing {
		return journal.ErrClosed
	}
	return j.err
}

// signal makes a loop that waits for c run once.
func signal(c chan struct{}) {
	select {
	case c <- struct{}{}:
	default:
	}
}

// Headers of an atomic batch.
const (
	headerBatch       = "Nats-Batch-Id"
	headerBatchSeq    = "Nats-Batch-Sequence"
	headerBatchCommit = "Nats-Batch-Commit"
)

const (
	// minBatch is the number of appends from which an atomic batch is worth its cost, which is that of several syncs.
	minBatch = 16
	// maxBatch is the number of messages that nats-server allows in an atomic batch.
	maxBatch = 1000
)

// publish publishes what was appended since the last call. It returns false if the connection does not take it.
//
// With SyncAlways, nats-server syncs after each message, but once for an atomic batch. So appends that come while others
// are in flight wait, and are then published as one batch (group commit).
func (j *Journal) publish() bool {
	j.mu.Lock()
	limit := math.MaxInt
	if j.cfg.SyncAlways {
		if limit = maxBatch; j.w.sent > 0 {
			limit = 0
		}
	}
	unsent, first := j.w.next(limit)
	attempt, batches := j.w.attempt, j.cfg.SyncAlways && first > j.w.singly
	j.mu.Unlock()
	batch := batches && len(unsent) >= minBatch
	for i, a := range unsent {
		seq := first + uint64(i)
		m := *a.message
		m.Header = nats.Header{header: m.Header[header]}
		if i == 0 || !batch {
			m.Header[jetstream.ExpectedLastSeqHeader] = []string{strconv.FormatUint(seq-1, 10)}
		}
		if batch {
			m.Header[headerBatch] = []string{strconv.FormatUint(attempt, 36) + "-" + strconv.FormatUint(first, 36)}
			m.Header[headerBatchSeq] = []string{strconv.Itoa(i + 1)}
		}
		switch last := i == len(unsent)-1; {
		case !batch:
			m.Reply = j.replySubject(attempt, seq, 1)
		case last:
			m.Header[headerBatchCommit] = []string{"1"}
			m.Reply = j.replySubject(attempt, first, uint64(len(unsent)))
		}
		if err := j.client.Conn.PublishMsg(&m); err != nil {
			j.log.Debug("Publishing failed; it is repeated when the connection is back.", "error", err)
			return false
		}
	}
	return true
}

// replySubject returns the subject of the answer to the messages of count entries.
func (j *Journal) replySubject(attempt, first, count uint64) string {
	b := append(make([]byte, 0, len(j.replies)+62), j.replies...)
	b = append(strconv.AppendUint(b, attempt, 10), '.')
	b = append(strconv.AppendUint(b, first, 10), '.')
	return string(strconv.AppendUint(b, count, 10))
}

// parseReplySubject returns the arguments of replySubject.
func (j *Journal) parseReplySubject(subject string) (attempt, first, count uint64, err error) {
	a, rest, _ := strings.Cut(subject[len(j.replies):], ".")
	f, c, _ := strings.Cut(rest, ".")
	attempt, err1 := strconv.ParseUint(a, 10, 64)
	first, err2 := strconv.ParseUint(f, 10, 64)
	count, err3 := strconv.ParseUint(c, 10, 64)
	return attempt, first, count, errors.Join(err1, err2, err3)
}

// reply is JetStream's answer to a published message.
type reply struct {
	Seq   uint64 `json:"seq"`
	Error *struct {
		Code        jetstream.ErrorCode `json:"err_code"`
		Description string              `json:"description"`
	} `json:"error"`
}

// onReply handles the answer to a published message or batch. Answers come in the order of the messages.
func (j *Journal) onReply(m *nats.Msg) {
	attempt, first, count, err := j.parseReplySubject(m.Subject)
	if err != nil {
		return
	}
	var r reply
	if got, ok := acknowledgedSeq(m.Data); ok {
		r.Seq = got
	} else if m.Header.Get("Status") != "" || json.Unmarshal(m.Data, &r) != nil {
		signal(j.suspect) // no server has the stream now
		return
	}
	if r.Error != nil {
		j.mu.Lock()
		current := j.w.attempt == attempt
		j.mu.Unlock()
		if current {
			j.refused(first, r.Error.Code, r.Error.Description)
		}
		return
	}
	if want := first + count - 1; r.Seq != want {
		j.fail(fmt.Errorf("%w: %s has stored entry %d as %d", ErrUnreadable, j.client.Place(), want, r.Seq))
		return
	}
	j.mu.Lock()
	for seq := first; seq < first+count; seq++ {
		j.w.receive(seq)
	}
	j.mu.Unlock()
	j.acknowledge()
	if j.cfg.SyncAlways {
		signal(j.wake)
	}
}

// acknowledgedSeq is a fast path for {"stream":"...","seq":N}, which is what JetStream answers.
func acknowledgedSeq(data []byte) (uint64, bool) {
	_, rest, ok := bytes.Cut(data, []byte(`,"seq":`))
	digits, end := bytes.CutSuffix(rest, []byte("}"))
	if !ok || !end || !bytes.HasPrefix(data, []byte(`{"stream":`)) {
		return 0, false
	}
	seq, err := strconv.ParseUint(string(digits), 10, 64)
	return seq, err == nil
}

// refused handles an error answer to a published message.
func (j *Journal) refused(seq uint64, code jetstream.ErrorCode, description string) {
	switch code {
	case client.CodeWrongLastSeq, client.CodeWrongLastSeqConst, client.CodeTooManyRequests:
		// An earlier message was lost or refused, or another process has appended.
		signal(j.suspect)
	case client.CodeIncompleteBatch, client.CodeTooManyBatches:
		// nats-server has dropped the batch, and does not say why. A message of its own is refused with the cause.
		j.mu.Lock()
		j.w.singly = seq + maxBatch
		j.mu.Unlock()
		signal(j.suspect)
	default:
		j.fail(fmt.Errorf("append entry %d: %w", seq, j.refusedFor(code, description)))
	}
}

// refusedFor returns the error of an entry that the stream has refused.
func (j *Journal) refusedFor(code jetstream.ErrorCode, description string) error {
	if client.IsNoSpace(code) {
		return j.client.NoSpace(j.ctx, j.cfg.Stream, description)
	}
	return fmt.Errorf("JetStream error %d: %s", code, description)
}

// acknowledge makes the acknowledged appends visible, in order, and resolves them.
func (j *Journal) acknowledge() {
	j.acking.Lock()
	defer j.acking.Unlock()
	for {
		j.mu.Lock()
		if j.err != nil {
			j.mu.Unlock()
			return
		}
		a, seq := j.w.pop()
		if a == nil {
			j.mu.Unlock()
			return
		}
		if j.since = time.Now(); len(j.w.appends) == 0 {
			j.since = time.Time{}
		}
		j.mu.Unlock()
		err := j.show(a, seq)
		if err != nil {
			j.fail(err)
			seq = 0
		}
		a.ack.Resolve(seq, err)
		<-j.slots
	}
}

// show makes an entry visible.
func (j *Journal) show(a *inFlight, seq uint64) error {
	if j.server != nil {
		j.server.Position.SetNewest(seq)
	}
	_, err := j.mirror.Load().Append(j.ctx, a.record)
	return err
}

// fail fails the journal: the appends in flight and all later ones. Only the first error counts.
func (j *Journal) fail(err error) {
	j.mu.Lock()
	if j.err != nil {
		j.mu.Unlock()
		return
	}
	j.err = err
	appends := j.w.appends
	j.w.appends, j.w.sent, j.w.everSent, j.since = nil, 0, 0, time.Time{}
	j.mu.Unlock()
	close(j.failed)
	if !errors.Is(err, context.Canceled) {
		j.log.Error("The journal has failed: it accepts no entries until it is opened again.", "error", err)
	}
	if j.shared != nil {
		j.shared.fail(err)
	}
	for _, a := range appends {
		a.ack.Resolve(0, err)
		<-j.slots
	}
}
