package tunnel_test

import (
	"bytes"
	"crypto/tls"
	"crypto/x509"
	"io"
	"net"
	"net/url"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/kvcast/kvcast/internal/core/testclass"
	"github.com/kvcast/kvcast/internal/simulator"
	"github.com/kvcast/kvcast/internal/wire"
	kvcastv1 "github.com/kvcast/kvcast/proto/kvcast/v1"
	"github.com/kvcast/kvcast/test/harness"
	"github.com/kvcast/kvcast/test/harness/enginetest"
)

func TestMain(m *testing.M) { os.Exit(harness.RunTests(m)) }

const ghostunnel = "../../bin/tools/ghostunnel"

const model = "Qwen/Qwen3-0.6B"

// URIs of certificates.
const (
	kvcastURI  = "spiffe://example.com/kvcast"
	engineURI  = "spiffe://example.com/engine/vllm-0"
	anotherURI = "spiffe://example.com/engine/vllm-1"
)

func TestEngineConnectsThroughTunnels(t *testing.T) {
	testclass.Packaging(t)
	test(t, readRecipe(t, "The engine connects to kvcast"), `kvcast_ingest_connections_total{worker=""} 1`)
}

// TestEngineConnectsThroughAUnixSocket has a Unix socket in place of kvcast's port.
func TestEngineConnectsThroughAUnixSocket(t *testing.T) {
	testclass.Packaging(t)
	r := readRecipe(t, "The engine connects to kvcast")
	socket := filepath.Join(r.dir, engineHost)
	for _, u := range r.tunnels {
		if u.host == kvcastHost && u.server {
			r.serve[1] = strings.ReplaceAll(r.serve[1], "tcp://"+u.flag("--target"), "ipc://"+socket)
			u.args[slices.Index(u.args, "--target")+1] = "unix:" + socket
		}
	}
	test(t, r, `kvcast_ingest_connections_total{worker=""} 1`)
}

func TestKvcastConnectsThroughTunnels(t *testing.T) {
	testclass.Packaging(t)
	test(t, readRecipe(t, "kvcast connects to the engine"), `kvcast_ingest_connections_total{worker="vllm-0"} 1`)
}

// test checks that no stranger gets through the tunnels of a recipe, and that an engine does, without loss. The metric says that there was no other connection.
// Such tests do not run in parallel: a process that one starts would have a listener of another until it runs its program, and its port could not be bound again.
func test(t *testing.T, r *recipe, onlyConnection string) {
	if _, err := os.Stat(ghostunnel); err != nil {
		t.Skip("bin/tools/ghostunnel is missing: run make tunnels")
	}
	ca, otherCA := harness.NewAuthority(t), harness.NewAuthority(t)
	r.link(ca.File, "ca.crt")
	r.issue(ca, kvcastHost, kvcastURI)
	r.issue(ca, engineHost, engineURI)
	strangers := func(u tunnel) map[string]*tls.Certificate {
		return map[string]*tls.Certificate{
			"without TLS":    nil,
			"no certificate": {},
			"another CA":     load(t, otherCA, u.peer(), time.Hour),
			"expired":        load(t, ca, u.peer(), -time.Minute),
			"another name":   load(t, ca, anotherURI, time.Hour),
		}
	}
	for _, u := range r.tunnels {
		if !u.server {
			r.start(u)
			for name, stranger := range strangers(u) {
				t.Run(strings.Join([]string{"stranger in place of", u.flag("--target"), name}, " "), func(t *testing.T) { impersonate(t, u, stranger) })
			}
		}
	}
	for _, u := range r.tunnels {
		if u.server {
			r.start(u)
		}
	}
	publisher := enginetest.NewSimulated(t, simulator.PublisherConfig{SocketConfig: r.engine})
	s := startKvcast(t, r.serve)
	e := engine{t: t, server: s}
	if err := publisher.WaitSubscribed(harness.Context(t), 1); err != nil {
		t.Fatal(err)
	}
	e.publish(publisher.Publish)
	e.await()
	for _, u := range r.tunnels {
		if u.server {
			for name, stranger := range strangers(u) {
				t.Run(strings.Join([]string{"stranger at", u.flag("--listen"), name}, " "), func(t *testing.T) { intrude(t, u, ca, stranger) })
			}
		}
	}
	e.publish(publisher.Drop) // the tunnel to the replay socket has it
	e.publish(publisher.Publish)
	e.await()
	if err := s.AwaitMetric(t.Context(), onlyConnection); err != nil {
		t.Error(err)
	}
}

