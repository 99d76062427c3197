package vllm_test

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"log/slog"
	"net"
	"os"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/kvcast/kvcast/adapter/vllm"
	"github.com/kvcast/kvcast/index"
	"github.com/kvcast/kvcast/internal/zmtp"
	"github.com/kvcast/kvcast/journal"
	kvcastv1 "github.com/kvcast/kvcast/proto/kvcast/v1"
)

// pipe is a subscriber of all topics over net.Pipe, which has no buffers and the clock of synctest.
type pipe struct {
	t       *testing.T
	conn    net.Conn
	session *zmtp.Session
	in      []byte      // received and not processed
	out     chan []byte // written by a goroutine: both sides may write at once, and a pipe has no buffers
}

// connectPipe connects a subscriber to an egress with the blocks of a worker, which are published already.
func connectPipe(t *testing.T, events ...*kvcastv1.RouterEvent) *pipe {
	t.Helper()
	x, j := index.New(), journal.NewMemory(journal.Config{})
	x.RetainTokenIDs(1 << 30)
	x.ApplyEntry(&kvcastv1.Entry{Seq: 1, Worker: "a", Model: "m", Events: append([]*kvcastv1.RouterEvent{added()}, events...)})
	e, err := vllm.New(t.Context(), vllm.Config{
		Endpoints: []vllm.EndpointConfig{{Connect: "tcp://127.0.0.1:1"}}, Topic: "kv@{worker}", HistoryBatches: 10, StateBytes: 1 << 30,
		MaxConsumers: 4, Logger: slog.New(slog.DiscardHandler), Registerer: prometheus.NewRegistry(),
	}, j, x)
	if err != nil {
		t.Fatal(err)
	}
	e.Begin(t.Context())
	ctx, cancel := context.WithCancel(context.Background())
	client, server := net.Pipe()
	p := &pipe{t: t, conn: client, session: zmtp.New(zmtp.Config{Socket: zmtp.SUB}, time.Now()), out: make(chan []byte, 1)}
	var running sync.WaitGroup
	running.Go(func() { e.Serve(ctx, server) })
	running.Go(func() {
		for b := range p.out {
			_, _ = client.Write(b) // Read has the error
		}
	})
	t.Cleanup(func() {
		cancel()
		close(p.out)
		_ = client.Close()
		running.Wait()
		_ = j.Close(context.Background())
	})
	return p
}

// receive returns the seq of the next message, or an error of the connection.
func (p *pipe) receive() (seq uint64, err error) {
	var e zmtp.Event
	for {
		used, err := p.session.Next(time.Now(), p.in, &e)
		if err != nil {
			p.t.Fatal(err)
		}
		p.in = p.in[used:]
		if out := p.session.Out(); len(out) > 0 {
			p.out <- bytes.Clone(out)
		}
		switch e.Kind {
		case zmtp.Message:
			return binary.BigEndian.Uint64(e.Frames[1]), nil
		case zmtp.Incomplete:
			more := make([]byte, 64<<10)
			n, err := p.conn.Read(more)
			if err != nil {
				return 0, err
			}
			p.in = append(p.in, more[:n]...)
		default:
		}
	}
}

// TestConsumerThatPausesStaysConnected has a consumer that reads nothing for almost writeTimeout in the middle of a state, which
// is longer than two heartbeats, and then everything.
func TestConsumerThatPausesStaysConnected(t *testing.T) {
	vllm.SetHeartbeat(t, 10*time.Second)
	synctest.Test(t, func(t *testing.T) {
		p := connectPipe(t, chain(1, 50_000))
		if _, err := p.receive(); err != nil {
			t.Fatal(err)
		}
		time.Sleep(25 * time.Second)
		if err := p.conn.SetReadDeadline(time.Now().Add(time.Hour)); err != nil {
			t.Fatal(err)
		}
		batches := 1
		for ; ; batches++ {
			if _, err := p.receive(); errors.Is(err, os.ErrDeadlineExceeded) {
				break
			} else if err != nil {
				t.Fatalf("after %d batches: %v", batches, err)
			}
		}
		if batches < 3 {
			t.Errorf("got %d batches, want more than are written at once", batches)
		}
	})
}
