package restart_test

import (
	"cmp"
	"fmt"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/kvcast/kvcast/client"
	"github.com/kvcast/kvcast/internal/core/testclass"
	"github.com/kvcast/kvcast/test/fleet"
	"github.com/kvcast/kvcast/test/harness"
)

// cuts is the number of points at which a file is cut.
const cuts = 4

// tear is a history of a server that was killed, and what it has left.
type tear struct {
	dir    string
	epoch  string
	args   []string // without the journal
	states map[string]client.BlocksDigest
	rng    *rand.Rand
}

// newTear runs a server on some entries, and kills it. part makes the history another one.
func newTear(t *testing.T, part int64, flags ...string) *tear {
	t.Helper()
	all := fleet.New(t, *seed)
	all.Faults = nil
	h := &tear{dir: t.TempDir(), args: flags, rng: rand.New(rand.NewPCG(*seed, 4+uint64(part)))}
	for i := range engineCount {
		h.args = append(h.args, "--worker", all.Add(fmt.Sprintf("engine-%d", i), 1, fleet.Bound()).Flag())
	}
	s := newServerIn(t, h.dir, "16MiB", h.args...)
	s.Launch(t)
	s.Proxy.Retarget(fleet.Address(t, s.Process))
	if err := s.router.Await(t.Context(), 400); err != nil {
		t.Fatal(err)
	}
	h.states = all.Pause()
	if err := s.router.Converge(t.Context(), h.states); err != nil {
		t.Fatal(err)
	}
	s.end()
	h.epoch = s.router.Epoch()
	return h
}

// blocks returns the files of a stream's messages, in no particular order.
func blocks(t *testing.T, dir, stream string) []string {
	t.Helper()
	names, err := filepath.Glob(filepath.Join(dir, "jetstream", "$G", "streams", stream, "msgs", "*.blk"))
	if err != nil || len(names) == 0 {
		t.Fatalf("files of stream %s: got %q, %v", stream, names, err)
	}
	return names
}

// anotherBoot returns a wrapper of a program that finds another id of the machine's boot. It skips the test if that is not
// allowed.
func anotherBoot(t *testing.T) []string {
	t.Helper()
	boot := filepath.Join(t.TempDir(), "boot_id")
	if err := os.WriteFile(boot, []byte("another\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	wrapper := []string{"unshare", "--mount", "sh", "-c", `mount --bind "$0" /proc/sys/kernel/random/boot_id && exec "$@"`, boot}
	if out, err := exec.CommandContext(t.Context(), wrapper[0], append(wrapper[1:], "true")...).CombinedOutput(); err != nil {
		t.Skipf("the id of the boot cannot be changed, which needs Linux and root: %v\n%s", err, out)
	}
	return wrapper
}

// cut cuts the last file of a stream's messages at a random byte of a part of it: the parts are numbered from 0 to cuts-1. A copy
// of the directory would be known as one, so each cut needs a history of its own.
func (h *tear) cut(t *testing.T, stream string, part int64) {
	t.Helper()
	last := slices.MaxFunc(blocks(t, h.dir, stream), func(a, b string) int { return cmp.Or(cmp.Compare(len(a), len(b)), cmp.Compare(a, b)) })
	info, err := os.Stat(last)
	if err != nil {
		t.Fatal(err)
	}
	at := (part*info.Size() + h.rng.Int64N(info.Size())) / cuts
	t.Logf("%s is cut at byte %d of %d", filepath.Base(last), at, info.Size())
	if err := os.Truncate(last, at); err != nil {
		t.Fatal(err)
	}
}

// restart starts a server again, checks that a new router gets what the engines hold, and returns the epoch and
// the log. The next start continues.
func (h *tear) restart(t *testing.T, wrapper ...string) (epoch, log string) {
	t.Helper()
	for range 2 {
		p, err := harness.StartProcess(harness.ProcessConfig{
			Race: testclass.RaceEnabled, Wrapper: wrapper, Args: append([]string{"--journal", "file:" + h.dir}, h.args...),
		})
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { _ = p.Kill() })
		r := follow(t, fleet.Address(t, p))
		if err := r.Converge(t.Context(), h.states); err != nil {
			t.Errorf("%v\n%s", err, strings.Join(p.Log(), "\n"))
		}
		if err := p.Kill(); err != nil {
			t.Fatal(err)
		}
		if epoch == "" {
			epoch, log = r.Epoch(), strings.Join(p.Log(), "\n")
		} else if r.Epoch() != epoch {
			t.Errorf("got epoch %s after %s\n%s", r.Epoch(), epoch, strings.Join(p.Log(), "\n"))
		}
	}
	return epoch, log
}

// TestTornEntriesBeginAnEpoch cuts the last file of the entries, which were acknowledged.
func TestTornEntriesBeginAnEpoch(t *testing.T) {
	testclass.Process(t)
	t.Parallel()
	for part := range int64(cuts) {
		h := newTear(t, part, "--journal-checkpoint-bytes", "64KiB")
		h.cut(t, "kvcast", part)
		epoch, log := h.restart(t)
		if epoch == h.epoch || !strings.Contains(log, "the journal cannot be read") {
			t.Errorf("got epoch %s after %s, which has lost entries\n%s", epoch, h.epoch, log)
		}
	}
}

// TestTornCheckpointsLoseNothing cuts the last file of the checkpoints. The entries reach back to the beginning.
func TestTornCheckpointsLoseNothing(t *testing.T) {
	testclass.Process(t)
	t.Parallel()
	for part := range int64(cuts) {
		h := newTear(t, part, "--journal-checkpoint-bytes", "64KiB")
		h.cut(t, "OBJ_kvcast-checkpoints", part)
		if epoch, log := h.restart(t); epoch != h.epoch {
			t.Errorf("got epoch %s after %s\n%s", epoch, h.epoch, log)
		}
	}
}

// TestTornEntriesAfterABootAreKept cuts the last file of the entries as a crash of the machine does.
func TestTornEntriesAfterABootAreKept(t *testing.T) {
	testclass.Process(t)
	t.Parallel()
	wrapper := anotherBoot(t)
	for part := range int64(cuts) {
		h := newTear(t, part, "--journal-checkpoint-bytes", "1GiB")
		h.cut(t, "kvcast", part)
		epoch, log := h.restart(t, wrapper...)
		if epoch == h.epoch || !strings.Contains(log, "The machine has booted") || strings.Contains(log, "level=ERROR") {
			t.Errorf("got epoch %s after %s\n%s", epoch, h.epoch, log)
		}
	}
}