// issue writes the certificate and the key of a host, as the recipe's commands name them.
func (r *recipe) issue(ca *harness.Authority, host, uri string) {
	r.t.Helper()
	cert, key := ca.IssueWith(host, named(r.t, uri))
	r.link(cert, host+".crt")
	r.link(key, host+".key")
}

// link makes a file one of the recipe's.
func (r *recipe) link(file, name string) {
	r.t.Helper()
	if err := os.Symlink(file, filepath.Join(r.dir, name)); err != nil {
		r.t.Fatal(err)
	}
}

// named gives a certificate a URI, and the name of this host.
func named(t *testing.T, uri string) func(*x509.Certificate) {
	t.Helper()
	u, err := url.Parse(uri)
	if err != nil {
		t.Fatal(err)
	}
	return func(c *x509.Certificate) { c.DNSNames, c.URIs = []string{"localhost"}, []*url.URL{u} }
}

// load returns a certificate with a URI that ends after a time.
func load(t *testing.T, ca *harness.Authority, uri string, after time.Duration) *tls.Certificate {
	t.Helper()
	name := named(t, uri)
	pair, err := tls.LoadX509KeyPair(ca.IssueWith("stranger", func(c *x509.Certificate) {
		name(c)
		c.NotAfter = time.Now().Add(after)
	}))
	if err != nil {
		t.Fatal(err)
	}
	return &pair
}

// start starts a tunnel, which ends with the test, and waits until it listens.
func (r *recipe) start(u tunnel) {
	r.t.Helper()
	program, err := filepath.Abs(ghostunnel)
	if err != nil {
		r.t.Fatal(err)
	}
	cmd := exec.Command(program, u.args...) //nolint:noctx // it is killed
	log := new(bytes.Buffer)
	cmd.Dir, cmd.Stdout, cmd.Stderr = r.dir, log, log
	if err := cmd.Start(); err != nil {
		r.t.Fatal(err)
	}
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		_ = cmd.Wait() // it was killed
	}()
	r.t.Cleanup(func() {
		_ = cmd.Process.Kill()
		<-ended
		if r.t.Failed() {
			r.t.Logf("%s:\n%s", cmd, log)
		}
	})
	harness.WaitFor(r.t, func() bool {
		c, err := net.Dial("tcp", u.flag("--listen")) //nolint:noctx // it does not block
		if err == nil {
			_ = c.Close()
		}
		select {
		case <-ended:
			r.t.Fatalf("%s has ended", cmd)
		default:
		}
		return err == nil
	})
}

// impersonate has a stranger with a certificate in place of the target of a client's tunnel. Nothing may get through in either direction.
func impersonate(t *testing.T, u tunnel, certificate *tls.Certificate) {
	t.Helper()
	l, err := net.Listen("tcp", u.flag("--target")) //nolint:noctx // it does not block
	if err != nil {
		t.Fatal(err)
	}
	var serving sync.WaitGroup
	defer serving.Wait()
	defer func() { _ = l.Close() }()
	serving.Go(func() {
		for {
			c, err := l.Accept()
			if err != nil {
				return
			}
			serving.Go(func() {
				defer func() { _ = c.Close() }()
				if certificate != nil {
					c = tls.Server(c, &tls.Config{Certificates: []tls.Certificate{*certificate}, ClientAuth: tls.RequestClientCert})
				}
				_, _ = io.WriteString(c, greeting) // it is refused
				if text := read(c); text == greeting {
					t.Errorf("a stranger got %q", text)
				}
			})
		}
	})
	c := dial(t, u.flag("--listen"))
	if _, err := io.WriteString(c, greeting); err != nil {
		t.Fatal(err)
	}
	if text := read(c); text != "" {
		t.Errorf("got %q of a stranger", text)
	}
}

