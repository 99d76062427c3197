package jetstream

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"math"
	"strconv"
	"strings"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"

	"github.com/kvcast/kvcast/internal/journal"
	"github.com/kvcast/kvcast/internal/journal/jetstream/internal/client"
	"github.com/kvcast/kvcast/internal/journal/jetstream/internal/entry"
)

func (d *directory) push(r journal.Record, m *nats.Msg) (journal.Pending, error) {
	d.j.startLoops() // unless Load has
	d.mu.Lock()
	defer d.mu.Unlock()
	err := d.j.refusal()
	if err == nil {
		err = d.canceled[r.Source]
	}
	if err != nil {
		<-d.j.slots
		return journal.Pending{}, err
	}
	a := newInFlight(r, m)
	if len(d.w.appends) == 0 {
		d.j.stall.begin()
	}
	d.w.push(a)
	signal(d.wake)
	return a.ack.Pending(), nil
}

func (d *directory) cancel(source *journal.Source, err error) {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.canceled[source] = err
}

// Headers of an atomic batch.
const (
	headerBatch       = entry.HeaderBatch
	headerBatchSeq    = "Nats-Batch-Sequence"
	headerBatchCommit = "Nats-Batch-Commit"
)

const (
	// minBatch is the number of appends from which an atomic batch is worth its cost, which is that of several syncs.
	minBatch = 16
	// maxBatch is the number of messages that nats-server allows in an atomic batch.
	maxBatch = 1000
	// maxAnswered bounds the messages that one answer acknowledges outside a batch. The first of them waits for the last.
	maxAnswered = 256
)

// publish publishes what was appended since the last call. It returns false if the connection does not take it.
//
// Each message names the seq of the message before it, and the stream refuses it unless that is its last one. So an answer that a message is
// stored acknowledges all messages before it. If one is refused, see refused.
//
// With SyncAlways, nats-server syncs after each message, but once for an atomic batch. So appends that come while others
// are in flight wait, and are then published as one batch (group commit).
func (d *directory) publish() bool {
	d.mu.Lock()
	limit := math.MaxInt
	if d.j.cfg.SyncAlways {
		if limit = maxBatch; d.w.sent > 0 {
			limit = 0
		}
	}
	unsent, first := d.w.next(limit)
	attempt, singly := d.w.attempt, first <= d.w.singly
	d.mu.Unlock()
	batch := d.j.cfg.SyncAlways && !singly && len(unsent) >= minBatch
	most := maxAnswered // messages an answer
	switch {
	case batch:
		most = len(unsent)
	case singly || d.j.cfg.SyncAlways: // a sync takes milliseconds
		most = 1
	}
	answered := 0 // unsent[:answered] were published, and will be answered
	for i, a := range unsent {
		seq := first + uint64(i)
		m := *a.message
		m.Header = nats.Header{entry.Header: m.Header[entry.Header]}
		if i == 0 || !batch {
			m.Header[jetstream.ExpectedLastSeqHeader] = []string{strconv.FormatUint(seq-1, 10)}
		}
		if batch {
			m.Header[headerBatch] = []string{strconv.FormatUint(attempt, 36) + "-" + strconv.FormatUint(first, 36)}
			m.Header[headerBatchSeq] = []string{strconv.Itoa(i + 1)}
		}
		last, n := i == len(unsent)-1, i+1-answered
		if batch && last {
			m.Header[headerBatchCommit] = []string{"1"}
		}
		if last || n == most {
			m.Reply = d.replySubject(attempt, first+uint64(answered), uint64(n))
			answered = i + 1
		}
		if err := d.j.client.Conn.PublishMsg(&m); err != nil {
			d.j.log.Debug("Publishing failed; it is repeated when the connection is back.", "error", err)
			return false
		}
	}
	return true
}

// replySubject returns the subject of the answer to the messages of count entries.
func (d *directory) replySubject(attempt, first, count uint64) string {
	b := append(make([]byte, 0, len(d.j.replies)+62), d.j.replies...)
	b = append(strconv.AppendUint(b, attempt, 10), '.')
	b = append(strconv.AppendUint(b, first, 10), '.')
	return string(strconv.AppendUint(b, count, 10))
}

// parseReplySubject returns the arguments of replySubject.
func (d *directory) parseReplySubject(subject string) (attempt, first, count uint64, err error) {
	a, rest, _ := strings.Cut(subject[len(d.j.replies):], ".")
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
func (d *directory) onReply(m *nats.Msg) {
	attempt, first, count, err := d.parseReplySubject(m.Subject)
	if err != nil {
		return
	}
	var r reply
	if got, ok := acknowledgedSeq(m.Data); ok {
		r.Seq = got
	} else if m.Header.Get("Status") != "" || json.Unmarshal(m.Data, &r) != nil {
		signal(d.suspect) // no server has the stream now
		return
	}
	if r.Error != nil {
		d.mu.Lock()
		current := d.w.attempt == attempt
		d.mu.Unlock()
		if current {
			d.refused(first, count, r.Error.Code, r.Error.Description)
		}
		return
	}
	if want := first + count - 1; r.Seq != want {
		d.j.fail(fmt.Errorf("%w: %s has stored entry %d as %d", ErrUnreadable, d.j.client.Place(), want, r.Seq))
		return
	}
	d.mu.Lock()
	for seq := first; seq < first+count; seq++ {
		d.w.receive(seq)
	}
	d.mu.Unlock()
	d.acknowledge()
	if d.j.cfg.SyncAlways {
		signal(d.wake)
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

// refused handles an error answer to the messages of count entries. Of several, the stream may have stored some, and the answer may not say why it has
// refused the first of the others: each is published with an answer of its own.
func (d *directory) refused(first, count uint64, code jetstream.ErrorCode, description string) {
	switch {
	case count > 1:
		d.mu.Lock()
		d.w.singly = max(d.w.singly, first+count-1)
		d.mu.Unlock()
		signal(d.suspect)
	case code == client.CodeWrongLastSeq, code == client.CodeWrongLastSeqConst, code == client.CodeTooManyRequests:
		signal(d.suspect) // an earlier message was lost or refused, or another process has appended
	default:
		d.j.fail(fmt.Errorf("append entry %d: %w", first, d.j.refusedFor(code, description)))
	}
}

// acknowledge makes the acknowledged appends visible, in order, and resolves them.
func (d *directory) acknowledge() {
	d.acking.Lock()
	defer d.acking.Unlock()
	for {
		d.mu.Lock()
		if d.j.Err() != nil { // fail resolves what is in flight
			d.mu.Unlock()
			return
		}
		a, seq := d.w.pop()
		if a == nil {
			d.mu.Unlock()
			return
		}
		if d.j.stall.restart(); len(d.w.appends) == 0 {
			d.j.stall.end()
		}
		d.mu.Unlock()
		err := d.show(a, seq)
		if err != nil {
			d.j.fail(err)
			seq = 0
		}
		a.ack.Resolve(seq, err)
		<-d.j.slots
	}
}

// show makes an entry visible.
func (d *directory) show(a *inFlight, seq uint64) error {
	d.server.Position.SetNewest(seq)
	_, err := d.j.mirror.Load().Append(d.j.ctx, a.record)
	return err
}

// fail ends the appends in flight.
func (d *directory) fail(err error) {
	d.mu.Lock()
	appends := d.w.appends
	d.w.appends, d.w.sent, d.w.everSent = nil, 0, 0
	d.j.stall.end()
	d.mu.Unlock()
	for _, a := range appends {
		a.ack.Resolve(0, err)
		<-d.j.slots
	}
}
