package embedded_test

import (
	"context"
	"errors"
	"log/slog"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/nats-io/nats-server/v2/server"
	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"
	"golang.org/x/sys/unix"

	"github.com/kvcast/kvcast/internal/journal/jetstream/embedded"
	"github.com/kvcast/kvcast/test/harness"
)

const stream = "s"

func config(dir string) embedded.Config {
	return embedded.Config{Dir: dir, SyncInterval: time.Second, Log: slog.New(slog.DiscardHandler)}
}

func start(t *testing.T, dir string) *embedded.Server {
	t.Helper()
	s, err := embedded.Start(config(dir), stream)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := s.Close(); err != nil {
			t.Error(err)
		}
	})
	return s
}

// use calls f with a connection to a server.
func use(t *testing.T, s *embedded.Server, f func(ctx context.Context, js jetstream.JetStream) error) {
	t.Helper()
	conn, err := nats.Connect("", nats.InProcessServer(s.NATS()))
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	js, err := jetstream.New(conn)
	if err == nil {
		err = f(harness.Context(t), js)
	}
	if err != nil {
		t.Fatal(err)
	}
}

// write creates the stream in a directory, with one message.
func write(t *testing.T, dir string) {
	t.Helper()
	s, err := embedded.Start(config(dir), stream)
	if err != nil {
		t.Fatal(err)
	}
	use(t, s, func(ctx context.Context, js jetstream.JetStream) error {
		_, err := js.CreateStream(ctx, jetstream.StreamConfig{Name: stream, Subjects: []string{"x"}})
		if err == nil {
			_, err = js.Publish(ctx, "x", nil)
		}
		return err
	})
	if err := s.Close(); err != nil {
		t.Fatal(err)
	}
}

func TestDirectoryIsLocked(t *testing.T) {
	dir := t.TempDir()
	start(t, dir)
	if _, err := embedded.Start(config(dir)); err == nil || !strings.Contains(err.Error(), "another process uses "+dir) {
		t.Errorf("second server: got error %v", err)
	}
}

// TestServerThatIsNotReadyInTimeLosesNothing has a process that is not scheduled while nats-server finds out whether it is
// healthy.
func TestServerThatIsNotReadyInTimeLosesNothing(t *testing.T) {
	dir := t.TempDir()
	write(t, dir)
	s := start(t, dir)
	slow := &server.HealthStatus{Status: "unavailable", Error: "failed to be ready for connections after 1ms: "}
	never := true
	embedded.SetHealthz(t, func(checks int, result *server.HealthStatus) *server.HealthStatus {
		if never || checks%5 != 0 {
			return slow
		}
		return result
	})
	if moved, err := s.MoveUnreadable(stream); moved || !errors.Is(err, embedded.ErrNoHealth) {
		t.Errorf("never ready: got %t, %v", moved, err)
	}
	never = false
	if moved, err := s.MoveUnreadable(stream); moved || err != nil {
		t.Errorf("ready at the fifth check: got %t, %v", moved, err)
	}
	if names, err := filepath.Glob(filepath.Join(dir, "unreadable-*")); err != nil || len(names) > 0 {
		t.Errorf("moved away: %v, %v", names, err)
	}
	use(t, s, func(ctx context.Context, js jetstream.JetStream) error {
		x, err := js.Stream(ctx, stream)
		if err == nil && x.CachedInfo().State.Msgs != 1 {
			t.Errorf("got %d messages, want 1", x.CachedInfo().State.Msgs)
		}
		return err
	})
}

func TestRemovedFilesAreNoticed(t *testing.T) {
	t.Parallel()
	for name, remove := range map[string]func(dir string) error{
		"the directory": os.RemoveAll,
		"the streams":   func(dir string) error { return os.RemoveAll(filepath.Join(dir, "jetstream")) },
		"the directory, and another has its name": func(dir string) error {
			return errors.Join(os.Rename(dir, dir+"-moved"), os.CopyFS(dir, os.DirFS(dir+"-moved")))
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			dir := filepath.Join(t.TempDir(), "journal")
			write(t, dir)
			s, err := embedded.Start(config(dir), stream)
			if err != nil {
				t.Fatal(err)
			}
			if err := s.CheckDir(stream); err != nil {
				t.Errorf("before: %v", err)
			}
			if err := remove(dir); err != nil {
				t.Fatal(err)
			}
			if err := s.CheckDir(stream); !errors.Is(err, os.ErrNotExist) || !strings.Contains(err.Error(), dir+" were removed or replaced") {
				t.Errorf("got %v, want an error that names the directory", err)
			}
			_ = s.Close() // what it writes last may fail
		})
	}
}

// TestStopThatTakesLongIsReported checks that a process which ends meanwhile has said why.
func TestStopThatTakesLongIsReported(t *testing.T) {
	t.Parallel()
	for _, tt := range []struct {
		name          string
		stops         time.Duration // 0 is never
		warned, fails bool
	}{
		{name: "at once", stops: time.Second},
		{name: "late", stops: 9 * time.Second, warned: true},
		{name: "never", warned: true, fails: true},
	} {
		t.Run(tt.name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				var log strings.Builder
				cfg := config("/data")
				cfg.Log = slog.New(slog.NewTextHandler(&log, nil))
				stopped := make(chan struct{})
				if tt.stops > 0 {
					time.AfterFunc(tt.stops, func() { close(stopped) })
				}
				err := embedded.AwaitStop(cfg, stopped)
				if (err != nil) != tt.fails || err != nil && !strings.Contains(err.Error(), "in /data has not stopped within 30s, which can follow") {
					t.Errorf("got %v", err)
				}
				if got := strings.Count(log.String(), "has not stopped yet, which can follow an error of its files"); got == 1 != tt.warned {
					t.Errorf("log: %s", &log)
				}
			})
		})
	}
}

// TestDirectoryIsUnlockedWhileAnotherProcessHasTheFile has a second descriptor of the file, as a process that is being forked has.
func TestDirectoryIsUnlockedWhileAnotherProcessHasTheFile(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	s, err := embedded.Start(config(dir), stream)
	if err != nil {
		t.Fatal(err)
	}
	inherited, err := unix.Dup(s.LockFile())
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = unix.Close(inherited) }()
	if err := s.Close(); err != nil {
		t.Fatal(err)
	}
	start(t, dir)
}
