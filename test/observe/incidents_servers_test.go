package observe_test

import (
	"crypto/x509"
	"fmt"
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/kvcast/kvcast/internal/core/testclass"
	"github.com/kvcast/kvcast/internal/simulator"
	"github.com/kvcast/kvcast/internal/wire"
	kvcastv1 "github.com/kvcast/kvcast/proto/kvcast/v1"
	"github.com/kvcast/kvcast/test/fleet"
	"github.com/kvcast/kvcast/test/harness"
	"github.com/kvcast/kvcast/test/harness/enginetest"
)

// adminAt returns a free address, and the flag with which a server serves its metrics there in each of its runs.
func adminAt(t *testing.T) (address string, flag []string) {
	t.Helper()
	address = fmt.Sprintf("127.0.0.1:%d", harness.FreePort(t))
	return address, []string{"--admin", address}
}

// stored returns an event that stores a number of blocks, the first of which has a hash.
func stored(first uint64, blocks int) wire.Event {
	e := wire.Event{Kind: wire.KindStored, BlockSize: enginetest.BlockSize, Tokens: make([]uint32, blocks*enginetest.BlockSize)}
	for i := range blocks {
		e.BlockHashes = append(e.BlockHashes, first+uint64(i))
	}
	return e
}

// TestIncidentsOfServers has a server for each incident of a process and of the machine that it runs on.
func TestIncidentsOfServers(t *testing.T) {
	testclass.Process(t)
	t.Parallel()
	needs(t, "prometheus")
	killed := fleet.Start(t, "--bind", bindAny)

	crashing, crashes := adminAt(t)
	crashes = append(crashes, "--bind", bindAny)
	crashed := fleet.Start(t, crashes...)

	waiting, waits := adminAt(t)
	dir := t.TempDir()
	config := filepath.Join(dir, "kvcast.yaml")
	writeFile(t, config, fmt.Sprintf("discovery: [{file: %q}]\n", filepath.Join(dir, "missing.yaml")))
	fleet.Start(t, append(waits, "--config", config)...)

	tokens := filepath.Join(dir, "tokens")
	writeFile(t, tokens, "router a-token-that-no-client-of-this-test-has\n")
	guarded := fleet.Start(t, "--bind", bindAny, "--auth-tokens", tokens)

	authority := harness.NewAuthority(t)
	until := func(validity time.Duration) (cert, key string) {
		return authority.IssueWith("server", func(c *x509.Certificate) { c.NotAfter = time.Now().Add(validity) })
	}
	const day = 24 * time.Hour
	cert, key := until(90 * day)
	expiring := fleet.Start(t, "--bind", bindAny, "--tls-cert", cert, "--tls-key", key)
	expiredCert, expiredKey := until(90 * day)
	expired := fleet.Start(t, "--bind", bindAny, "--tls-cert", expiredCert, "--tls-key", expiredKey)

	fills := enginetest.NewSimulated(t, simulator.PublisherConfig{})
	limited := fleet.Start(t, "--ingest-max-blocks", "100", "--worker", engineFlag("fills", fills.Endpoint(), fills.ReplayEndpoint()))

	is := adminAddresses(t, killed, guarded, expiring, expired, limited)
	p := watch(t, append(is, crashing, waiting)...)
	alerts := []alert{
		of("KvcastDown", "instance", is[0]),
		of("KvcastRestarts", "instance", crashing),
		of("KvcastCallsUnauthenticated", "instance", is[1]),
		of("KvcastCertificateExpires", "instance", is[2]),
		of("KvcastCertificateExpires", "instance", is[3]),
		of("KvcastLimitNear", "instance", is[4], "resource", "blocks"),
		of("KvcastLimitReached", "instance", is[4], "resource", "blocks"),
	}
	p.quiet(alerts...)
	p.wantFiring(nil, of("KvcastNotReady", "instance", waiting))

	if err := killed.Kill(); err != nil {
		t.Fatal(err)
	}
	client := kvcastv1.NewRouterEventServiceClient(harness.Dial(t, fleet.Address(t, guarded)))
	for range 150 { // between two scrapes, perhaps
		if _, err := client.GetStatus(harness.Context(t), &kvcastv1.GetStatusRequest{}); err == nil {
			t.Fatal("a call without a token was answered")
		}
	}
	replaceCertificate(t, cert, key, func() (string, string) { return until(time.Hour) })
	replaceCertificate(t, expiredCert, expiredKey, func() (string, string) { return until(-time.Minute) })
	publish(t, fills, stored(1, 95))
	p.wantFiring(nil, of("KvcastLimitNear", "instance", is[4], "resource", "blocks"))
	publish(t, fills, stored(1001, 20))
	runs := 1
	p.wantFiring(func() {
		if !p.isEmpty(fmt.Sprintf(`changes(process_start_time_seconds{instance=%q}[10m]) >= %d and on (instance) up == 1`, crashing, runs-1)) {
			if err := crashed.Kill(); err != nil {
				t.Fatal(err)
			}
			crashed, runs = fleet.Start(t, crashes...), runs+1
		}
	}, alerts...)
}

// replaceCertificate replaces a certificate and its key.
func replaceCertificate(t *testing.T, cert, key string, issue func() (cert, key string)) {
	t.Helper()
	newCert, newKey := issue()
	for to, from := range map[string]string{cert: newCert, key: newKey} {
		if err := os.Rename(from, to); err != nil {
			t.Fatal(err)
		}
	}
}
