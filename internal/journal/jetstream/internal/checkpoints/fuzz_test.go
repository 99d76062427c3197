package checkpoints

import (
	"bytes"
	"context"
	"encoding/base64"
	"encoding/json"
	"log/slog"
	"slices"
	"strings"
	"testing"
	"unicode"

	"github.com/nats-io/nats.go/jetstream"

	"github.com/kvcast/kvcast/internal/journal/jetstream/internal/client"
)

// wantOneLine fails the test unless an error is a line that can be shown on a terminal.
func wantOneLine(t *testing.T, err error) {
	t.Helper()
	if text := err.Error(); text == "" || strings.ContainsFunc(text, unicode.IsControl) {
		t.Errorf("an error that is not one line: %q", text)
	}
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

// FuzzCheckpoint reads an object of the store, which is stored as a name, a description and chunks of data. Reading it returns
// exactly the bytes whose checksum the description has, or an error.
func FuzzCheckpoint(f *testing.F) {
	c := newCheckpoints(&client.Client{Stream: "s", Log: slog.New(slog.DiscardHandler)}, nil)
	token := func(name string) string { return strings.TrimPrefix(c.metaSubject(name), c.prefix+"M.") }
	describe := func(name string, data []byte, change func(*jetstream.ObjectInfo)) []byte {
		info := &jetstream.ObjectInfo{
			ObjectMeta: jetstream.ObjectMeta{Name: client.Escape(name), Metadata: map[string]string{metadataClaim: "7", metadataRevision: "9"}},
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
		c := &Checkpoints{client: c.client, prefix: c.prefix, stream: &stored{last: messages, chunks: chunksOf(data)}}
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
		if _, err := c.NewestRegistration(t.Context()); err != nil {
			t.Error(err)
		}
	})
}
