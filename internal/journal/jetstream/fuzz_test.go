package jetstream

import (
	"bytes"
	"context"
	"encoding/base64"
	"encoding/json"
	"errors"
	"log/slog"
	"net/http"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
	"unicode"

	"github.com/google/go-cmp/cmp"
	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"

	"github.com/kvcast/kvcast/internal/core/kvblock"
	"github.com/kvcast/kvcast/internal/journal"
)

// newDecoder returns a journal that is not connected, and can encode and decode.
func newDecoder(instance string) *Journal {
	return &Journal{cfg: Config{Stream: "s", Instance: instance}, subjects: "kvcast.s.", conn: new(nats.Conn),
		log: slog.New(slog.DiscardHandler)}
}

// wantOneLine fails the test unless an error is a line that can be shown on a terminal.
func wantOneLine(t *testing.T, err error) {
	t.Helper()
	if text := err.Error(); text == "" || strings.ContainsFunc(text, unicode.IsControl) {
		t.Errorf("an error that is not one line: %q", text)
	}
}

// FuzzMessage decodes messages as a consumer delivers them. What is decoded has all bytes of the message, and is the same
// after it is encoded and decoded again.
func FuzzMessage(f *testing.F) {
	j := newDecoder("i")
	add := func(m *nats.Msg, err error) {
		var headers bytes.Buffer
		if err = errors.Join(err, http.Header(m.Header).Write(&headers)); err != nil {
			f.Fatal(err)
		}
		f.Add(m.Subject, "NATS/1.0\r\n"+headers.String()+"\r\n", m.Data)
	}
	for _, source := range []journal.Source{{Worker: "w", Model: "m"}, {},
		{Worker: "10.0.0.1:8000/\xff", Model: "Qwen/Qwen3 0.6B"}} {
		add(j.encode(journal.Record{Source: &source, Tiers: 6, Body: entryHead(source), State: []byte("state")}))
		add((&shared{j: j}).record(source, "other"))
		add((&shared{j: j}).record(source, ""))
	}
	for _, message := range []struct{ subject, value string }{
		{"kvcast.other.w", "0 0 m"}, {"kvcast.s.%zz", "0 0 m"}, {"kvcast.s.w", "0 0 %zz"}, {"kvcast.s.w", "0 0"},
		{"kvcast.s.w", "256 0 m"},
		{"kvcast.s.w", "-1 0 m"}, {"kvcast.s.w", "0 5 m"}, {"kvcast.s.w", "0 -1 m"}, {"kvcast.s.w", "0 9223372036854775808 m"},
		{"kvcast.s.w", ""},
	} {
		f.Add(message.subject, "NATS/1.0\r\nKvcast: "+message.value+"\r\n\r\n", []byte("body"))
	}
	for _, owner := range []string{"", " ", "a", "a ", " b", "- b", "a b c"} {
		f.Add("kvcast.s.w", "NATS/1.0\r\nKvcast: 0 0 m\r\nKvcast-Owner: "+owner+"\r\n\r\n", []byte("body"))
	}
	f.Fuzz(func(t *testing.T, subject, headers string, data []byte) {
		header, _ := nats.DecodeHeadersMsg([]byte(headers)) // after an error, nats.go delivers the message without headers
		m := &nats.Msg{Subject: subject, Header: header, Data: data}
		e, model, err := j.decode(m)
		if err != nil {
			wantOneLine(t, err)
			return
		}
		if !bytes.Equal(slices.Concat(e.Body, e.State), data) || cap(e.Body) != len(e.Body) {
			t.Errorf("body %q with a capacity of %d, and state %q, of %q", e.Body, cap(e.Body), e.State, data)
		}
		again, err := j.encode(journal.Record{Source: &journal.Source{Worker: e.Worker, Model: model}, Tiers: e.Tiers, Body: e.Body,
			State: e.State})
		if long := len(escape(e.Worker)) > maxToken; err != nil || long {
			if !long || err == nil {
				t.Errorf("a name of %d bytes: got error %v", len(e.Worker), err)
			}
			return
		}
		if e.Owner != nil { // as the writer writes it
			record, err := (&shared{j: newDecoder(e.Owner.Writer)}).record(journal.Source{}, e.Owner.Instance)
			if err != nil {
				t.Fatal(err)
			}
			again.Header[headerOwner] = record.Header[headerOwner]
		}
		got, gotModel, err := j.decode(again)
		if diff := cmp.Diff(e, got); err != nil || diff != "" || gotModel != model {
			t.Errorf("decoded again: error %v, model %q, want %q (-want +got):\n%s", err, gotModel, model, diff)
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
		j, source := newDecoder(instance), &journal.Source{Worker: worker, Model: model}
		m, err := j.encode(journal.Record{Source: source, Tiers: kvblock.Tiers(tiers), Body: body, State: state})
		if err != nil {
			wantOneLine(t, err)
			if len(worker) <= maxToken/3 {
				t.Errorf("a name of %d bytes: %v", len(worker), err)
			}
			return
		}
		e, gotModel, err := j.decode(m)
		if err != nil || e.Worker != worker || gotModel != model || e.Tiers != kvblock.Tiers(tiers) || e.Owner != nil ||
			!bytes.Equal(e.Body, body) || !bytes.Equal(e.State, state) {
			t.Errorf("got %+v of model %q, error %v", e, gotModel, err)
		}
		if name := instance + owner; instance == "" || owner == headerNoOwner ||
			strings.ContainsFunc(name, func(c rune) bool { return c <= ' ' }) {
			return // instances have ids of another form
		}
		if m, err = (&shared{j: j}).record(*source, owner); err != nil {
			t.Fatal(err)
		}
		e, gotModel, err = j.decode(m)
		if want := (&Owner{Instance: owner, Writer: instance}); err != nil || gotModel != model || !cmp.Equal(e.Owner, want) ||
			!bytes.Equal(e.Body, entryHead(*source)) {
			t.Errorf("got %+v of model %q, error %v, want owner %+v", e, gotModel, err, want)
		}
	})
}

// stored is a stream with the last message of each subject, and the messages of one further subject.
type stored struct {
	jetstream.Stream
	last   map[string]*jetstream.RawStreamMsg
	chunks [][]byte
}

func (s *stored) Info(context.Context, ...jetstream.StreamInfoOpt) (*jetstream.StreamInfo, error) {
	info := &jetstream.StreamInfo{State: jetstream.StreamState{Subjects: make(map[string]uint64)}}
	for subject := range s.last {
		info.State.Subjects[subject] = 1
	}
	return info, nil
}

func (s *stored) GetLastMsgForSubject(_ context.Context, subject string) (*jetstream.RawStreamMsg, error) {
	if m := s.last[subject]; m != nil {
		return m, nil
	}
	return nil, jetstream.ErrMsgNotFound
}

// GetMsg returns the first chunk from a seq on.
func (s *stored) GetMsg(_ context.Context, seq uint64, _ ...jetstream.GetMsgOpt) (*jetstream.RawStreamMsg, error) {
	if seq > uint64(len(s.chunks)) {
		return nil, jetstream.ErrMsgNotFound
	}
	return &jetstream.RawStreamMsg{Sequence: seq, Data: s.chunks[seq-1]}, nil
}

func chunksOf(b []byte) [][]byte { return slices.Collect(slices.Chunk(b, 16)) }

// values is a KV bucket, in which each key has its own text as data.
type values struct {
	jetstream.KeyValue
	keys map[string]bool
}

func (v values) Get(_ context.Context, key string) (jetstream.KeyValueEntry, error) {
	if !v.keys[key] {
		return nil, jetstream.ErrKeyNotFound
	}
	return value{key: key}, nil
}

type value struct {
	jetstream.KeyValueEntry
	key string
}

func (v value) Value() []byte  { return []byte(v.key) }
func (value) Revision() uint64 { return 1 }

// FuzzCheckpoint reads an object of the store, which is stored as a name, a description and chunks of data. Reading it returns
// exactly the bytes whose checksum the description has, or an error.
func FuzzCheckpoint(f *testing.F) {
	c := &Checkpoints{j: newDecoder("i"), prefix: "$O.s-checkpoints."}
	token := func(name string) string { return strings.TrimPrefix(c.metaSubject(name), c.prefix+"M.") }
	describe := func(name string, data []byte, change func(*jetstream.ObjectInfo)) []byte {
		info := &jetstream.ObjectInfo{
			ObjectMeta: jetstream.ObjectMeta{Name: escape(name), Metadata: map[string]string{metadataClaim: "7", metadataRevision: "9"}},
			Bucket:     "s-checkpoints", NUID: "A", Size: uint64(len(data)), Chunks: uint32(len(chunksOf(data))), Digest: digest(data),
		}
		if change != nil {
			change(info)
		}
		text, err := json.Marshal(info)
		if err != nil {
			f.Fatal(err)
		}
		return text
	}
	data := []byte("a checkpoint in several chunks")
	for _, name := range []string{"worker.w", "removed", "worker.10.0.0.1:8000/\xff"} {
		f.Add(token(name), describe(name, data, nil), data)
	}
	f.Add(token("w"), describe("w", nil, nil), []byte(nil))
	f.Add(token("w"), describe("w", data, nil), data[1:])
	f.Add(token("w"), describe("w", data, func(i *jetstream.ObjectInfo) { i.Chunks = 1<<32 - 1 }), data)
	f.Add(token("w"), describe("w", data, func(i *jetstream.ObjectInfo) { i.Chunks = 1 }), data)
	f.Add(token("w"), describe("w", data, func(i *jetstream.ObjectInfo) { i.Digest, i.NUID = "MD5=\n", ">" }), data)
	f.Add(token("w"), []byte("null"), data)
	f.Add(token("w"), []byte(`{"chunks": -1}`), data)
	f.Add(token("w"), []byte("{\"mtime\": \"0001-01-01T00:00:\x7f0Z\"}"), data)
	f.Add("no-base64!", describe("w", data, nil), data)
	f.Add(base64.URLEncoding.EncodeToString([]byte("%zz\n")), describe("w", data, nil), data)
	f.Fuzz(func(t *testing.T, token string, description, data []byte) {
		if name, _ := base64.URLEncoding.DecodeString(token); strings.ContainsAny(token, ". \t\r\n") || len(name) == 0 ||
			string(name) == "%" {
			return // it is no token of a subject, or of an object without a name
		}
		subject := c.prefix + "M." + token
		messages := map[string]*jetstream.RawStreamMsg{subject: {Sequence: 1, Data: description}}
		c := &Checkpoints{j: c.j, prefix: c.prefix, stream: &stored{last: messages, chunks: chunksOf(data)}}
		var info jetstream.ObjectInfo
		described := json.Unmarshal(description, &info) == nil
		n := 0
		for o, err := range c.All(t.Context()) {
			n++
			if err != nil {
				wantOneLine(t, err)
				if o.Data != nil || !strings.Contains(err.Error(), "read checkpoint ") || o.Name == "" {
					t.Errorf("name %q, %d bytes, error %v", o.Name, len(o.Data), err)
				}
				continue
			}
			if !described || digest(o.Data) != info.Digest || !bytes.HasPrefix(data, o.Data) || len(chunksOf(o.Data)) != int(info.Chunks) {
				t.Errorf("%q is %q, of %q and %s", o.Name, o.Data, data, description)
			}
			if c.metaSubject(o.Name) != subject { // no name of kvcast's, which cannot be asked for
				continue
			}
			if again, err := c.Get(t.Context(), o.Name); err != nil || !bytes.Equal(again, o.Data) {
				t.Errorf("%q is %q when it is asked for, error %v", o.Name, again, err)
			}
		}
		if n != 1 {
			t.Errorf("%d objects, want 1", n)
		}
		if _, err := c.newest(t.Context(), metadataRevision); err != nil {
			t.Error(err)
		}
	})
}

// validKey are the keys that NATS allows.
var validKey = regexp.MustCompile(`^[-/_=.a-zA-Z0-9]+$`)

// FuzzRegistrationName encodes names as keys, and decodes keys. Either is possible in one way alone.
func FuzzRegistrationName(f *testing.F) {
	for _, text := range []string{"w", "", "=", "==", "%", "=25", "=2e", "=2E", "=G0", "a.b", "10=2E0=2E0=2E1", "=00=FF", "ü",
		"\xff\n", "a b"} {
		f.Add(text)
	}
	f.Fuzz(func(t *testing.T, text string) {
		key := registrationKey(text)
		if !validKey.MatchString(key) || len(key) > 3*len(text)+1 {
			t.Errorf("the key of %q is %q", text, key)
		}
		if name, err := registrationName(key); err != nil || name != text {
			t.Errorf("%q is %q after encoding: %v", text, name, err)
		}
		name, err := registrationName(text)
		switch {
		case err != nil && (!errors.Is(err, errKey) || name != text):
			t.Errorf("the key %q has the name %q, error %v", text, name, err)
		case err == nil && registrationKey(name) != text:
			t.Errorf("the key %q has the name %q with the key %q", text, name, registrationKey(name))
		}
	})
}

// FuzzRegistrations reads a file of keys that must be there, and the keys that the bucket has, separated by spaces. Each
// registration is there once, and each that is lost is reported by its name.
func FuzzRegistrations(f *testing.F) {
	for _, keys := range []struct{ file, bucket string }{
		{"", ""}, {"w\n", "w"}, {"a\nb\nc\n", "b d"}, {"=\n=2E\n", "=2E"}, {"a.b \x00\r\n=2e\t=zz", "a.b =2e"}, {"a\na\na", "b"},
		{"\xff", ""},
	} {
		f.Add(keys.file, keys.bucket)
	}
	dir := f.TempDir()
	keys, err := os.Create(filepath.Join(dir, keysName))
	if err != nil {
		f.Fatal(err)
	}
	defer func() { _ = keys.Close() }()
	f.Fuzz(func(t *testing.T, file, bucket string) {
		_, err := keys.WriteAt([]byte(file), 0)
		if err := errors.Join(err, keys.Truncate(int64(len(file)))); err != nil { // faster than a new file
			t.Fatal(err)
		}
		const prefix = "$KV.s-workers."
		s := &stored{last: make(map[string]*jetstream.RawStreamMsg)}
		must, has := make(map[string]bool), make(map[string]bool)
		for _, key := range strings.Fields(file) {
			must[key] = true
		}
		for _, key := range strings.Fields(bucket) {
			has[key], s.last[prefix+key] = true, nil
		}
		r := &Registrations{j: &Journal{cfg: Config{Dir: dir, Stream: "s"}}, kv: values{keys: has}, stream: s, prefix: prefix,
			revisions: make(map[string]uint64)}
		if err := r.readKeys(); err != nil {
			t.Fatal(err)
		}
		seen := make(map[string]bool)
		for o, err := range r.All(t.Context()) {
			key := registrationKey(o.Name)
			if errors.Is(err, errKey) {
				key = o.Name
			}
			if seen[key] || !must[key] && !has[key] {
				t.Errorf("%q is there twice, or neither in the file nor in the bucket", key)
			}
			seen[key] = true
			switch {
			case err == nil && (!has[key] || string(o.Data) != key):
				t.Errorf("%q has the data %q", key, o.Data)
			case err != nil:
				wantOneLine(t, err)
				if errors.Is(err, errLost) == has[key] && !errors.Is(err, errKey) || o.Data != nil {
					t.Errorf("%q, in the bucket: %t, has error %v", key, has[key], err)
				}
			}
		}
		for key := range must {
			if !seen[key] {
				t.Errorf("%q is lost, which is not reported", key)
			}
		}
		for key := range has {
			if !seen[key] {
				t.Errorf("%q is left out", key)
			}
		}
	})
}
