package upgrade_test

import (
	"strings"
	"testing"

	"github.com/nats-io/nats.go/jetstream"

	"github.com/kvcast/kvcast/internal/core/testclass"
	"github.com/kvcast/kvcast/test/harness"
	"github.com/kvcast/kvcast/test/harness/natstest"
)

// TestLaterFormatIsRefused downgrades a server to one that does not know the format of the journal. It ends with an error that says what to
// do, and changes nothing: the former version continues.
func TestLaterFormatIsRefused(t *testing.T) {
	testclass.Process(t)
	const stream = "kvcast"
	for _, test := range []struct {
		name string
		// open returns the value of --journal, and what calls a function with a connection to the NATS server of the journal, while no
		// kvcast runs.
		open func(*testing.T) (journal string, administer func(func(jetstream.JetStream)))
	}{
		{"file", func(t *testing.T) (string, func(func(jetstream.JetStream))) {
			dir := t.TempDir()
			return "file:" + dir, func(do func(jetstream.JetStream)) {
				url, stop := natstest.StartIn(t, dir)
				do(natstest.JetStream(t, url))
				stop()
			}
		}},
		{"nats", func(t *testing.T) (string, func(func(jetstream.JetStream))) {
			url := natstest.Start(t)
			return url, func(do func(jetstream.JetStream)) { do(natstest.JetStream(t, url)) }
		}},
	} {
		t.Run(test.name, func(t *testing.T) {
			t.Parallel()
			journal, administer := test.open(t)
			setFormat := func(to string) (from string) {
				administer(func(js jetstream.JetStream) {
					s, err := js.Stream(t.Context(), stream)
					if err != nil {
						t.Fatal(err)
					}
					c := s.CachedInfo().Config
					from, c.Metadata["kvcast.format"] = c.Metadata["kvcast.format"], to
					if _, err := js.UpdateStream(t.Context(), c); err != nil {
						t.Fatal(err)
					}
				})
				return from
			}
			w := newWorld(t, rollout{durable: true, journal: func(*testing.T) []string { return []string{"--journal", journal} }})
			w.pods = []*pod{w.startPod(w.this)}
			w.forward(w.pods)
			w.follow()
			w.awaitEntries()
			w.forward(nil)
			if err := w.pods[0].Stop(); err != nil {
				t.Fatal(err)
			}
			format := setFormat("99")

			p, err := harness.StartProcess(harness.ProcessConfig{Program: w.other, Args: w.args})
			if err != nil {
				t.Fatal(err)
			}
			t.Cleanup(func() { _ = p.Kill() })
			harness.WaitFor(t, func() bool {
				select {
				case <-p.Ended():
					return true
				default:
					return false
				}
			})
			log := strings.Join(p.Log(), "\n")
			if p.ExitStatus() == 0 || !strings.Contains(log, "the stream has format 99, and this version of kvcast reads up to ") ||
				!strings.Contains(log, "use the version that wrote it") {
				t.Errorf("a server without the format ended with status %d, and logged:\n%s", p.ExitStatus(), log)
			}

			setFormat(format)
			epoch := w.routers[0].Epoch()
			w.pods = []*pod{w.startPod(w.this)}
			w.forward(w.pods)
			w.awaitEntries()
			w.engines.WantViews(w.routers...)
			if got := w.routers[0].Epoch(); got != epoch {
				t.Errorf("the epoch is %s, want %s", got, epoch)
			}
			if err := w.pods[0].Stop(); err != nil {
				t.Error(err)
			}
		})
	}
}
