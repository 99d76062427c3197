package jetstream_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"maps"
	"net/url"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	natsjs "github.com/nats-io/nats.go/jetstream"

	"github.com/kvcast/kvcast/internal/core/testclass"
	"github.com/kvcast/kvcast/internal/journal"
	"github.com/kvcast/kvcast/internal/journal/jetstream"
	"github.com/kvcast/kvcast/test/harness"
	"github.com/kvcast/kvcast/test/harness/natstest"
)

func register(t *testing.T, j *jetstream.Journal, names ...string) {
	t.Helper()
	for _, name := range names {
		if err := j.Registrations().Put(t.Context(), name, []byte("data of "+name)); err != nil {
			t.Fatal(err)
		}
	}
}

// registrations returns the names and data of all registrations, and the errors.
func registrations(t *testing.T, j *jetstream.Journal) (map[string]string, []error) {
	t.Helper()
	return objects(j.Registrations().All(t.Context()), func(data []byte) string { return string(data) })
}

func wantRegistrations(t *testing.T, j *jetstream.Journal, names ...string) {
	t.Helper()
	want := make(map[string]string)
	for _, name := range names {
		want[name] = "data of " + name
	}
	got, errs := registrations(t, j)
	wantObjects(t, got, errs, want)
}

func TestRegistrationsSurvive(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	j, _ := load(t, config(dir))
	names := []string{"", "=", "%", "w", "10.0.0.1", "w.*> \x00\xff/", strings.Repeat("n", 300)}
	register(t, j, names...)
	register(t, j, names...) // again
	register(t, j, "deleted")
	for range 2 {
		if err := j.Registrations().Delete(t.Context(), "deleted"); err != nil {
			t.Fatal(err)
		}
	}
	wantRegistrations(t, j, names...)
	crashed := copyDir(t, dir)
	mustClose(t, j)
	for _, dir := range []string{dir, crashed} {
		j := open(t, config(dir))
		wantRegistrations(t, j, names...)
		if err := j.Discard(t.Context()); err != nil {
			t.Fatal(err)
		}
		wantRegistrations(t, j, names...)
		mustClose(t, j)
	}
	// Tools of NATS can read and write the bucket.
	administerDir(t, dir, func(js natsjs.JetStream) {
		kv, err := js.KeyValue(t.Context(), "kvcast-workers")
		if err != nil {
			t.Fatal(err)
		}
		e, err := kv.Get(t.Context(), "10=2E0=2E0=2E1")
		if err != nil || string(e.Value()) != "data of 10.0.0.1" {
			t.Errorf("got %v, %v", e, err)
		}
		keys, err := kv.Keys(t.Context())
		if err != nil || len(keys) != len(names) {
			t.Errorf("got keys %q, %v, want %d", keys, err, len(names))
		}
		if _, err := kv.Put(t.Context(), "no.name", nil); err != nil {
			t.Fatal(err)
		}
	})
	j = open(t, config(dir))
	if got, errs := registrations(t, j); len(got) != len(names) || len(errs) != 1 || !strings.Contains(errs[0].Error(), `read key "no.name"`) {
		t.Errorf("got %v, errors %v, want one that names the key", got, errs)
	}
}

func TestRegistrationInAFullBucketFails(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	j, _ := load(t, config(dir))
	register(t, j, "w")
	mustClose(t, j)
	administerDir(t, dir, func(js natsjs.JetStream) {
		update(t, js, "KV_kvcast-workers", func(c *natsjs.StreamConfig) { c.MaxMsgs = 1 })
	})
	j, _ = load(t, config(dir))
	err := j.Registrations().Put(t.Context(), "v", nil)
	if !errors.Is(err, journal.ErrNoSpace) || !strings.Contains(err.Error(), `write registration "v": `) {
		t.Errorf("got %v, want ErrNoSpace", err)
	}
	wantRegistrations(t, j, "w")
}

