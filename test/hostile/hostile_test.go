package hostile_test

import (
	"crypto/tls"
	"crypto/x509"
	"os"
	"path/filepath"
	"testing"

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials"

	"github.com/kvcast/kvcast/internal/core/testclass"
	"github.com/kvcast/kvcast/internal/wire"
	"github.com/kvcast/kvcast/test/harness"
)

func TestMain(m *testing.M) { os.Exit(harness.RunTests(m)) }

const routersToken = "a-router's-token-0"

// serve starts kvcast serve. It is built with the race detector if this test is.
func serve(t *testing.T, args ...string) *harness.Server {
	t.Helper()
	return harness.Serve(t, harness.ProcessConfig{Race: testclass.RaceEnabled, Args: args})
}

// dial returns a connection by TLS, without a client certificate.
func dial(t *testing.T, s *harness.Server, ca *harness.Authority, options ...grpc.DialOption) *grpc.ClientConn {
	t.Helper()
	pem, err := os.ReadFile(ca.File)
	if err != nil {
		t.Fatal(err)
	}
	pool := x509.NewCertPool()
	pool.AppendCertsFromPEM(pem)
	conn, err := grpc.NewClient(s.Address(), append(options, grpc.WithTransportCredentials(credentials.NewTLS(&tls.Config{RootCAs: pool})))...)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = conn.Close() })
	return conn
}

func fileOf(t *testing.T, text string) string {
	t.Helper()
	file := filepath.Join(t.TempDir(), "file")
	if err := os.WriteFile(file, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
	return file
}

// storedOf returns a store of a block.
func storedOf(hash uint64) wire.Event {
	return wire.Event{Kind: wire.KindStored, BlockHashes: []uint64{hash}, Tokens: []uint32{1, 2}, BlockSize: 2}
}
