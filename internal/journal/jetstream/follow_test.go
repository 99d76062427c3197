package jetstream_test

import (
	"errors"
	"net"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/nats-io/nats-server/v2/server"
	natsjs "github.com/nats-io/nats.go/jetstream"

	"github.com/kvcast/kvcast/internal/journal"
	"github.com/kvcast/kvcast/internal/journal/jetstream"
)

// followConfig returns the configuration of a journal that follows another one.
func followConfig(s *server.Server) jetstream.Config {
	cfg := serverConfig(s.ClientURL())
	cfg.Follow = true
	return cfg
}

// wantSame waits until a journal has all entries of another one, and compares them.
func wantSame(t *testing.T, got, want *jetstream.Journal) {
	t.Helper()
	awaitNewest(got, want.Bounds().Newest)
	if g, w := got.Bounds(), want.Bounds(); g.Epoch != w.Epoch || g.Newest != w.Newest {
		t.Fatalf("bounds: got %+v, want %+v", g, w)
	}
	read := func(j *jetstream.Journal) string {
		c, err := j.Read(t.Context(), journal.Query{MaxBytes: 64 << 20})
		if err != nil {
			t.Fatal(err)
		}
		var all strings.Builder
		for _, s := range c.Slices {
			all.Write(s)
		}
		return all.String()
	}
	if read(got) != read(want) {
		t.Fatal("the entries differ")
	}
}

func TestFollowerHasTheEntriesOfTheWriter(t *testing.T) {
	t.Parallel()
	s := startServer(t, t.TempDir(), 0)
	writer, _ := load(t, serverConfig(s.ClientURL()))
	want := appendN(t, writer, "w", 10)
	follower, got := load(t, followConfig(s))
	wantEntries(t, got, want)
	for _, worker := range []string{"w", "another", "w"} {
		appendN(t, writer, worker, 100)
		wantSame(t, follower, writer)
	}
	if _, err := follower.Append(t.Context(), journal.Record{Source: &journal.Source{Worker: "w"}}); err == nil || !strings.Contains(err.Error(), "follows another process") {
		t.Errorf("append: got %v", err)
	}
	if newest, err := follower.Newest(t.Context()); err != nil || newest != 312 {
		t.Errorf("newest of the stream: got %d, %v, want 312", newest, err)
	}
	mustClose(t, follower)
	appendN(t, writer, "w", 1)
}

// TestFollowerContinuesWhenTheServerIsBack ends the nats-server while entries are appended.
func TestFollowerContinuesWhenTheServerIsBack(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	s := startServer(t, dir, 0)
	port := s.Addr().(*net.TCPAddr).Port
	writer, _ := load(t, serverConfig(s.ClientURL()))
	follower, _ := load(t, followConfig(s))
	_, stop := startLoad(t, writer)
	for i := range 3 {
		awaitNewest(follower, 500*uint64(i+1))
		stopServer(s)
		awaitStalled(t, follower)
		s = startServer(t, dir, port)
	}
	stop()
	wantSame(t, follower, writer)
	for deadline := time.Now().Add(time.Minute); !follower.Stalled().IsZero(); {
		if time.Now().After(deadline) {
			t.Fatal("the follower is stalled a minute after the server is back")
		}
		appendN(t, writer, "w", 1)
	}
}

func TestFollowerFailsWhenItsEntriesAreLost(t *testing.T) {
	t.Parallel()
	for _, tt := range []struct {
		name   string
		damage func(t *testing.T, s *server.Server, js natsjs.JetStream)
		want   error
		text   string
	}{
		{"gone", func(t *testing.T, _ *server.Server, js natsjs.JetStream) {
			if err := js.DeleteStream(t.Context(), jetstream.DefaultStream); err != nil {
				t.Fatal(err)
			}
		}, jetstream.ErrUnreadable, "is gone"},
		{"a new epoch", func(t *testing.T, _ *server.Server, js natsjs.JetStream) {
			update(t, js, jetstream.DefaultStream, func(c *natsjs.StreamConfig) { c.Metadata["kvcast.epoch"] = "other" })
		}, journal.ErrFenced, "has the new epoch"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			s := startServer(t, t.TempDir(), 0)
			writer, _ := load(t, serverConfig(s.ClientURL()))
			appendN(t, writer, "w", 10)
			follower, _ := load(t, followConfig(s))
			administer(t, s, func(js natsjs.JetStream) { tt.damage(t, s, js) })
			select {
			case <-follower.Failed():
			case <-time.After(time.Minute):
				t.Fatal("the follower has not failed after a minute")
			}
			if err := follower.Err(); !errors.Is(err, tt.want) || !strings.Contains(err.Error(), tt.text) {
				t.Errorf("got %v, want %v with %q", err, tt.want, tt.text)
			}
		})
	}
}

