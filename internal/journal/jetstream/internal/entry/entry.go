// Package entry is the stored form of entries: messages of a stream.
//
// Records flow in, and messages flow out, or the reverse. Guarantee: what is decoded has all bytes of the record, and any other message
// is an error, which is an ErrForeign if kvcast has not written it.
package entry

import (
	"errors"
	"fmt"
	"strconv"
	"strings"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"
	"google.golang.org/protobuf/encoding/protowire"

	"github.com/kvcast/kvcast/internal/core/kvblock"
	"github.com/kvcast/kvcast/internal/journal"
	"github.com/kvcast/kvcast/internal/journal/jetstream/internal/client"
	kvcastv1 "github.com/kvcast/kvcast/proto/kvcast/v1"
)

// Entry is an entry as it is read from the stream.
type Entry struct {
	Seq    uint64
	Worker string
	Tiers  kvblock.Tiers
	// Body and State are those of the Record. The caller must not modify them.
	Body, State []byte
	// Owner is set in an entry without events that says who owns the worker from there on; see jetstream.Journal.Claim.
	Owner *Owner
	// Invalid is why the message is no entry; nil if it is one. The message is then read as an entry without events, so that the seqs stay
	// contiguous: Worker is that of the subject, and all else but Seq is empty.
	Invalid error
}

// ErrForeign is an error of a message that kvcast has not written, since a header is missing that all of its messages have. Any other error
// may mean that an entry is damaged.
var ErrForeign = errors.New("kvcast has not written it")

// HeaderBatch is the header of the messages of an atomic batch. Each other message has a header with the seq that the stream, or its
// subject, must have.
const HeaderBatch = "Nats-Batch-Id"

// Owner is who owns a worker: the instance that appends the worker's entries.
type Owner struct {
	// Instance is the owner; empty if there is none.
	Instance string
	// Writer is the instance that has written the record: the owner, or the former owner, which has handed over.
	Writer string
	// Seq is the record's seq; 0 if no record was ever written.
	Seq uint64
}

// IsReleased reports whether the former owner has handed over.
func (o Owner) IsReleased() bool { return o.Instance != o.Writer }

// OwnerHeader is the header of an ownership record: the owner or noOwner, a space, and the writer.
const (
	OwnerHeader = "Kvcast-Owner"
	noOwner     = "-"
)

// Header is the header of the message that an entry is. Its value is the tiers, the length of the state and the escaped model, with spaces
// between. The message's subject is kvcast.<stream>.<worker>, with the worker's name escaped. Its payload is Record.Body and then
// Record.State. (nats-server scans the headers of a message many times and stores them as they are, so one short header is cheapest.)
const Header = "Kvcast"

// maxToken bounds the length of an escaped worker's name. Any name of at most 341 bytes fits.
const maxToken = 1024

// Codec encodes the entries of a stream as messages, and decodes them.
type Codec struct {
	Prefix     string       // of the subjects, including the last dot
	Instance   string       // the writer of ownership records
	MaxPayload func() int64 // the size of the largest message that the servers take; 0: no limit
}

// Encode returns the message of a record.
func (c *Codec) Encode(r journal.Record) (*nats.Msg, error) {
	token := client.Escape(r.Source.Worker)
	if len(token) > maxToken {
		return nil, fmt.Errorf("name of worker %q is too long: %d bytes when escaped; want at most %d", r.Source.Worker, len(token), maxToken)
	}
	model := client.Escape(r.Source.Model)
	value := strconv.AppendUint(make([]byte, 0, 16+len(model)), uint64(r.Tiers), 10)
	value = strconv.AppendInt(append(value, ' '), int64(len(r.State)), 10)
	value = append(append(value, ' '), model...)
	m := &nats.Msg{
		Subject: c.Prefix + token,
		Header:  nats.Header{Header: {string(value)}},
		Data:    append(append(make([]byte, 0, len(r.Body)+len(r.State)), r.Body...), r.State...),
	}
	if limit, n := c.MaxPayload(), int64(m.Size()); limit > 0 && n > limit {
		return nil, fmt.Errorf("entry of worker %q has %d bytes; nats-server allows %d (max_payload)", r.Source.Worker, n, limit)
	}
	return m, nil
}

// head returns an encoded kvcast.v1.Entry without events.
func head(source journal.Source) []byte {
	b := protowire.AppendTag(nil, kvcastv1.EntryWorkerField, protowire.BytesType)
	b = protowire.AppendString(b, source.Worker)
	b = protowire.AppendTag(b, kvcastv1.EntryModelField, protowire.BytesType)
	return protowire.AppendString(b, source.Model)
}

// Decode decodes a message and also returns the model. The seq and that of the owner are not in the message. The entry of a message that is
// none has Invalid.
func (c *Codec) Decode(m *nats.Msg) (e Entry, model string) {
	e, model, err := c.decode(m)
	if err != nil {
		return Entry{Worker: e.Worker, Invalid: err}, ""
	}
	return e, model
}

// decode is Decode. With an error, it returns the worker of the subject, if the subject is that of a worker.
func (c *Codec) decode(m *nats.Msg) (e Entry, model string, err error) {
	token, ok := strings.CutPrefix(m.Subject, c.Prefix)
	if !ok {
		return e, "", fmt.Errorf("%w: subject %q: want the prefix %q", ErrForeign, m.Subject, c.Prefix)
	}
	worker, err := client.Unescape(token)
	if err == nil && client.Escape(worker) != token {
		err = errors.New("bytes are escaped that need not be")
	}
	if err != nil {
		return e, "", fmt.Errorf("%w: subject %q: %w", ErrForeign, m.Subject, err)
	}
	e.Worker = worker
	if m.Header[Header] == nil || m.Header[jetstream.ExpectedLastSubjSeqHeader] == nil && m.Header[jetstream.ExpectedLastSeqHeader] == nil &&
		m.Header[HeaderBatch] == nil {
		return e, "", fmt.Errorf("%w: it has not the headers of an entry", ErrForeign)
	}
	values := strings.Split(m.Header.Get(Header), " ")
	if len(values) != 3 {
		return e, "", fmt.Errorf("header %s is %q; want three values", Header, values)
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

// EncodeOwner returns the message of an ownership record: an entry without events.
func (c *Codec) EncodeOwner(source journal.Source, owner string) (*nats.Msg, error) {
	m, err := c.Encode(journal.Record{Source: &source, Body: head(source)})
	if err != nil {
		return nil, err
	}
	if owner == "" {
		owner = noOwner
	}
	m.Header[OwnerHeader] = []string{owner + " " + c.Instance}
	return m, nil
}

// decodeOwner decodes the header of a record, without the seq. It returns nil for other entries.
func decodeOwner(m *nats.Msg) (*Owner, error) {
	values := m.Header[OwnerHeader]
	if len(values) == 0 {
		return nil, nil
	}
	owner, writer, found := strings.Cut(values[0], " ")
	if !found || owner == "" || writer == "" {
		return nil, fmt.Errorf("header %s is %q; want an owner and a writer", OwnerHeader, values[0])
	}
	if owner == noOwner {
		owner = ""
	}
	return &Owner{Instance: owner, Writer: writer}, nil
}
