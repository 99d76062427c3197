package harness

import (
	"fmt"
	"net"
	"net/url"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/nats-io/nats-server/v2/server"
)

// StartNATS starts a nats-server with JetStream in this process, and returns its URL. The test stops it.
func StartNATS(t testing.TB) (url string) {
	t.Helper()
	s := startNATS(t, &server.Options{Port: server.RANDOM_PORT, StoreDir: t.TempDir()})
	t.Cleanup(func() { stopNATS(s) })
	return s.ClientURL()
}

func startNATS(t testing.TB, o *server.Options) *server.Server {
	t.Helper()
	o.Host, o.JetStream, o.NoSigs, o.NoLog = "127.0.0.1", true, true, true
	s, err := server.NewServer(o)
	if err != nil {
		t.Fatal(err)
	}
	s.Start()
	if !s.ReadyForConnections(Timeout) {
		t.Fatalf("nats-server is not ready after %v", Timeout)
	}
	return s
}

func stopNATS(s *server.Server) {
	s.Shutdown()
	s.WaitForShutdown()
}

// NATSCluster is three nats-servers in this process, which store each stream three times if it has as many replicas.
type NATSCluster struct {
	t       testing.TB
	options []server.Options
	servers []*server.Server
}

// StartNATSCluster starts the servers. The test stops them.
func StartNATSCluster(t testing.TB) *NATSCluster {
	t.Helper()
	const size = 3
	c := &NATSCluster{t: t, servers: make([]*server.Server, size)}
	dir := t.TempDir()
	var routes []*url.URL
	for i := range size {
		client, peer := FreePort(t), FreePort(t)
		routes = append(routes, &url.URL{Scheme: "nats", Host: fmt.Sprintf("127.0.0.1:%d", peer)})
		c.options = append(c.options, server.Options{
			ServerName: fmt.Sprintf("nats-%d", i), Port: client, StoreDir: filepath.Join(dir, fmt.Sprint(i)),
			// Clients that connect through proxies must not be told other addresses.
			Cluster: server.ClusterOpts{Name: "nats", Host: "127.0.0.1", Port: peer, NoAdvertise: true},
		})
	}
	for i := range c.options {
		c.options[i].Routes = routes
		c.Start(i)
	}
	t.Cleanup(func() {
		for i := range c.servers {
			c.Stop(i)
		}
	})
	return c
}

// FreePort returns a port of 127.0.0.1 that was free when it was checked.
func FreePort(t testing.TB) int {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0") //nolint:noctx // it does not block
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = l.Close() }()
	return l.Addr().(*net.TCPAddr).Port
}

// URLs returns the servers' URLs, separated by commas.
func (c *NATSCluster) URLs() string {
	var urls []string
	for _, o := range c.options {
		urls = append(urls, fmt.Sprintf("nats://127.0.0.1:%d", o.Port))
	}
	return strings.Join(urls, ",")
}

// Start starts a server, with the files that it had.
func (c *NATSCluster) Start(i int) {
	c.t.Helper()
	o := c.options[i]
	c.servers[i] = startNATS(c.t, &o)
}

// Stop stops a server.
func (c *NATSCluster) Stop(i int) {
	if s := c.servers[i]; s != nil {
		stopNATS(s)
	}
	c.servers[i] = nil
}

// AwaitLeader waits until the servers accept new streams.
func (c *NATSCluster) AwaitLeader() {
	c.t.Helper()
	for deadline := time.Now().Add(Timeout); ; <-time.After(pollInterval) {
		for _, s := range c.servers {
			if s.JetStreamIsLeader() && len(s.JetStreamClusterPeers()) == len(c.servers) {
				return
			}
		}
		if time.Now().After(deadline) {
			c.t.Fatalf("the nats-servers have no leader after %v", Timeout)
		}
	}
}

// AwaitReplicas waits until all servers have all messages of streams.
func (c *NATSCluster) AwaitReplicas(streams ...string) {
	c.t.Helper()
	for deadline := time.Now().Add(Timeout); ; <-time.After(pollInterval) {
		behind := ""
		for _, s := range c.servers {
			for _, stream := range streams {
				if !s.JetStreamIsStreamCurrent(server.DEFAULT_GLOBAL_ACCOUNT, stream) {
					behind = s.Name() + " is behind in " + stream
				}
			}
		}
		if behind == "" {
			return
		}
		if time.Now().After(deadline) {
			c.t.Fatalf("%s after %v", behind, Timeout)
		}
	}
}
