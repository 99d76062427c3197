package client

import (
	"context"
	"errors"
	"testing"
	"time"

	"github.com/nats-io/nats-server/v2/server"
	"github.com/nats-io/nats.go"
)

// TestOpenStreamEnds asks for a stream without a leader, of which no server says anything: the caller must be able to ask again.
func TestOpenStreamEnds(t *testing.T) {
	t.Parallel()
	s, err := server.NewServer(&server.Options{Host: "127.0.0.1", Port: server.RANDOM_PORT, NoSigs: true, NoLog: true})
	if err != nil {
		t.Fatal(err)
	}
	s.Start()
	t.Cleanup(s.WaitForShutdown)
	t.Cleanup(s.Shutdown)
	if !s.ReadyForConnections(time.Minute) {
		t.Fatal("nats-server is not ready")
	}
	c := &Client{Stream: "s"}
	if err := c.Connect(func(o *nats.Options) error { o.Url = s.ClientURL(); return nil }); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(c.Conn.Close)
	asked, err := c.Conn.SubscribeSync("$JS.API.STREAM.INFO.*") // by which the request has a receiver
	if err != nil {
		t.Fatal(err)
	}
	if _, err := c.OpenStream(t.Context(), "other"); !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("OpenStream: got %v, want %v", err, context.DeadlineExceeded)
	}
	if n, _, err := asked.Pending(); n != 1 || err != nil {
		t.Errorf("%d requests, %v; want 1", n, err)
	}
}
