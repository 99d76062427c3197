package natstest

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/nats-io/nats.go/jetstream"

	"github.com/kvcast/kvcast/test/harness"
)

// maxLog bounds what of a nats-server's log a test shows, in bytes.
const maxLog = 16 << 10

// servers is the number of servers of a Cluster.
const servers = 3

// pollInterval is the time between two checks of a condition.
const pollInterval = 20 * time.Millisecond

// Cluster is three nats-servers, each a process, which store each stream three times if it has as many replicas.
type Cluster struct {
	t         testing.TB
	dir       string
	args      [servers][]string
	urls      []string
	processes [servers]*exec.Cmd  // nil: not started
	js        jetstream.JetStream // of a connection to all servers
}

// StartCluster starts the servers, and waits until they accept new streams. The test ends them.
func StartCluster(t testing.TB) *Cluster {
	t.Helper()
	c := &Cluster{t: t, dir: t.TempDir()}
	var peers []string
	for i := range c.args {
		client, peer := fmt.Sprint(harness.FreePort(t)), fmt.Sprintf("nats://127.0.0.1:%d", harness.FreePort(t))
		c.urls, peers = append(c.urls, "nats://127.0.0.1:"+client), append(peers, peer)
		c.args[i] = []string{
			"--name", fmt.Sprintf("nats-%d", i), "--addr", "127.0.0.1", "--port", client, "--jetstream", "--store_dir", c.store(i),
			"--cluster_name", "nats", "--cluster", peer,
			"--no_advertise", // clients that connect through proxies must not be told other addresses
		}
	}
	t.Cleanup(func() {
		for i := range c.processes {
			c.Kill(i)
			if t.Failed() {
				log, _ := os.ReadFile(c.log(i)) // none if it was not started
				t.Logf("log of nats-server %d:\n%s", i, log[max(0, len(log)-maxLog):])
			}
		}
	})
	for i := range c.args {
		c.args[i] = append(c.args[i], "--routes", strings.Join(peers, ","))
		c.Start(i)
	}
	c.js = JetStream(t, c.URLs())
	c.await("the NATS servers have no leader", func(ctx context.Context) error {
		const name = "accepts-streams"
		if _, err := c.js.CreateStream(ctx, jetstream.StreamConfig{Name: name, Replicas: servers}); err != nil {
			return err
		}
		return c.js.DeleteStream(ctx, name)
	})
	return c
}

func (c *Cluster) store(i int) string { return filepath.Join(c.dir, fmt.Sprint(i)) }

func (c *Cluster) log(i int) string { return c.store(i) + ".log" }

// URLs returns the servers' URLs, separated by commas.
func (c *Cluster) URLs() string { return strings.Join(c.urls, ",") }

// JetStream returns a connection to the servers.
func (c *Cluster) JetStream() jetstream.JetStream { return c.js }

// Start starts a server, with the files that it had.
func (c *Cluster) Start(i int) {
	c.t.Helper()
	path, err := harness.NATSServer()
	if err != nil {
		c.t.Fatal(err)
	}
	p := exec.Command(path, c.args[i]...) //nolint:noctx // the test ends it
	_, err = p.StdinPipe()                // open until either process exits
	log, logErr := os.OpenFile(c.log(i), os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o600)
	if err := errors.Join(err, logErr); err != nil {
		c.t.Fatal(err)
	}
	defer func() { _ = log.Close() }()
	p.Stdout, p.Stderr = log, log
	if err := p.Start(); err != nil {
		c.t.Fatalf("start nats-server: %v", err)
	}
	c.processes[i] = p
}

// Stop makes a server shut down, which hands over what it leads.
func (c *Cluster) Stop(i int) { c.end(i, syscall.SIGTERM) }

// Kill sends SIGKILL to a server.
func (c *Cluster) Kill(i int) { c.end(i, syscall.SIGKILL) }

func (c *Cluster) end(i int, s syscall.Signal) {
	c.t.Helper()
	if c.processes[i] == nil {
		return
	}
	c.Signal(i, s)
	_ = c.processes[i].Wait() // its status is that of the signal
	c.processes[i] = nil
}

// Signal sends a signal to a server.
func (c *Cluster) Signal(i int, s os.Signal) {
	c.t.Helper()
	if err := c.processes[i].Process.Signal(s); err != nil {
		c.t.Errorf("send %v to nats-server: %v", s, err)
	}
}

// CPUTime returns the CPU time of the servers that run.
func (c *Cluster) CPUTime() (sum time.Duration) {
	c.t.Helper()
	for _, p := range c.processes {
		if p == nil {
			continue
		}
		used, err := harness.CPUTime(p.Process.Pid)
		if err != nil {
			c.t.Fatal(err)
		}
		sum += used
	}
	return sum
}

// Save copies the files of all servers, which must not run. Restore replaces the files by the copies.
func (c *Cluster) Save() { c.copyStores("", ".saved") }

// Restore replaces the files of all servers, which must not run, by those of the last Save.
func (c *Cluster) Restore() { c.copyStores(".saved", "") }

func (c *Cluster) copyStores(from, to string) {
	c.t.Helper()
	for i := range c.processes {
		target := c.store(i) + to
		if err := errors.Join(os.RemoveAll(target), os.CopyFS(target, os.DirFS(c.store(i)+from))); err != nil {
			c.t.Fatal(err)
		}
	}
}

// AwaitReplicas waits until all servers have all messages of streams.
func (c *Cluster) AwaitReplicas(streams ...string) {
	c.t.Helper()
	for _, name := range streams {
		c.await("a NATS server lacks messages", func(ctx context.Context) error {
			s, err := c.js.Stream(ctx, name)
			if err != nil {
				return err
			}
			cluster := s.CachedInfo().Cluster
			if cluster.Leader == "" || len(cluster.Replicas) != servers-1 {
				return fmt.Errorf("stream %s has leader %q and %d other servers", name, cluster.Leader, len(cluster.Replicas))
			}
			for _, r := range cluster.Replicas {
				if !r.Current {
					return fmt.Errorf("stream %s of server %s is not current", name, r.Name)
				}
			}
			return nil
		})
	}
}

// await waits until a condition returns no error.
func (c *Cluster) await(unmet string, condition func(context.Context) error) {
	c.t.Helper()
	for deadline := time.Now().Add(harness.Timeout); ; <-time.After(pollInterval) {
		ctx, cancel := context.WithTimeout(context.Background(), time.Second)
		err := condition(ctx)
		cancel()
		if err == nil {
			return
		}
		if time.Now().After(deadline) {
			c.t.Fatalf("%s after %v: %v", unmet, harness.Timeout, err)
		}
	}
}
