package main_test

import (
	"os"
	"path/filepath"
	"regexp"
	"testing"

	"github.com/nats-io/nats-server/v2/server"
	"github.com/nats-io/nats.go/jetstream"

	"github.com/kvcast/kvcast/internal/core/testclass"
	"github.com/kvcast/kvcast/internal/simulator"
	kvcastv1 "github.com/kvcast/kvcast/proto/kvcast/v1"
	"github.com/kvcast/kvcast/test/harness"
	"github.com/kvcast/kvcast/test/harness/natstest"
)

// unstorable are states of a journal that can store nothing.
var unstorable = map[string]struct {
	// journal starts what --journal names. enter brings it into the state. leave, which may be nil, is what the operator does.
	journal func(t *testing.T) (store string, enter, leave func())
	servers int
	error   string // pattern of that with which the servers end
	isIdle  bool   // the engine publishes nothing meanwhile
}{
	"full at max_bytes": {fullStream, 2, `storage of the journal is full: stream "kvcast" of nats://.*max_bytes`, false},
	"purged":            {purgedStream, 2, purgedError, false},
	"purged while idle": {purgedStream, 2, purgedError, true},
	"not permitted":     {deniedStream, 2, `Permissions Violation for Publish to "kvcast\.kvcast\.w"; permit the NATS user to publish to "kvcast\.kvcast\.>"`, false},
	"removed directory": {removedDirectory, 1, "were removed or replaced while it was open", true},
}

// purgedError is the error of the server that empties a purged stream, or of another one, which finds the new epoch, or no stream in between.
const purgedError = `somebody has purged it|has the new epoch|is gone`

func fullStream(t *testing.T) (store string, enter, leave func()) {
	t.Helper()
	url := natstest.Start(t)
	limit := func(bytes func(jetstream.StreamState) int64) func() {
		return func() {
			js := natstest.JetStream(t, url)
			s, err := js.Stream(t.Context(), "kvcast")
			if err != nil {
				t.Fatal(err)
			}
			c := s.CachedInfo().Config
			c.MaxBytes = bytes(s.CachedInfo().State)
			if _, err := js.UpdateStream(t.Context(), c); err != nil {
				t.Fatal(err)
			}
		}
	}
	return url, limit(func(s jetstream.StreamState) int64 { return int64(s.Bytes) }), limit(func(jetstream.StreamState) int64 { return -1 })
}

func purgedStream(t *testing.T) (store string, enter, leave func()) {
	t.Helper()
	url := natstest.Start(t)
	return url, func() {
		s, err := natstest.JetStream(t, url).Stream(t.Context(), "kvcast")
		if err == nil {
			err = s.Purge(t.Context())
		}
		if err != nil {
			t.Fatal(err)
		}
	}, nil
}

func deniedStream(t *testing.T) (store string, enter, leave func()) {
	t.Helper()
	port, dir := harness.FreePort(t), t.TempDir()
	options := func(denied ...string) *server.Options {
		user := &server.User{Username: "kvcast", Permissions: &server.Permissions{Publish: &server.SubjectPermission{Deny: denied}}}
		return &server.Options{
			Host: "127.0.0.1", Port: port, JetStream: true, StoreDir: dir, NoSigs: true, NoLog: true,
			Users: []*server.User{user}, NoAuthUser: user.Username,
		}
	}
	s, err := server.NewServer(options())
	if err != nil {
		t.Fatal(err)
	}
	s.Start()
	t.Cleanup(func() {
		s.Shutdown()
		s.WaitForShutdown()
	})
	if !s.ReadyForConnections(harness.Timeout) {
		t.Fatalf("nats-server is not ready after %v", harness.Timeout)
	}
	deny := func(subjects ...string) func() {
		return func() {
			if err := s.ReloadOptions(options(subjects...)); err != nil {
				t.Fatal(err)
			}
		}
	}
	return s.ClientURL(), deny("kvcast.kvcast.>"), deny()
}

func removedDirectory(t *testing.T) (store string, enter, leave func()) {
	t.Helper()
	dir := filepath.Join(t.TempDir(), "journal")
	return "file:" + dir, func() {
		if err := os.RemoveAll(dir); err != nil {
			t.Fatal(err)
		}
	}, nil
}

// wantEnd waits until a server ends by itself, with an error that it prints last.
func wantEnd(t *testing.T, s *harness.Process, pattern string) {
	t.Helper()
	select {
	case <-s.Ended():
	case <-harness.Context(t).Done():
		t.Fatal("the server does not end")
	}
	log := s.Log()
	if last := log[len(log)-1]; s.ExitStatus() != 1 || !regexp.MustCompile("^kvcast: .*("+pattern+")").MatchString(last) {
		t.Errorf("status %d and %q, want 1 and an error with %q", s.ExitStatus(), last, pattern)
	}
}

// TestServersEndWhenNothingCanBeStored brings the journal of servers into each state. They must end, and so must the next, until the
// operator has done what the error says.
func TestServersEndWhenNothingCanBeStored(t *testing.T) {
	testclass.Process(t)
	t.Parallel()
	for name, state := range unstorable {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			store, enter, leave := state.journal(t)
			p := publisherOf(t, simulator.SocketConfig{})
			begin := func() *harness.Process {
				return launch(t, "--journal", store, "--worker", "name=w,model=m,connect="+p.Endpoint()+",replay="+p.ReplayEndpoint())
			}
			var servers []*harness.Process
			for range state.servers {
				servers = append(servers, begin())
			}
			if err := p.WaitSubscribed(harness.Context(t), 1); err != nil {
				t.Fatal(err)
			}
			for n := range uint64(5) {
				publish(t, p, chainedBlock(n))
			}
			for _, s := range servers {
				awaitRank(t, harness.ServerOf(t, s), kvcastv1.Trust_TRUST_EXACT, 5)
			}
			enter()
			if !state.isIdle {
				publish(t, p, chainedBlock(5))
			}
			for _, s := range servers {
				wantEnd(t, s, state.error)
			}
			if leave != nil {
				wantEnd(t, begin(), state.error)
				leave()
			}
			s := harness.ServerOf(t, begin())
			s.AwaitSample(`kvcast_ingest_publishers{state="live"} 1`)
			if state.isIdle {
				publish(t, p, chainedBlock(5))
			}
			publish(t, p, chainedBlock(6)) // shows that the replay had all
			awaitRank(t, s, kvcastv1.Trust_TRUST_EXACT, 7)
		})
	}
}
