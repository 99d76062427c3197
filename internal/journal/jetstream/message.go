package jetstream

import (
	"fmt"
	"strconv"
	"strings"

	"github.com/nats-io/nats.go"
	"google.golang.org/protobuf/encoding/protowire"

	"github.com/kvcast/kvcast/internal/core/kvblock"
	"github.com/kvcast/kvcast/internal/journal"
	"github.com/kvcast/kvcast/internal/journal/jetstream/internal/client"
	kvcastv1 "github.com/kvcast/kvcast/proto/kvcast/v1"
)

// header is the header of the message that an entry is. Its value is the tiers, the length of the state and the escaped
// model, with spaces between. The message's subject is kvcast.<stream>.<worker>, with the worker's name escaped. Its
// payload is Record.Body and then Record.State. (nats-server scans the headers of a message many times and stores them as
// they are, so one short header is cheapest.)
const header = "Kvcast"

// maxToken bounds the length of an escaped worker's name. Any name of at most 341 bytes fits.
const maxToken = 1024

// encode returns the message of a record.
func (j *Journal) encode(r journal.Record) (*nats.Msg, error) {
	token := client.Escape(r.Source.Worker)
	if len(token) > maxToken {
		return nil, fmt.Errorf("name of worker %q is too long: %d bytes when escaped; want at most %d", r.Source.Worker, len(token), maxToken)
	}
	value := fmt.Sprintf("%d %d %s", r.Tiers, len(r.State), client.Escape(r.Source.Model))
	m := &nats.Msg{
		Subject: j.subjects + token,
		Header:  nats.Header{header: {value}},
		Data:    append(append(make([]byte, 0, len(r.Body)+len(r.State)), r.Body...), r.State...),
	}
	if limit, n := j.client.Conn.MaxPayload(), int64(m.Size()); limit > 0 && n > limit {
		return nil, fmt.Errorf("entry of worker %q has %d bytes; nats-server allows %d (max_payload)", r.Source.Worker, n, limit)
	}
	return m, nil
}

// entryHead returns an encoded kvcast.v1.Entry without events.
func entryHead(source journal.Source) []byte {
	b := protowire.AppendTag(nil, kvcastv1.EntryWorkerField, protowire.BytesType)
	b = protowire.AppendString(b, source.Worker)
	b = protowire.AppendTag(b, kvcastv1.EntryModelField, protowire.BytesType)
	return protowire.AppendString(b, source.Model)
}

// MaxRecordBytes returns the size of the largest message that the servers take (max_payload): a record's body and state, the
// escaped names of worker and model, and some 50 bytes.
func (j *Journal) MaxRecordBytes() int { return int(j.client.Conn.MaxPayload()) }

// decode decodes a message and also returns the model.
func (j *Journal) decode(m *nats.Msg) (e Entry, model string, err error) {
	token, ok := strings.CutPrefix(m.Subject, j.subjects)
	if !ok {
		return e, "", fmt.Errorf("subject %q: want the prefix %q", m.Subject, j.subjects)
	}
	if e.Worker, err = client.Unescape(token); err != nil {
		return e, "", fmt.Errorf("subject %q: %w", m.Subject, err)
	}
	values := strings.Split(m.Header.Get(header), " ")
	if len(values) != 3 {
		return e, "", fmt.Errorf("header %s is %q; want three values", header, values)
	}
	tiers, err := strconv.ParseUint(values[0], 10, 8)
	if err != nil {
		return e, "", fmt.Errorf("tiers: %w", err)
	}
	state, err := strconv.Atoi(values[1])
	if err != nil || state < 0 || state > len(m.Data) {
		return e, "", fmt.Errorf("state of %q bytes in a message of %d", values[1], len(m.Data))
	}
	if model, err = client.Unescape(values[2]); err != nil {
		return e, "", fmt.Errorf("model: %w", err)
	}
	e.Tiers = kvblock.Tiers(tiers)
	body := len(m.Data) - state
	e.Body, e.State = m.Data[:body:body], m.Data[body:]
	e.Owner, err = decodeOwner(m)
	return e, model, err
}
