package ingest_test

import (
	"errors"
	"strings"
	"testing"

	"github.com/kvcast/kvcast/ingest/config"
	"github.com/kvcast/kvcast/internal/feed"
	"github.com/kvcast/kvcast/test/harness"
)

// A worker that is added may not read the sockets of another one, be that configured or added, until that is removed. Workers
// of the configuration that are asked for their ports have those of the configuration here.
func TestAddedWorkerMayNotReadSocketsOfAnother(t *testing.T) {
	t.Parallel()
	ctx := harness.Context(t)
	add := func(name, connect, replay string) config.Worker {
		return config.Worker{Name: name, HTTP: "http://h:" + name, Sources: []config.Source{{Connect: connect, Replay: replay}}}
	}
	r := newRecorder(t)
	in, _ := start(t, config.Config{Workers: []config.Worker{{Name: "w", Sources: []config.Source{{Connect: "tcp://127.0.0.1:1", DPSize: 2}}}}}, r)
	r.want("add w model  block_size 0 ranks [0 1]")
	refused := func(w config.Worker, field, says string) {
		t.Helper()
		err := in.AddWorker(ctx, w)
		fields := config.FieldErrors(err)
		if len(fields) != 1 || fields[0].Path() != field || !strings.Contains(fields[0].Allowed, says) {
			t.Errorf("add %s: got %v, want an error of %s that says %q", w.Name, err, field, says)
		}
	}
	added := func(w config.Worker) {
		t.Helper()
		if err := in.AddWorker(ctx, w); err != nil {
			t.Errorf("add %s: %v", w.Name, err)
		}
		r.want("add " + w.Name + " model  block_size 0 ranks [0]")
	}
	removed := func(name string) {
		t.Helper()
		if err := in.RemoveWorker(ctx, name, feed.RemovedDeregistered); err != nil {
			t.Errorf("remove %s: %v", name, err)
		}
		r.want("remove " + name)
	}
	refused(add("1", "tcp://127.0.0.1:2", ""), "workers[0].sources[0].connect", `worker "1" would read the events of rank 0 at tcp://127.0.0.1:2, where worker "w" reads the events of rank 1`)
	added(add("1", "tcp://127.0.0.1:3", "tcp://127.0.0.1:4"))
	refused(add("2", "tcp://127.0.0.1:5", "tcp://127.0.0.1:4"), "workers[0].sources[0].replay", `where worker "1" reads the replays of rank 0`)
	if err := in.AddWorker(ctx, add("1", "tcp://127.0.0.1:3", "tcp://127.0.0.1:4")); !errors.Is(err, config.ErrWorkerExists) {
		t.Errorf("add the same worker: got %v, want %v", err, config.ErrWorkerExists)
	}
	removed("1")
	added(add("2", "tcp://127.0.0.1:5", "tcp://127.0.0.1:4"))
	removed("w")
	added(add("1", "tcp://127.0.0.1:2", ""))
}
