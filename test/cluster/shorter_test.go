package cluster_test

import (
	"regexp"
	"testing"

	"github.com/kvcast/kvcast/internal/core/testclass"
	"github.com/kvcast/kvcast/test/harness"
)

// TestShorterStreamGetsANewEpoch restores the files of all NATS servers from a copy that lacks acknowledged entries, while
// the servers run. They notice it, and end; when they are started again, the stream continues in another epoch.
func TestShorterStreamGetsANewEpoch(t *testing.T) {
	testclass.Cluster(t)
	w := newWorld(t)
	w.follow()
	w.progress(w.allWorkers()...)
	for i := range memberCount {
		w.nats.Stop(i)
	}
	w.nats.Save()
	w.startAllNATS()
	w.progress(w.allWorkers()...)
	w.check()
	lost, epoch := w.routers[0].Seq(), w.routers[0].Epoch()

	for i := range memberCount {
		w.nats.Kill(i)
	}
	w.nats.Restore()
	w.startAllNATS()
	shorter := false
	for _, m := range w.members {
		select {
		case <-m.Process.Ended():
		case <-harness.Context(t).Done():
			t.Fatalf("%s has not ended", m.name)
		}
		if m.Process.ExitStatus() != 1 {
			t.Errorf("%s has ended with status %d, want 1", m.name, m.Process.ExitStatus())
		}
		reason, err := m.Process.Logged(regexp.MustCompile(`it continues in a new epoch|has the new epoch|another instance ends the epoch|is gone`))
		if err != nil {
			t.Error(err)
		}
		shorter = shorter || reason == "it continues in a new epoch"
	}
	if !shorter {
		t.Error("no server has noticed that the stream is shorter")
	}
	w.restart(w.members...)
	for _, m := range w.members {
		m.runs = m.runs[1:] // the former has logged its error
	}
	w.follow()
	w.progress(w.allWorkers()...)
	w.check()
	if got := w.routers[0].Epoch(); got == epoch {
		t.Errorf("the stream has lost entries before %d, and its epoch is still %s", lost, got)
	}
}

func (w *world) startAllNATS() {
	w.t.Helper()
	for i := range memberCount {
		w.nats.Start(i)
	}
	w.awaitReplicas()
}