// intrude has a stranger with a certificate connect to a server's tunnel, which must close the connection.
func intrude(t *testing.T, u tunnel, ca *harness.Authority, certificate *tls.Certificate) {
	t.Helper()
	c := dial(t, u.flag("--listen"))
	if certificate != nil {
		pem, err := os.ReadFile(ca.File)
		if err != nil {
			t.Fatal(err)
		}
		roots := x509.NewCertPool()
		roots.AppendCertsFromPEM(pem)
		c = tls.Client(c, &tls.Config{RootCAs: roots, ServerName: "localhost", GetClientCertificate: func(*tls.CertificateRequestInfo) (*tls.Certificate, error) {
			return certificate, nil // also if the server names other CAs
		}})
	}
	_, _ = io.WriteString(c, greeting) // it is refused
	// Without TLS here, it may answer with an alert of TLS.
	if text := read(c); text != "" && (certificate != nil || text[0] == greeting[0]) {
		t.Errorf("got %q", text)
	}
}

// read returns what comes first; nothing if the connection ends before.
func read(c net.Conn) string {
	text := make([]byte, 256)
	n, _ := c.Read(text)
	return string(text[:n])
}

// greeting is how each side of ZeroMQ begins.
const greeting = "\xff\x00\x00\x00\x00\x00\x00\x00\x01\x7f\x03"

// dial connects for as long as a test may take.
func dial(t *testing.T, address string) net.Conn {
	t.Helper()
	c, err := new(net.Dialer).DialContext(t.Context(), "tcp", address)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = c.Close() })
	if err := c.SetDeadline(time.Now().Add(harness.Timeout)); err != nil {
		t.Fatal(err)
	}
	return c
}

// startKvcast starts kvcast serve, which ends with the test.
func startKvcast(t *testing.T, args []string) *harness.Process {
	t.Helper()
	s, err := harness.StartProcess(harness.ProcessConfig{Race: testclass.RaceEnabled, Args: args})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := s.Stop(); err != nil {
			t.Error(err)
		} else if t.Failed() {
			t.Logf("the log of kvcast:\n%s", strings.Join(s.Log(), "\n"))
		}
	})
	return s
}

// engine is a simulated engine that stores a prompt block by block.
type engine struct {
	t      *testing.T
	server *harness.Process
	blocks uint32
}

// publish publishes or drops the next block.
func (e *engine) publish(method enginetest.Method) {
	e.t.Helper()
	stored := wire.Event{
		Kind: wire.KindStored, BlockHashes: []uint64{uint64(e.blocks + 1)}, Tokens: []uint32{e.blocks}, BlockSize: 1,
		HasParent: e.blocks > 0, Parent: uint64(e.blocks),
	}
	if _, err := method(stored); err != nil {
		e.t.Fatal(err)
	}
	e.blocks++
}

// await waits until kvcast says EXACT of all blocks.
func (e *engine) await() {
	e.t.Helper()
	addr, err := e.server.Addr()
	if err != nil {
		e.t.Fatal(err)
	}
	router := kvcastv1.NewRouterEventServiceClient(harness.Dial(e.t, addr))
	prompt := new(kvcastv1.Prompt)
	for token := range e.blocks {
		prompt.TokenIds = append(prompt.TokenIds, token)
	}
	harness.WaitFor(e.t, func() bool {
		got, err := router.MatchPrefix(e.t.Context(), &kvcastv1.MatchPrefixRequest{Model: model, Prompts: []*kvcastv1.Prompt{prompt}})
		if err != nil {
			e.t.Fatal(err)
		}
		matches := got.GetPrompts()[0].GetMatches()
		return len(matches) == 1 && matches[0].GetWorker() == engineHost && matches[0].GetTrust() == kvcastv1.Trust_TRUST_EXACT && matches[0].GetBlocks() == e.blocks
	})
}
