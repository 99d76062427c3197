package main_test

import (
	"fmt"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"sync"
	"sync/atomic"
	"testing"

	"github.com/kvcast/kvcast/internal/simulator"
	"github.com/kvcast/kvcast/test/faultfs"
	"github.com/kvcast/kvcast/test/harness"
)

func init() {
	states["a disk that hangs"] = state{reach: hangingDisk, error: "journal", waits: "the journal", hangs: true}
	states["a name server that says nothing of an engine"] = state{reach: func(t *testing.T) *harness.Process {
		t.Helper()
		s := launchWithSilentNameServer(t, "--worker", "name=w,model=m,connect=tcp://engine.example:5557", "--ingest-start-wait", "0s")
		mustLog(t, s, "msg=serving admin")
		return s
	}, error: "resolving an engine's name", waits: "ingest"}
	states["a name server that says nothing of the NATS servers"] = state{reach: func(t *testing.T) *harness.Process {
		t.Helper()
		return launchWithSilentNameServer(t, "--journal", "nats://nats.example:4222")
	}, error: "the journal", waits: "the journal", hangs: true}
}

// hangingDisk starts a server whose disk ends no operation before the process tries to exit: until then, the kernel keeps it.
func hangingDisk(t *testing.T) *harness.Process {
	t.Helper()
	disk := faultfs.Mount(t, t.TempDir())
	p := publisherOf(t, simulator.SocketConfig{})
	publish(t, p, storedOf(1))
	s := launch(t, "--journal", "file:"+disk.Dir(), "--worker", "name=w,model=m,connect="+p.Endpoint()+",replay="+p.ReplayEndpoint())
	if err := s.AwaitMetric(harness.Context(t), `kvcast_ingest_events_total{kind="stored",worker="w"} 1`); err != nil {
		t.Fatal(err)
	}
	hangs := make(chan struct{})
	release := sync.OnceFunc(func() { close(hangs) })
	t.Cleanup(release)
	disk.OnOp(func(faultfs.Op) faultfs.Fault {
		<-hangs
		return faultfs.Fault{}
	})
	go func() {
		_, _ = s.Logged(regexp.MustCompile(`kvcast exits before everything is stopped|^kvcast: `)) // or it was killed
		release()
	}()
	publish(t, p, storedOf(2))
	awaitUnready(t, s)
	return s
}

// nameServers is the number of name servers that were started.
var nameServers atomic.Uint32

// launchWithSilentNameServer starts a server that resolves a name, which does not end for minutes.
func launchWithSilentNameServer(t *testing.T, args ...string) *harness.Process {
	t.Helper()
	for _, program := range []string{"unshare", "mount"} {
		if _, err := exec.LookPath(program); err != nil {
			t.Skipf("the file /etc/resolv.conf is not replaced for a program: %v", err)
		}
	}
	address := fmt.Sprintf("127.53.%d.%d", os.Getpid()%256, nameServers.Add(1))
	queries, err := new(net.ListenConfig).ListenPacket(t.Context(), "udp", address+":53")
	if err != nil {
		t.Skipf("a name server cannot listen, which needs root: %v", err)
	}
	t.Cleanup(func() { _ = queries.Close() })
	file := filepath.Join(t.TempDir(), "resolv.conf")
	if err := os.WriteFile(file, []byte("nameserver "+address+"\noptions timeout:30 attempts:5\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	wrapper := []string{"unshare", "-m", "sh", "-c", `mount --bind "$0" /etc/resolv.conf && exec "$@"`, file}
	if out, err := exec.CommandContext(t.Context(), wrapper[0], append(wrapper[1:], "true")...).CombinedOutput(); err != nil {
		t.Skipf("the file /etc/resolv.conf is not replaced for a program, which needs root: %v: %s", err, out)
	}
	s := launchBy(t, wrapper, args...)
	if _, _, err := queries.ReadFrom(make([]byte, 1024)); err != nil {
		t.Fatal(err)
	}
	return s
}
