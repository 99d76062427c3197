package serve

import (
	"crypto/tls"
	"errors"
	"io"
	"log/slog"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/nats-io/jwt/v2"
	"github.com/nats-io/nats-server/v2/server"
	"github.com/nats-io/nkeys"
	"github.com/prometheus/client_golang/prometheus"

	"github.com/kvcast/kvcast/cmd/kvcast/internal/config"
	"github.com/kvcast/kvcast/test/harness"
)

// startNATS starts a nats-server on loopback, and returns its URL.
func startNATS(t *testing.T, o *server.Options) string {
	t.Helper()
	o.Host, o.Port, o.JetStream, o.StoreDir, o.NoSigs, o.NoLog = "127.0.0.1", harness.FreePort(t), true, t.TempDir(), true, true
	s, err := server.NewServer(o)
	if err != nil {
		t.Fatal(err)
	}
	s.Start()
	t.Cleanup(func() { s.Shutdown(); s.WaitForShutdown() })
	if !s.ReadyForConnections(time.Minute) {
		t.Fatal("nats-server is not ready after a minute")
	}
	return s.ClientURL()
}

// wantOpened opens a journal, and checks the error if want is not empty: one line that contains all of want.
func wantOpened(t *testing.T, j config.Journal, want ...string) {
	t.Helper()
	j.Stream = "kvcast"
	d, err := openMode(t.Context(), &Service{
		cfg: &config.Config{Journal: j, Cluster: config.Cluster{Ingest: true}}, log: slog.New(slog.NewTextHandler(io.Discard, nil)), registry: prometheus.NewRegistry(),
	})
	if err == nil {
		if err := d.Close(t.Context()); err != nil {
			t.Error(err)
		}
	}
	if len(want) == 0 {
		if err != nil {
			t.Errorf("open: %v", err)
		}
		return
	}
	if err == nil {
		t.Fatalf("opened, want an error with %q", want)
	}
	for _, text := range want {
		if !strings.Contains(err.Error(), text) || strings.Contains(err.Error(), "\n") {
			t.Errorf("open: got %q, want one line with %q", err, text)
		}
	}
}

func TestJournalOverTLS(t *testing.T) {
	t.Parallel()
	ca, other := harness.NewAuthority(t), harness.NewAuthority(t)
	cert, key := ca.Issue("127.0.0.1")
	for _, mutual := range []bool{false, true} {
		c, err := server.GenTLSConfig(&server.TLSConfigOpts{CertFile: cert, KeyFile: key, CaFile: ca.File, Verify: mutual})
		if err != nil {
			t.Fatal(err)
		}
		c.MinVersion = tls.VersionTLS12
		url := startNATS(t, &server.Options{TLSConfig: c, TLS: true, TLSVerify: mutual})
		mine, mineKey := ca.Issue("127.0.0.1")
		wantOpened(t, config.Journal{Store: url, CA: ca.File, Cert: mine, Key: mineKey})
		wantOpened(t, config.Journal{Store: url, CA: other.File, Cert: mine, Key: mineKey}, "certificate signed by unknown authority", "--journal-tls-ca")
		wantOpened(t, config.Journal{Store: url, Cert: mine, Key: mineKey}, "certificate signed by unknown authority", "--journal-tls-ca")
		if !mutual {
			wantOpened(t, config.Journal{Store: url, CA: ca.File})
			continue
		}
		wantOpened(t, config.Journal{Store: url, CA: ca.File}, "tls", "--journal-tls-cert")
		foreign, foreignKey := other.Issue("127.0.0.1")
		wantOpened(t, config.Journal{Store: url, CA: ca.File, Cert: foreign, Key: foreignKey}, "tls", "--journal-tls-cert")
	}
}

// identity is a key pair.
func identity(t *testing.T, create func() (nkeys.KeyPair, error)) (pair nkeys.KeyPair, public string) {
	t.Helper()
	pair, err := create()
	if err != nil {
		t.Fatal(err)
	}
	if public, err = pair.PublicKey(); err != nil {
		t.Fatal(err)
	}
	return pair, public
}

