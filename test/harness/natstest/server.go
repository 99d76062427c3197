// Package natstest starts NATS servers: one in this process, or three that are processes (Cluster).
//
// It is not a part of package harness, so that tests which start no NATS server are not linked with one, which takes time.
package natstest

import (
	"fmt"
	"os"
	"testing"
	"time"

	"github.com/nats-io/nats-server/v2/server"
	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"

	"github.com/kvcast/kvcast/test/harness"
)

// Start starts a nats-server with JetStream in this process, and returns its URL. The test stops it.
func Start(t testing.TB) (url string) {
	t.Helper()
	dir, err := os.MkdirTemp("", "nats")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		// The server may create a file after WaitForShutdown. The test's context has ended.
		poll, deadline := time.NewTicker(time.Millisecond), time.After(harness.Timeout)
		defer poll.Stop()
		for {
			err := os.RemoveAll(dir)
			if err == nil {
				return
			}
			select {
			case <-poll.C:
			case <-deadline:
				t.Error(err)
				return
			}
		}
	})
	url, _ = StartIn(t, dir)
	return url
}

// StartIn is Start with the files in dir. stop may be called before the test ends: then dir is as after a planned stop.
func StartIn(t testing.TB, dir string) (url string, stop func()) {
	t.Helper()
	s, err := server.NewServer(&server.Options{
		Host: "127.0.0.1", Port: server.RANDOM_PORT, JetStream: true, StoreDir: dir, NoSigs: true,
	})
	if err != nil {
		t.Fatal(err)
	}
	log := make(errorLog, 100)
	s.SetLoggerV2(log, false, false, false)
	s.Start()
	stop = func() {
		s.Shutdown()
		s.WaitForShutdown()
	}
	t.Cleanup(stop)
	if !s.ReadyForConnections(harness.Timeout) {
		for len(log) > 0 {
			t.Log(<-log)
		}
		t.Fatalf("nats-server is not ready after %v", harness.Timeout)
	}
	return s.ClientURL(), stop
}

// errorLog has the first errors of a nats-server.
type errorLog chan string

func (e errorLog) add(format string, v ...any) {
	select {
	case e <- fmt.Sprintf(format, v...):
	default:
	}
}

func (e errorLog) Fatalf(format string, v ...any) { e.add(format, v...) }

func (e errorLog) Errorf(format string, v ...any) { e.add(format, v...) }

func (errorLog) Warnf(string, ...any) {}

func (errorLog) Noticef(string, ...any) {}

func (errorLog) Debugf(string, ...any) {}

func (errorLog) Tracef(string, ...any) {}

// JetStream returns a connection to NATS servers, whose URLs are separated by commas. It is restored until the test closes it.
func JetStream(t testing.TB, urls string) jetstream.JetStream {
	t.Helper()
	conn, err := nats.Connect(urls, nats.MaxReconnects(-1), nats.ReconnectWait(100*time.Millisecond), nats.RetryOnFailedConnect(true),
		nats.PingInterval(time.Second)) // so that it leaves a server that is paused
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(conn.Close)
	js, err := jetstream.New(conn)
	if err != nil {
		t.Fatal(err)
	}
	return js
}
