package harness

import (
	"testing"

	"github.com/nats-io/nats-server/v2/server"
)

// StartNATS starts a nats-server with JetStream in this process, and returns its URL. The test stops it.
func StartNATS(t testing.TB) (url string) {
	t.Helper()
	s, err := server.NewServer(&server.Options{
		Host: "127.0.0.1", Port: server.RANDOM_PORT, JetStream: true, StoreDir: t.TempDir(), NoSigs: true, NoLog: true,
	})
	if err != nil {
		t.Fatal(err)
	}
	s.Start()
	t.Cleanup(func() {
		s.Shutdown()
		s.WaitForShutdown()
	})
	if !s.ReadyForConnections(Timeout) {
		t.Fatalf("nats-server is not ready after %v", Timeout)
	}
	return s.ClientURL()
}