// startWithAccount starts a nats-server that demands natsCredentials of users of an account.
func startWithAccount(t *testing.T) (url string, account nkeys.KeyPair) {
	t.Helper()
	operator, operatorKey := identity(t, nkeys.CreateOperator)
	account, accountKey := identity(t, nkeys.CreateAccount)
	claims := jwt.NewAccountClaims(accountKey)
	claims.Limits.JetStreamLimits = jwt.JetStreamLimits{MemoryStorage: jwt.NoLimit, DiskStorage: jwt.NoLimit, Streams: jwt.NoLimit, Consumer: jwt.NoLimit}
	accountJWT, err := claims.Encode(operator)
	if err != nil {
		t.Fatal(err)
	}
	_, systemKey := identity(t, nkeys.CreateAccount)
	systemJWT, err := jwt.NewAccountClaims(systemKey).Encode(operator)
	if err != nil {
		t.Fatal(err)
	}
	resolver := &server.MemAccResolver{}
	if err := errors.Join(resolver.Store(accountKey, accountJWT), resolver.Store(systemKey, systemJWT)); err != nil {
		t.Fatal(err)
	}
	return startNATS(t, &server.Options{TrustedKeys: []string{operatorKey}, AccountResolver: resolver, SystemAccount: systemKey}), account
}

// natsCredentials returns the file of a user's natsCredentials.
func natsCredentials(t *testing.T, account nkeys.KeyPair, change func(c *jwt.UserClaims)) string {
	t.Helper()
	user, userKey := identity(t, nkeys.CreateUser)
	c := jwt.NewUserClaims(userKey)
	change(c)
	token, err := c.Encode(account)
	if err != nil {
		t.Fatal(err)
	}
	seed, err := user.Seed()
	if err != nil {
		t.Fatal(err)
	}
	text, err := jwt.FormatUserConfig(token, seed)
	if err != nil {
		t.Fatal(err)
	}
	file := filepath.Join(t.TempDir(), "user.creds")
	if err := os.WriteFile(file, text, 0o600); err != nil {
		t.Fatal(err)
	}
	return file
}

// unlimited are the permissions of a user without any limit, and the others those of docs/nats.md, for the stream kvcast.
func unlimited(*jwt.UserClaims) {}

func ingestingUser(c *jwt.UserClaims) {
	c.Pub.Allow.Add("kvcast.kvcast.>", "$O.kvcast-checkpoints.>", "$KV.kvcast-workers.>", "$KV.kvcast-instances.>", "$JS.API.>", "$JS.FC.>", "_INBOX.>")
	c.Sub.Allow.Add("kvcast.kvcast.>", "_INBOX.>")
}

func servingUser(c *jwt.UserClaims) {
	c.Pub.Allow.Add("$JS.API.STREAM.INFO.>", "$JS.API.STREAM.MSG.GET.>", "$JS.API.DIRECT.GET.>", "$JS.API.CONSUMER.>", "$JS.FC.>")
	c.Sub.Allow.Add("_INBOX.>")
}

func TestJournalWithCredentials(t *testing.T) {
	t.Parallel()
	url, account := startWithAccount(t)
	stranger, _ := identity(t, nkeys.CreateAccount)
	wantOpened(t, config.Journal{Store: url, Credentials: natsCredentials(t, account, unlimited)})
	wantOpened(t, config.Journal{Store: url}, "Authorization Violation", "--journal-credentials")
	wantOpened(t, config.Journal{Store: url, Credentials: natsCredentials(t, stranger, unlimited)}, "Authorization Violation", "--journal-credentials")
	expired := natsCredentials(t, account, func(c *jwt.UserClaims) { c.Expires = time.Now().Add(-time.Hour).Unix() })
	wantOpened(t, config.Journal{Store: url, Credentials: expired}, "--journal-credentials")
	denied := natsCredentials(t, account, func(c *jwt.UserClaims) { c.Pub.Deny.Add("$JS.API.STREAM.>") })
	wantOpened(t, config.Journal{Store: url, Credentials: denied}, `"$JS.API.STREAM.INFO.kvcast"`, "permit it to the NATS user")
	wantOpened(t, config.Journal{Store: url, Credentials: natsCredentials(t, account, ingestingUser)})
	missing := filepath.Join(t.TempDir(), "none.creds")
	wantOpened(t, config.Journal{Store: url, Credentials: missing}, missing)
}