// TestDamagedFileOfKeysIsAnError has a file of registered keys of 200 MB, and one with a line that is no key.
func TestDamagedFileOfKeysIsAnError(t *testing.T) {
	dir := t.TempDir()
	j, _ := load(t, config(dir))
	register(t, j, "a")
	mustClose(t, j)
	file := filepath.Join(dir, "kvcast.registered")
	for name, damage := range map[string]func() error{
		"large": func() error { return os.Truncate(file, 200<<20) },
		"line":  func() error { return os.WriteFile(file, bytes.Repeat([]byte("a"), 8<<10), 0o600) },
	} {
		if err := damage(); err != nil {
			t.Fatal(err)
		}
		before := allocated()
		_, err := jetstream.Open(t.Context(), config(dir))
		if err == nil || !strings.Contains(err.Error(), file+" is damaged: it has more than 16777216 bytes, or a line of more than 4096;") {
			t.Errorf("%s: got %v", name, err)
		}
		if n := allocated() - before; n > 256<<20 {
			t.Errorf("%s: %d bytes were allocated", name, n)
		}
	}
}

// TestDamagedRegistrationsAreReported damages the files of the bucket. Each registration is there, or an error names it.
func TestDamagedRegistrationsAreReported(t *testing.T) {
	dir := t.TempDir()
	j, _ := load(t, config(dir))
	entries := appendN(t, j, "w", 3)
	put(t, j, "w", []byte("data"))
	names := []string{"a", "b", "c", "d"}
	register(t, j, append(names, "deleted")...)
	if err := j.Registrations().Delete(t.Context(), "deleted"); err != nil {
		t.Fatal(err)
	}
	mustClose(t, j)
	bucket := filepath.Join("jetstream", "$G", "streams", "KV_kvcast-workers")
	block, index, meta := filepath.Join(bucket, "msgs", "1.blk"), filepath.Join(bucket, "msgs", "index.db"), filepath.Join(bucket, "meta.inf")
	data, err := os.ReadFile(filepath.Join(dir, block))
	if err != nil {
		t.Fatal(err)
	}
	damages := map[string]func(dir string) error{
		"no bucket":    func(dir string) error { return os.RemoveAll(filepath.Join(dir, bucket)) },
		"no messages":  func(dir string) error { return os.RemoveAll(filepath.Join(dir, bucket, "msgs")) },
		"no metadata":  func(dir string) error { return os.Remove(filepath.Join(dir, meta)) },
		"bad metadata": func(dir string) error { return os.WriteFile(filepath.Join(dir, meta), []byte("x"), 0o600) },
	}
	for at := 0; at < len(data); at += testclass.Size(111, 37) {
		damages[fmt.Sprintf("cut at %d", at)] = func(dir string) error { return os.Truncate(filepath.Join(dir, block), int64(at)) }
	}
	for _, text := range []string{"workers.a", "data of a", "workers.c", "data of c", "workers.deleted", "data of d"} {
		change := func(dir string) error {
			changed := slices.Clone(data)
			changed[bytes.LastIndex(data, []byte(text))+len(text)-1] ^= 0x55
			return os.WriteFile(filepath.Join(dir, block), changed, 0o600)
		}
		damages[fmt.Sprintf("changed %q", text)] = change
		damages[fmt.Sprintf("changed %q, no index", text)] = func(dir string) error {
			return errors.Join(change(dir), os.Remove(filepath.Join(dir, index)))
		}
	}
	for name, damage := range damages {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			at := copyDir(t, dir)
			if err := damage(at); err != nil {
				t.Fatal(err)
			}
			j, got := load(t, config(at))
			wantEntries(t, got, entries)
			wantCheckpoints(t, j, map[string]string{"w": `4 "ata"`})
			left, errs := registrations(t, j)
			for _, n := range names {
				lost := strings.Contains(fmt.Sprint(errs), fmt.Sprintf("read key %q", n))
				if there := left[n] == "data of "+n; there == lost {
					t.Errorf("registration %q: there: %t, reported: %t; errors %v", n, there, lost, errs)
				}
			}
			register(t, j, names...)
			wantRegistrations(t, j, slices.AppendSeq(slices.Clone(names), maps.Keys(left))...)
			mustClose(t, j)
			wantRegistrations(t, open(t, config(at)), slices.AppendSeq(slices.Clone(names), maps.Keys(left))...)
		})
	}
}

