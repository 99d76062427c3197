package serve

import (
	"context"
	"crypto/sha256"
	"crypto/tls"
	"log/slog"
	"net"
	"os"
	"slices"
	"sync/atomic"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/kvcast/kvcast/cmd/kvcast/internal/config"
	ingestconfig "github.com/kvcast/kvcast/ingest/config"
	"github.com/kvcast/kvcast/server"
)

// reloadInterval is how often the files of credentials are read. A change takes effect when two readings in turn have the
// same contents, so that a certificate and its key are replaced together.
const reloadInterval = time.Second

// credentials are the tokens and certificates of the server, which are loaded again when their files change.
type credentials struct {
	cfg  *config.Config
	log  *slog.Logger
	tls  atomic.Pointer[tls.Config] // nil: no TLS
	seen [sha256.Size]byte          // of the files as they were last read
	used [sha256.Size]byte          // of the files as they were loaded, or could not be
}

// loadCredentials loads the files for the first time, and sets up the server's configuration.
func loadCredentials(c *config.Config, log *slog.Logger) (*credentials, error) {
	r := &credentials{cfg: c, log: log}
	before, _ := r.sum() // LoadCredentials has the error
	loaded, err := c.LoadCredentials()
	if err != nil {
		return nil, err
	}
	if r.seen, err = r.sum(); err == nil && r.seen == before {
		r.used = r.seen
	}
	c.Server.Access, c.Server.NoReflection = loaded.Access, !c.Reflection
	if loaded.TLS == nil {
		return r, nil
	}
	r.tls.Store(loaded.TLS)
	c.Server.ClientCertificates = loaded.TLS.ClientCAs != nil
	c.Server.TLS = &tls.Config{
		MinVersion: loaded.TLS.MinVersion,
		GetConfigForClient: func(*tls.ClientHelloInfo) (*tls.Config, error) {
			return r.tls.Load(), nil
		},
	}
	return r, nil
}

// register registers when the server's certificate expires, if it has one.
func (r *credentials) register(registry *prometheus.Registry) {
	if r.tls.Load() == nil {
		return
	}
	registry.MustRegister(prometheus.NewGaugeFunc(prometheus.GaugeOpts{
		Name: "kvcast_server_certificate_expiry_timestamp_seconds", Help: "When the certificate in tls.cert expires.",
	}, func() float64 { return float64(r.tls.Load().Certificates[0].Leaf.NotAfter.Unix()) }))
}

// forHTTP returns a configuration for HTTP ports; nil: no TLS.
func (r *credentials) forHTTP() *tls.Config {
	if r.tls.Load() == nil {
		return nil
	}
	return &tls.Config{
		MinVersion: tls.VersionTLS12,
		GetConfigForClient: func(*tls.ClientHelloInfo) (*tls.Config, error) {
			c := r.tls.Load().Clone()
			c.NextProtos = []string{"http/1.1"}
			return c, nil
		},
	}
}

// sum returns a hash of the contents of all files. Pipes, which can be read once, count as empty.
func (r *credentials) sum() ([sha256.Size]byte, error) {
	h := sha256.New()
	for _, name := range r.cfg.Names() {
		info, err := os.Stat(name)
		if err != nil {
			return [sha256.Size]byte{}, err
		}
		if !info.Mode().IsRegular() {
			continue
		}
		text, err := os.ReadFile(name)
		if err != nil {
			return [sha256.Size]byte{}, err
		}
		sum := sha256.Sum256(text)
		_, _ = h.Write(sum[:])
	}
	return [sha256.Size]byte(h.Sum(nil)), nil
}

// run loads the files again when they change, until ctx ends.
func (r *credentials) run(ctx context.Context, s *server.Server) {
	if len(r.cfg.Names()) == 0 {
		return
	}
	ticker := time.NewTicker(reloadInterval)
	defer ticker.Stop()
	unreadable := false
	for {
		select {
		case <-ticker.C:
		case <-ctx.Done():
			return
		}
		err := r.reload(s)
		if err != nil && !unreadable {
			r.log.Error("tokens and certificates are not read again; the former stay in use", "error", err)
		}
		unreadable = err != nil
	}
}

