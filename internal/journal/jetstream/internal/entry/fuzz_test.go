package entry

import (
	"bytes"
	"net/http"
	"slices"
	"strings"
	"testing"
	"unicode"

	"github.com/google/go-cmp/cmp"
	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"

	"github.com/kvcast/kvcast/internal/core/kvblock"
	"github.com/kvcast/kvcast/internal/journal"
	"github.com/kvcast/kvcast/internal/journal/jetstream/internal/client"
)

// newDecoder returns a codec of an instance.
func newDecoder(instance string) *Codec {
	return &Codec{Prefix: "kvcast.s.", Instance: instance, MaxPayload: func() int64 { return 0 }}
}

// wantOneLine fails the test unless an error is a line that can be shown on a terminal.
func wantOneLine(t *testing.T, err error) {
	t.Helper()
	if text := err.Error(); text == "" || strings.ContainsFunc(text, unicode.IsControl) {
		t.Errorf("an error that is not one line: %q", text)
	}
}

// published adds the header with which a message is published.
func published(m *nats.Msg) *nats.Msg {
	m.Header[jetstream.ExpectedLastSubjSeqHeader] = []string{"0"}
	return m
}

// FuzzMessage decodes messages as a consumer delivers them. What is decoded has all bytes of the message, and is the same
// after it is encoded and decoded again.
func FuzzMessage(f *testing.F) {
	c := newDecoder("i")
	add := func(m *nats.Msg, err error) {
		var headers bytes.Buffer
		if err != nil {
			f.Fatal(err)
		}
		if err := http.Header(published(m).Header).Write(&headers); err != nil {
			f.Fatal(err)
		}
		f.Add(m.Subject, "NATS/1.0\r\n"+headers.String()+"\r\n", m.Data)
	}
	for _, source := range []journal.Source{{Worker: "w", Model: "m"}, {},
		{Worker: "10.0.0.1:8000/\xff", Model: "Qwen/Qwen3 0.6B"}} {
		add(c.Encode(journal.Record{Source: &source, Tiers: 6, Body: head(source), State: []byte("state")}))
		add(c.EncodeOwner(source, "other"))
		add(c.EncodeOwner(source, ""))
	}
	const head = "NATS/1.0\r\nNats-Expected-Last-Subject-Sequence: 0\r\nKvcast: "
	for _, message := range []struct{ subject, value string }{
		{"kvcast.other.w", "0 0 m"}, {"kvcast.s.%zz", "0 0 m"}, {"kvcast.s.w", "0 0 %zz"}, {"kvcast.s.w", "0 0"},
		{"kvcast.s.w", "256 0 m"},
		{"kvcast.s.w", "-1 0 m"}, {"kvcast.s.w", "0 5 m"}, {"kvcast.s.w", "0 -1 m"}, {"kvcast.s.w", "0 9223372036854775808 m"},
		{"kvcast.s.w", ""},
	} {
		f.Add(message.subject, head+message.value+"\r\n\r\n", []byte("body"))
	}
	for _, owner := range []string{"", " ", "a", "a ", " b", "- b", "a b c"} {
		f.Add("kvcast.s.w", head+"0 0 m\r\nKvcast-Owner: "+owner+"\r\n\r\n", []byte("body"))
	}
	f.Fuzz(func(t *testing.T, subject, headers string, data []byte) {
		header, _ := nats.DecodeHeadersMsg([]byte(headers)) // after an error, nats.go delivers the message without headers
		m := &nats.Msg{Subject: subject, Header: header, Data: data}
		e, model := c.Decode(m)
		if e.Invalid != nil {
			wantOneLine(t, e.Invalid)
			if e.Body != nil || e.State != nil || e.Owner != nil || e.Tiers != 0 || model != "" {
				t.Errorf("an invalid entry is not empty: %+v", e)
			}
			return
		}
		if !bytes.Equal(slices.Concat(e.Body, e.State), data) || cap(e.Body) != len(e.Body) {
			t.Errorf("body %q with a capacity of %d, and state %q, of %q", e.Body, cap(e.Body), e.State, data)
		}
		again, err := c.Encode(journal.Record{Source: &journal.Source{Worker: e.Worker, Model: model}, Tiers: e.Tiers, Body: e.Body,
			State: e.State})
		if long := len(client.Escape(e.Worker)) > maxToken; err != nil || long {
			if !long || err == nil {
				t.Errorf("a name of %d bytes: got error %v", len(e.Worker), err)
			}
			return
		}
		if e.Owner != nil { // as the writer writes it
			record, err := newDecoder(e.Owner.Writer).EncodeOwner(journal.Source{}, e.Owner.Instance)
			if err != nil {
				t.Fatal(err)
			}
			again.Header[OwnerHeader] = record.Header[OwnerHeader]
		}
		got, gotModel := c.Decode(published(again))
		if diff := cmp.Diff(e, got); diff != "" || gotModel != model {
			t.Errorf("decoded again: model %q, want %q (-want +got):\n%s", gotModel, model, diff)
		}
	})
}

// FuzzRecord encodes records of workers and of their owners, and decodes them.
func FuzzRecord(f *testing.F) {
	f.Add("w", "m", uint8(6), []byte("body"), []byte("state"), "i", "other")
	f.Add("", "", uint8(255), []byte(nil), []byte(nil), "i", "")
	f.Add("10.0.0.1:8000/\xff *.>", "Qwen/Qwen3 0.6B\r\n%", uint8(0), []byte(nil), []byte("0 0"), "a\n", "-")
	f.Add(strings.Repeat("n", maxToken), "%", uint8(1), []byte("body"), []byte(nil), "", "i")
	f.Add(strings.Repeat("ü", maxToken/6+1), "m", uint8(1), []byte(nil), []byte(nil), "i", "i")
	f.Fuzz(func(t *testing.T, worker, model string, tiers uint8, body, state []byte, instance, owner string) {
		c, source := newDecoder(instance), &journal.Source{Worker: worker, Model: model}
		m, err := c.Encode(journal.Record{Source: source, Tiers: kvblock.Tiers(tiers), Body: body, State: state})
		if err != nil {
			wantOneLine(t, err)
			if len(worker) <= maxToken/3 {
				t.Errorf("a name of %d bytes: %v", len(worker), err)
			}
			return
		}
		e, gotModel := c.Decode(published(m))
		if e.Invalid != nil || e.Worker != worker || gotModel != model || e.Tiers != kvblock.Tiers(tiers) || e.Owner != nil ||
			!bytes.Equal(e.Body, body) || !bytes.Equal(e.State, state) {
			t.Errorf("got %+v of model %q", e, gotModel)
		}
		if name := instance + owner; instance == "" || owner == noOwner ||
			strings.ContainsFunc(name, func(r rune) bool { return r <= ' ' }) {
			return // instances have ids of another form
		}
		if m, err = c.EncodeOwner(*source, owner); err != nil {
			t.Fatal(err)
		}
		e, gotModel = c.Decode(published(m))
		if want := (&Owner{Instance: owner, Writer: instance}); e.Invalid != nil || gotModel != model || !cmp.Equal(e.Owner, want) ||
			!bytes.Equal(e.Body, head(*source)) {
			t.Errorf("got %+v of model %q, want owner %+v", e, gotModel, want)
		}
	})
}