// TestRegistrationOfAnotherProcessIsNotReplaced registers a worker at two processes, such as two that have just started.
func TestRegistrationOfAnotherProcessIsNotReplaced(t *testing.T) {
	t.Parallel()
	s := startServer(t, t.TempDir(), 0)
	first, _ := load(t, serverConfig(s.ClientURL()))
	register(t, first, "both", "first", "deleted")
	second, _ := load(t, serverConfig(s.ClientURL()))
	for _, name := range []string{"both", "first"} {
		if err := second.Registrations().Put(t.Context(), name, []byte("other")); !errors.Is(err, jetstream.ErrChanged) {
			t.Errorf("put %q: got %v, want ErrChanged", name, err)
		}
	}
	wantRegistrations(t, second, "both", "first", "deleted") // it knows them now
	put := func(j *jetstream.Journal, data string) error {
		return j.Registrations().Put(t.Context(), "both", []byte(data))
	}
	if err := put(second, "changed"); err != nil {
		t.Error(err)
	}
	if err := put(first, "other"); !errors.Is(err, jetstream.ErrChanged) {
		t.Errorf("put over the registration of the second: got %v, want ErrChanged", err)
	}
	if err := put(first, "changed"); err != nil {
		t.Errorf("put what is there: %v", err)
	}
	for range 2 {
		if err := second.Registrations().Delete(t.Context(), "deleted"); err != nil {
			t.Fatal(err)
		}
		register(t, second, "deleted")
	}
}

// TestLostRegistrationsOfServersAreReported brings the bucket back as it was before registrations that a checkpoint has seen.
func TestLostRegistrationsOfServersAreReported(t *testing.T) {
	t.Parallel()
	for name, lost := range map[string]bool{"nothing lost": false, "lost": true} {
		t.Run(name, func(t *testing.T) {
			dir := t.TempDir()
			s := startServer(t, dir, 0)
			j, _ := load(t, serverConfig(s.ClientURL()))
			register(t, j, "a", "b")
			put(t, j, "checkpoint", nil)
			mustClose(t, j)
			administer(t, s, func(js natsjs.JetStream) {
				if !lost {
					return
				}
				if err := js.DeleteStream(t.Context(), "KV_kvcast-workers"); err != nil {
					t.Fatal(err)
				}
			})
			var lines logLines
			cfg := serverConfig(s.ClientURL())
			cfg.Log = lines.logger()
			mustClose(t, open(t, cfg))
			if got := lines.contains("lost the newest changes of registrations"); got != lost {
				t.Errorf("reported: %t, want %t", got, lost)
			}
		})
	}
}

// TestWatchEndsAtOnce ends a watch while the servers do not answer.
func TestWatchEndsAtOnce(t *testing.T) {
	t.Parallel()
	server, err := url.Parse(natstest.Start(t))
	if err != nil {
		t.Fatal(err)
	}
	proxy := harness.NewProxy(t, server.Host)
	j, _ := load(t, serverConfig("nats://"+proxy.Addr()))
	watching, stop := context.WithCancel(t.Context())
	loaded, ended := make(chan struct{}), make(chan error, 1)
	go func() {
		ended <- j.Registrations().KV().Watch(watching, func(jetstream.Value) {}, func() { close(loaded) })
	}()
	<-loaded
	proxy.Freeze()
	stop()
	select {
	case err := <-ended:
		if !errors.Is(err, context.Canceled) {
			t.Error(err)
		}
	case <-time.After(4 * time.Second): // a request to the servers may take 5 s
		t.Error("the watch waits for the servers")
	}
	proxy.Cut()
	mustClose(t, j)
}