// TestFollowerLoadsAnewAfterAPurge removes entries between Open and Load.
func TestFollowerLoadsAnewAfterAPurge(t *testing.T) {
	t.Parallel()
	s := startServer(t, t.TempDir(), 0)
	writer, _ := load(t, serverConfig(s.ClientURL()))
	want := appendN(t, writer, "w", 10)
	follower := open(t, followConfig(s))
	administer(t, s, func(js natsjs.JetStream) {
		st, err := js.Stream(t.Context(), jetstream.DefaultStream)
		if err == nil {
			err = st.Purge(t.Context(), natsjs.WithPurgeSequence(4))
		}
		if err != nil {
			t.Fatal(err)
		}
	})
	var got []jetstream.Entry
	collect := func(e jetstream.Entry) error {
		got = append(got, e)
		return nil
	}
	if err := follower.Load(t.Context(), 0, collect); !errors.Is(err, jetstream.ErrPurged) || got != nil {
		t.Fatalf("got %v and %d entries, want ErrPurged", err, len(got))
	}
	if err := follower.Mark(t.Context()); err != nil {
		t.Fatal(err)
	}
	if err := follower.Load(t.Context(), 0, collect); err != nil {
		t.Fatal(err)
	}
	wantEntries(t, got, want[2:]) // entry 1 is the record of the owner
}

// TestFollowerLoadsAnewAfterAPurgeMeanwhile removes entries during Load. They are more than a consumer delivers at once.
func TestFollowerLoadsAnewAfterAPurgeMeanwhile(t *testing.T) {
	t.Parallel()
	s := startServer(t, t.TempDir(), 0)
	writer, _ := load(t, serverConfig(s.ClientURL()))
	source := sourceOf(t, writer, "w")
	const entries, size = 41, 900 << 10 // with the record of the owner
	for range entries - 1 {
		p, err := writer.Append(t.Context(), journal.Record{Source: source, Body: make([]byte, size)})
		if err == nil {
			_, err = p.Wait(t.Context())
		}
		if err != nil {
			t.Fatal(err)
		}
	}
	follower := open(t, followConfig(s))
	first := uint64(0)
	purge := func(e jetstream.Entry) (err error) {
		if first == 0 {
			administer(t, s, func(js natsjs.JetStream) {
				var st natsjs.Stream
				if st, err = js.Stream(t.Context(), jetstream.DefaultStream); err == nil {
					err = st.Purge(t.Context(), natsjs.WithPurgeSequence(entries))
				}
			})
			first = e.Seq
		}
		return err
	}
	if err := follower.Load(t.Context(), 0, purge); !errors.Is(err, jetstream.ErrPurged) || first != 1 {
		t.Fatalf("got %v after entry %d, want ErrPurged", err, first)
	}
	if err := follower.Mark(t.Context()); err != nil {
		t.Fatal(err)
	}
	first = 0
	if err := follower.Load(t.Context(), 0, func(e jetstream.Entry) error { first = e.Seq; return nil }); err != nil || first != entries {
		t.Errorf("got %v and entry %d, want %d", err, first, entries)
	}
}

func TestFollowerNeedsAStream(t *testing.T) {
	t.Parallel()
	s := startServer(t, t.TempDir(), 0)
	if _, err := jetstream.Open(t.Context(), followConfig(s)); err == nil || !strings.Contains(err.Error(), "start an instance that reads engines first") {
		t.Errorf("got %v", err)
	}
}

// TestManyFollowers follows a writer from several processes, which read the same entries.
func TestManyFollowers(t *testing.T) {
	t.Parallel()
	s := startServer(t, t.TempDir(), 0)
	writer, _ := load(t, serverConfig(s.ClientURL()))
	var all []*jetstream.Journal
	for range 4 {
		f, _ := load(t, followConfig(s))
		all = append(all, f)
	}
	_, stop := startLoad(t, writer)
	var wg sync.WaitGroup
	for _, f := range all {
		wg.Go(func() { awaitNewest(f, 2000) })
	}
	wg.Wait()
	stop()
	for _, f := range all {
		wantSame(t, f, writer)
	}
}
