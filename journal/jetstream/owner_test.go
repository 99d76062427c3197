package jetstream_test

import (
	"bytes"
	"errors"
	"fmt"
	"os"
	"strings"
	"sync"
	"testing"

	natsjs "github.com/nats-io/nats.go/jetstream"

	"github.com/kvcast/kvcast/journal"
	"github.com/kvcast/kvcast/journal/jetstream"
)

// writer appends and puts checkpoints until its journal fails. It appends its own number and the entry's number.
type writer struct {
	journal      *jetstream.Journal
	acknowledged int     // entries
	checkpoint   string  // the last one stored
	errs         []error // that ended the loops
}

// run returns when the journal has failed.
func (w *writer) run(t *testing.T, number int) {
	var appending, putting sync.WaitGroup
	var appendErr, putErr error
	pending := make(chan journal.Pending, 1000)
	appending.Go(func() {
		defer close(pending)
		source := &journal.Source{Worker: "w"}
		for n := 0; appendErr == nil; n++ {
			var p journal.Pending
			if p, appendErr = w.journal.Append(t.Context(), journal.Record{Source: source, Body: fmt.Appendf(nil, "%d %d", number, n)}); appendErr == nil {
				pending <- p
			}
		}
	})
	putting.Go(func() {
		for n := 0; putErr == nil; n++ {
			data := fmt.Sprintf("%d %d", number, n)
			if putErr = w.journal.Checkpoints().Put(t.Context(), "w", []byte(data)); putErr == nil {
				w.checkpoint = data
			}
		}
	})
	for p := range pending {
		if _, err := p.Wait(t.Context()); err == nil {
			w.acknowledged++
		}
	}
	appending.Wait()
	putting.Wait()
	w.errs = []error{appendErr, putErr}
}

// TestSecondOwnerWins lets a second journal take over the stream of one that appends and writes checkpoints, several
// times.
func TestSecondOwnerWins(t *testing.T) {
	s := startServer(t, t.TempDir(), 0)
	var all []string
	former := &writer{}
	former.journal, _ = load(t, serverConfig(s.ClientURL()))
	for number := range 3 {
		var running sync.WaitGroup
		running.Go(func() { former.run(t, number) })
		awaitNewest(former.journal, former.journal.Bounds().Newest+300)
		next, got := load(t, serverConfig(s.ClientURL()))
		running.Wait()
		for _, err := range former.errs {
			if want := fmt.Sprintf("is used by process %d on host", os.Getpid()); !errors.Is(err, journal.ErrFenced) || !strings.Contains(err.Error(), want) {
				t.Errorf("the former owner ended with %v, want ErrFenced and %q", err, want)
			}
		}
		if got = got[len(all):]; len(got) < former.acknowledged {
			t.Fatalf("the next owner got %d entries, and %d are acknowledged", len(got), former.acknowledged)
		}
		for n, e := range got {
			all = append(all, fmt.Sprintf("%d %d", number, n))
			if e.Seq != uint64(len(all)) || string(e.Body) != all[e.Seq-1] {
				t.Fatalf("entry %d is %s, want %s", e.Seq, e.Body, all[len(all)-1])
			}
		}
		for c, err := range next.Checkpoints().All(t.Context()) {
			if err != nil || string(c.Data) != former.checkpoint {
				t.Errorf("the checkpoint is %s, %v, want %s", c.Data, err, former.checkpoint)
			}
		}
		former = &writer{journal: next}
	}
	appendN(t, former.journal, "w", 1)
}

// TestPausedOwnerOverwritesNothing lets a journal that was not reachable while another took over write a checkpoint.
func TestPausedOwnerOverwritesNothing(t *testing.T) {
	s := startServer(t, t.TempDir(), 0)
	p := startProxy(t, s)
	paused, _ := load(t, serverConfig(p.url()))
	put(t, paused, "w", []byte("first"))
	p.silence()
	var lines logLines
	cfg := serverConfig(s.ClientURL())
	cfg.Log = lines.logger()
	other, _ := load(t, cfg)
	if !lines.contains("does not answer") {
		t.Error("not logged that the former process does not answer")
	}
	put(t, other, "w", []byte("second"))
	done := make(chan error, 1)
	go func() { done <- paused.Checkpoints().Put(t.Context(), "w", []byte("old")) }()
	p.cut()
	if err := <-done; !errors.Is(err, journal.ErrFenced) {
		t.Errorf("got %v, want ErrFenced", err)
	}
	<-paused.Failed()
	if err := paused.Err(); !errors.Is(err, journal.ErrFenced) {
		t.Errorf("the paused journal has failed with %v, want ErrFenced", err)
	}
	wantCheckpoints(t, other, map[string]string{"w": `6 "ond"`})
	appendN(t, other, "w", 1)
}

// TestFormerOwnerCannotPutAfterTheClaim puts a checkpoint before the journal knows that another process has the streams.
func TestFormerOwnerCannotPutAfterTheClaim(t *testing.T) {
	s := startServer(t, t.TempDir(), 0)
	j, _ := load(t, serverConfig(s.ClientURL()))
	put(t, j, "w", []byte("first"))
	administer(t, s, func(js natsjs.JetStream) { // a claim without a request to hand over
		if _, err := js.Publish(t.Context(), "$O.kvcast-checkpoints.owner", []byte(`{"token": "x", "host": "h", "pid": 7}`)); err != nil {
			t.Fatal(err)
		}
	})
	err := j.Checkpoints().Put(t.Context(), "w", bytes.Repeat([]byte("old"), 1<<20))
	if !errors.Is(err, journal.ErrFenced) || !strings.Contains(err.Error(), `process 7 on host "h"`) {
		t.Errorf("put: got %v, want ErrFenced that names the process", err)
	}
	wantCheckpoints(t, j, map[string]string{"w": `5 "rst"`})
	wantFailure(t, j, journal.ErrFenced, "process 7")
	if err := j.Discard(t.Context()); !errors.Is(err, journal.ErrFenced) {
		t.Errorf("discard: got %v, want ErrFenced", err)
	}
}
