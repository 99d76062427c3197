package vllm_test

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"log/slog"
	"net"
	"os"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/kvcast/kvcast/internal/adapter/vllm"
	"github.com/kvcast/kvcast/internal/core/index"
	"github.com/kvcast/kvcast/internal/journal"
	"github.com/kvcast/kvcast/internal/zmtp"
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

// piped is an egress whose connections are pipes. It has published the blocks of a worker.
type piped struct {
	*service
	log bytes.Buffer
}

func startPiped(t *testing.T, stateBytes int64, events ...*kvcastv1.RouterEvent) *piped {
	t.Helper()
	p := &piped{service: &service{t: t, journal: journal.NewMemory(journal.Config{}), index: index.New(), metrics: prometheus.NewRegistry()}}
	p.index.RetainTokenIDs(1 << 30)
	p.index.ApplyEntry(&kvcastv1.Entry{Seq: 1, Worker: "a", Model: "m", Events: append([]*kvcastv1.RouterEvent{added()}, events...)})
	var err error
	p.egress, err = vllm.New(t.Context(), vllm.Config{
		Endpoints: []vllm.EndpointConfig{{Connect: "tcp://127.0.0.1:1"}}, Topic: "kv@{worker}", HistoryBatches: 10, StateBytes: stateBytes,
		MaxConsumers: 200, Logger: slog.New(slog.NewTextHandler(&p.log, nil)), Registerer: p.metrics,
	}, p.journal, p.index)
	if err != nil {
		t.Fatal(err)
	}
	p.egress.Begin(t.Context())
	t.Cleanup(func() { _ = p.journal.Close(context.Background()) })
	return p
}

// addressed is a connection of an IP address.
type addressed struct {
	net.Conn
	ip net.IP
}

func (a addressed) RemoteAddr() net.Addr { return &net.TCPAddr{IP: a.ip} }

// connect connects a subscriber.
func (s *piped) connect(ip net.IP) *pipe {
	ctx, cancel := context.WithCancel(context.Background())
	client, server := net.Pipe()
	p := &pipe{t: s.t, conn: client, session: zmtp.New(zmtp.Config{Socket: zmtp.SUB}, time.Now()), out: make(chan []byte, 1)}
	var running sync.WaitGroup
	running.Go(func() { s.egress.Serve(ctx, addressed{server, ip}) })
	running.Go(func() {
		for b := range p.out {
			_, _ = client.Write(b) // Read has the error
		}
	})
	s.t.Cleanup(func() {
		cancel()
		close(p.out)
		_ = client.Close()
		running.Wait()
	})
	return p
}

// receive returns the seq of the next message, or an error of the connection.
func (p *pipe) receive() (seq uint64, err error) {
	e, err := p.await(zmtp.Message)
	if err != nil {
		return 0, err
	}
	return binary.BigEndian.Uint64(e.Frames[1]), nil
}

// await returns the next event of a kind.
func (p *pipe) await(kind zmtp.EventKind) (e zmtp.Event, err error) {
	for {
		used, err := p.session.Next(time.Now(), p.in, &e)
		if err != nil {
			return e, err
		}
		p.in = p.in[used:]
		if out := p.session.Out(); len(out) > 0 {
			p.out <- bytes.Clone(out)
		}
		switch e.Kind {
		case kind:
			return e, nil
		case zmtp.Incomplete:
			more := make([]byte, 64<<10)
			n, err := p.conn.Read(more)
			if err != nil {
				return e, err
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
		p := startPiped(t, 1<<30, chain(1, 50_000)).connect(net.IPv4(127, 0, 0, 1))
		if _, err := p.receive(); err != nil {
			t.Fatal(err)
		}
		<-time.After(25 * time.Second)
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

// TestAddressUsesHalfOfTheStateMemory connects subscribers of one address that read nothing, until one gets no state any more. The
// log says why. A subscriber of another address gets its state.
func TestAddressUsesHalfOfTheStateMemory(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := startPiped(t, 1<<20, chain(1, 5000))
		joins := func(ip net.IP) bool {
			before := s.metric("kvcast_egress_states_total")
			if _, err := s.connect(ip).await(zmtp.Established); err != nil {
				t.Fatal(err)
			}
			synctest.Wait()
			return s.metric("kvcast_egress_states_total") > before
		}
		joined := 0
		for ; joins(net.IPv4(127, 0, 0, 1)); joined++ {
			if joined > 20 {
				t.Fatal("an address uses all memory")
			}
		}
		if joined == 0 || !strings.Contains(s.log.String(), "state_bytes=1048576") {
			t.Errorf("%d subscribers got a state, and the log has %q", joined, s.log.String())
		}
		if !joins(net.IPv4(127, 0, 0, 2)) {
			t.Error("another address gets no state")
		}
	})
}

// TestStateThatDoesNotFitIsLogged has less memory for states than one state takes.
func TestStateThatDoesNotFitIsLogged(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := startPiped(t, 10<<10, chain(1, 5000))
		p := s.connect(net.IPv4(127, 0, 0, 1))
		if _, err := p.receive(); err == nil {
			t.Error("got a state")
		}
		synctest.Wait()
		if !strings.Contains(s.log.String(), "do not fit") {
			t.Errorf("the log has %q", s.log.String())
		}
		if got := s.egress.StateMemory(); got != 0 {
			t.Errorf("%d bytes stay reserved", got)
		}
	})
}
