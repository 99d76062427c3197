package observe_test

import (
	"bufio"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/kvcast/kvcast/internal/core/testclass"
	"github.com/kvcast/kvcast/internal/simulator"
	"github.com/kvcast/kvcast/test/fleet"
	"github.com/kvcast/kvcast/test/harness"
	"github.com/kvcast/kvcast/test/harness/enginetest"
)

// disk is a file system of some MiB, in a mount namespace that processes can enter.
type disk struct {
	dir string
	pid int // of a process that keeps it
}

// newDisk mounts a disk until the test ends. It skips the test if the machine does not allow it.
func newDisk(t *testing.T, mebibytes int) *disk {
	t.Helper()
	d := &disk{dir: t.TempDir()}
	keeper := exec.Command("unshare", "--mount", "sh", "-c", `mount -t tmpfs -o size="$0"m none "$1" && echo mounted && read -r end`, //nolint:noctx // the test ends it
		fmt.Sprint(mebibytes), d.dir)
	in, err := keeper.StdinPipe() // open until either process exits
	if err != nil {
		t.Fatal(err)
	}
	out, err := keeper.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := keeper.Start(); err != nil {
		t.Skipf("a disk cannot be mounted, which needs Linux, unshare and root: %v", err)
	}
	t.Cleanup(func() {
		_ = in.Close()
		_ = keeper.Wait()
	})
	if line, err := bufio.NewReader(out).ReadString('\n'); err != nil {
		t.Skipf("a disk cannot be mounted, which needs Linux, unshare and root: %q, %v", line, err)
	}
	d.pid = keeper.Process.Pid
	return d
}

// start starts a server with its journal on the disk.
func (d *disk) start(t *testing.T, args ...string) *harness.Process {
	t.Helper()
	p, err := harness.StartProcess(harness.ProcessConfig{
		Race: testclass.RaceEnabled, Wrapper: []string{"nsenter", "--mount", "--target", fmt.Sprint(d.pid), "--"},
		Args: append([]string{"--journal", "file:" + filepath.Join(d.dir, "journal")}, args...),
	})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = p.Kill() })
	return p
}

// fill fills the disk with a file up to a share of its size.
func (d *disk) fill(t *testing.T, share float64) {
	t.Helper()
	root := filepath.Join(fmt.Sprintf("/proc/%d/root", d.pid), d.dir)
	var s unix.Statfs_t
	if err := unix.Statfs(root, &s); err != nil {
		t.Fatal(err)
	}
	free := (1 - share) * float64(s.Blocks)
	f, err := os.OpenFile(filepath.Join(root, "other"), os.O_CREATE|os.O_WRONLY|os.O_APPEND, 0o600)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = f.Close() }()
	_, err = io.Copy(f, io.LimitReader(zeros{}, int64(max(0, float64(s.Bfree)-free))*s.Bsize))
	if err != nil && !errors.Is(err, unix.ENOSPC) {
		t.Fatal(err)
	}
}

// zeros reads as zeros.
type zeros struct{}

func (zeros) Read(b []byte) (int, error) { return len(b), nil }

// TestIncidentsOfDisks fills the disk of a journal to nine tenths, and then wholly: the server ends, and so does each further run.
func TestIncidentsOfDisks(t *testing.T) {
	testclass.Process(t)
	t.Parallel()
	needs(t, "prometheus")
	d := newDisk(t, 64)
	address, args := adminAt(t)
	engine := enginetest.NewSimulated(t, simulator.PublisherConfig{})
	args = append(args, "--worker", engineFlag("w", engine.Endpoint(), engine.ReplayEndpoint()))
	server := d.start(t, args...)
	fleet.Address(t, server)
	p := watch(t, address)
	fills, down := of("KvcastDiskFills", "instance", address), of("KvcastDown", "instance", address)
	p.quiet(fills, down)
	d.fill(t, 0.95)
	p.wantFiring(nil, fills)

	runs := 1
	p.wantFiring(func() {
		d.fill(t, 1)
		for i := range 10 {
			publish(t, engine, stored(uint64(1+1000*i), 900))
		}
		select {
		case <-server.Ended():
			server, runs = d.start(t, args...), runs+1
		default:
		}
	}, down)
	if runs == 1 {
		t.Error("the first run has not ended")
	}
}
