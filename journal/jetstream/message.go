package jetstream

import (
	"encoding/base64"
	"errors"
	"fmt"
	"net/url"
	"strconv"
	"strings"

	"github.com/nats-io/nats.go"

	"github.com/kvcast/kvcast/journal"
)

// Headers of the message that an entry is. Its subject is kvcast.<stream>.<worker>, with the worker's name escaped, and
// its payload is Record.Body.
const (
	headerTiers = "Kvcast-Tiers" // decimal; absent if 0
	headerModel = "Kvcast-Model" // escaped; absent if empty
	headerState = "Kvcast-State" // base64 without padding; absent if empty
	// headerStateBytes is the length of a state that is too long for a header. The state then follows the body in the
	// payload.
	headerStateBytes = "Kvcast-State-Bytes"
)

const (
	// maxToken bounds the length of an escaped worker's name. Any name of at most 341 bytes fits.
	maxToken = 1024
	// maxHeaderState bounds a state in a header, in bytes before base64. nats-server allows 64 KiB of headers.
	maxHeaderState = 32 << 10
)

// escape encodes any string, injectively, as letters, digits, hyphens, underscores and %XX: one token of a subject, and
// a header's value. The empty string becomes a lone %.
func escape(s string) string {
	if s == "" {
		return "%"
	}
	var b strings.Builder
	for i := range len(s) {
		switch c := s[i]; {
		case 'a' <= c && c <= 'z', 'A' <= c && c <= 'Z', '0' <= c && c <= '9', c == '-', c == '_':
			b.WriteByte(c)
		default:
			fmt.Fprintf(&b, "%%%02X", c)
		}
	}
	return b.String()
}

func unescape(s string) (string, error) {
	if s == "%" {
		return "", nil
	}
	return url.PathUnescape(s)
}

// encode returns the message of a record. The message references the record's body.
func (j *Journal) encode(r journal.Record) (*nats.Msg, error) {
	token := escape(r.Source.Worker)
	if len(token) > maxToken {
		return nil, fmt.Errorf("name of worker %q is too long: %d bytes when escaped; want at most %d", r.Source.Worker, len(token), maxToken)
	}
	m := &nats.Msg{Subject: j.subjects + token, Data: r.Body, Header: make(nats.Header, 4)}
	if r.Tiers != 0 {
		m.Header[headerTiers] = []string{strconv.Itoa(int(r.Tiers))}
	}
	if r.Source.Model != "" {
		m.Header[headerModel] = []string{escape(r.Source.Model)}
	}
	switch n := len(r.State); {
	case n > maxHeaderState:
		m.Header[headerStateBytes] = []string{strconv.Itoa(n)}
		m.Data = append(append(make([]byte, 0, len(r.Body)+n), r.Body...), r.State...)
	case n > 0:
		m.Header[headerState] = []string{base64.RawStdEncoding.EncodeToString(r.State)}
	}
	if limit, n := j.conn.MaxPayload(), int64(m.Size()); limit > 0 && n > limit {
		return nil, fmt.Errorf("entry of worker %q has %d bytes; nats-server allows %d (max_payload)", r.Source.Worker, n, limit)
	}
	return m, nil
}

// decode decodes a message and also returns the model.
func (j *Journal) decode(m *nats.Msg) (e Entry, model string, err error) {
	token, ok := strings.CutPrefix(m.Subject, j.subjects)
	if !ok {
		return e, "", fmt.Errorf("subject %q: want the prefix %q", m.Subject, j.subjects)
	}
	if e.Worker, err = unescape(token); err != nil {
		return e, "", fmt.Errorf("subject %q: %w", m.Subject, err)
	}
	e.Body = m.Data
	for name, values := range m.Header {
		value := values[0]
		switch name {
		case headerTiers:
			var tiers uint64
			tiers, err = strconv.ParseUint(value, 10, 8)
			e.Tiers = journal.Tiers(tiers)
		case headerModel:
			model, err = unescape(value)
		case headerState:
			e.State, err = base64.RawStdEncoding.DecodeString(value)
		case headerStateBytes:
			var n int
			if n, err = strconv.Atoi(value); err == nil && (n < 0 || n > len(m.Data)) {
				err = errors.New("larger than the message")
			}
			if err == nil {
				body := len(m.Data) - n
				e.Body, e.State = m.Data[:body:body], m.Data[body:]
			}
		}
		if err != nil {
			return e, "", fmt.Errorf("header %s %q: %w", name, value, err)
		}
	}
	return e, model, nil
}
