package kv

import (
	"context"
	"errors"
	"os"
	"path/filepath"
	"regexp"
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

// stored is a stream with some subjects.
type stored struct {
	jetstream.Stream
	last map[string]*jetstream.RawStreamMsg
}

func (s *stored) Info(context.Context, ...jetstream.StreamInfoOpt) (*jetstream.StreamInfo, error) {
	info := &jetstream.StreamInfo{State: jetstream.StreamState{Subjects: make(map[string]uint64)}}
	for subject := range s.last {
		info.State.Subjects[subject] = 1
	}
	return info, nil
}

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
		if name, err := RegistrationName(key); err != nil || name != text {
			t.Errorf("%q is %q after encoding: %v", text, name, err)
		}
		name, err := RegistrationName(text)
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
		{"\xff", ""}, {strings.Repeat("k", maxKeyBytes), ""}, {"w\n" + strings.Repeat("k", maxKeyBytes+1), "w"},
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
		required, err := readKeys(dir, func() error { return nil })
		if slices.ContainsFunc(strings.Fields(file), func(key string) bool { return len(key) > maxKeyBytes }) {
			if err == nil {
				t.Fatalf("a key of more than %d bytes is accepted", maxKeyBytes)
			}
			wantOneLine(t, err)
			return
		}
		if err != nil {
			t.Fatal(err)
		}
		r := &Registrations{client: &client.Client{Stream: "s"}, kv: values{keys: has}, stream: s, prefix: prefix, keys: required,
			revisions: make(map[string]uint64)}
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