// reload loads the files if they have changed before the last call and not since. The error says why a file cannot be read.
func (r *credentials) reload(s *server.Server) error {
	sum, err := r.sum()
	if err != nil {
		return err
	}
	stable := sum == r.seen
	r.seen = sum
	if !stable || sum == r.used {
		return nil
	}
	loaded, loadErr := r.cfg.LoadCredentials()
	if again, err := r.sum(); err != nil || again != sum {
		return err // they change at this moment
	}
	r.used = sum
	if loadErr != nil {
		r.log.Error("changed tokens or certificates cannot be used; the former stay in use", "error", loadErr)
		return nil
	}
	s.SetAccess(loaded.Access)
	if loaded.TLS != nil {
		r.tls.Store(loaded.TLS)
	}
	r.log.Info("tokens and certificates read again, because their files have changed", "files", r.cfg.Names())
	return nil
}

// warnIfReadable logs which files of secrets every user of the host may read.
func warnIfReadable(c *config.Config, log *slog.Logger) {
	const readableByAll = 0o004
	for _, s := range []struct{ setting, file string }{
		{"auth.tokens", c.TokensFile}, {"tls.key", c.KeyFile}, {"journal.credentials", c.Journal.Credentials}, {"journal.tls_key", c.Journal.Key},
	} {
		if s.file == "" {
			continue
		}
		if info, err := os.Stat(s.file); err == nil && info.Mode().IsRegular() && info.Mode().Perm()&readableByAll != 0 {
			log.Warn("every user of this host may read a file of secrets: take the permission away with chmod o-r", "setting", s.setting, "file", s.file)
		}
	}
}

// warnIfOpen logs who may reach the ports, if that is more than the operator may expect.
func warnIfOpen(c *config.Config, log *slog.Logger) {
	switch {
	case !isLoopback(c.Listen) && c.Server.Access.Tokens != nil && c.Server.TLS == nil:
		log.Warn("tokens without TLS can be read from the network: set --tls-cert and --tls-key, unless a proxy terminates TLS")
	case !isLoopback(c.Listen) && c.Server.Access.Tokens == nil && !c.Server.ClientCertificates:
		log.Warn("everyone who reaches the gRPC port may call it: set --auth-tokens with --tls-cert and --tls-key, or --tls-client-ca, or listen at 127.0.0.1", "listen", c.Listen)
	}
	if port := c.Egress.Dynamo.Listen; port != "" && !isLoopback(port) && c.Server.Access.Tokens == nil && !c.Server.ClientCertificates {
		log.Warn("everyone who reaches the port for Dynamo may query it: set --auth-tokens with --tls-cert and --tls-key, or --tls-client-ca, or listen at 127.0.0.1", "listen", port)
	}
	if leavesHost(&c.Egress.ZMQ) {
		log.Warn("prompts are published as token ids, without authentication and TLS: permit the ports of egress.zmq to routers alone")
	}
	if c.Admin == "" || isLoopback(c.Admin) {
		return
	}
	needsIdentity := c.Server.Access.Tokens != nil || c.Server.ClientCertificates
	switch {
	case c.Console && !needsIdentity:
		log.Warn("everyone who reaches the admin port may read metrics and profiles, and see the console: permit it to Prometheus alone, or listen at 127.0.0.1, or set --console=false", "admin", c.Admin)
	default:
		log.Warn("everyone who reaches the admin port may read metrics and profiles: permit it to Prometheus alone, or listen at 127.0.0.1", "admin", c.Admin)
	}
	if c.Console && c.Server.Access.Tokens != nil && !c.AdminTLS {
		log.Warn("tokens that browsers send to the console can be read from the network: set --admin-tls, unless a proxy terminates TLS", "admin", c.Admin)
	}
}

// leavesHost reports whether events in vLLM's format may leave this host.
func leavesHost(z *config.ZMQ) bool {
	all := append([]string{z.Bind}, z.Connect...)
	for _, p := range z.Publishers {
		all = append(all, p.Bind, p.Replay)
	}
	return slices.ContainsFunc(all, func(text string) bool {
		e, ok := ingestconfig.ParseEndpoint(text, true)
		if !ok || e.Transport != ingestconfig.TransportTCP {
			return false
		}
		_, address := e.Net()
		return !isLoopback(address)
	})
}

// isLoopback reports whether an address of a listener is that of this host alone.
func isLoopback(addr string) bool {
	host, _, err := net.SplitHostPort(addr)
	ip := net.ParseIP(host)
	return err == nil && (host == "localhost" || ip != nil && ip.IsLoopback())
}
