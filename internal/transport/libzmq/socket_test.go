//go:build cgo

package libzmq_test

import (
	"errors"
	"fmt"
	"testing"

	"github.com/pebbe/zmq4"

	"github.com/kvcast/kvcast/internal/transport"
	"github.com/kvcast/kvcast/internal/transport/libzmq"
)

func TestInterruptEndsWaitNowAndLater(t *testing.T) {
	t.Parallel()
	zctx := newContext(t)
	for i := range 200 {
		receiver, sender := pair(t, zctx, fmt.Sprintf("inproc://interrupt-%d", i)) // closing takes time
		s := mustOpen(t, receiver)
		ended := make(chan error)
		go func() { ended <- s.Wait() }()
		s.Interrupt()
		if err := <-ended; !errors.Is(err, transport.ErrInterrupted) {
			t.Fatalf("got %v, want %v", err, transport.ErrInterrupted)
		}
		sendTo(t, sender, nil)
		if err := s.Wait(); !errors.Is(err, transport.ErrInterrupted) {
			t.Fatalf("with a message there: got %v, want %v", err, transport.ErrInterrupted)
		}
		if n, err := receive(s, libzmq.NewBatch(1)); n != 1 || err != nil {
			t.Fatal(n, err)
		}
		closeNow(t, s)
		closeNow(t, sender)
		s.Interrupt()
	}
}

func TestOpenOfAClosedSocket(t *testing.T) {
	t.Parallel()
	zs := newSocket(t, newContext(t), zmq4.SUB)
	closeNow(t, zs)
	if _, err := libzmq.Open(zs); !errors.Is(err, zmq4.ErrorSocketClosed) {
		t.Errorf("got %v, want %v", err, zmq4.ErrorSocketClosed)
	}
}

func TestSendAndReceiveOfADealer(t *testing.T) {
	t.Parallel()
	zctx := newContext(t)
	router, dealer := newSocket(t, zctx, zmq4.ROUTER), newSocket(t, zctx, zmq4.DEALER)
	connectTo(t, dealer, bindOf(t, router, "tcp://127.0.0.1:*"))
	s := mustOpen(t, dealer)
	if err := s.Send([][]byte{{}, []byte("start"), []byte("end")}); err != nil {
		t.Fatal(err)
	}
	request, err := router.RecvMessageBytes(0)
	if err != nil {
		t.Fatal(err)
	}
	if len(request) != 4 || len(request[1]) != 0 || string(request[2]) != "start" || string(request[3]) != "end" {
		t.Fatalf("got request %q", request)
	}
	sendTo(t, router, request[0], nil, []byte("1"), []byte("2"))
	got, err := take(s, libzmq.NewBatch(8), 1)
	if err != nil {
		t.Fatal(err)
	}
	if want := []received{{[][]byte{nil, []byte("1"), []byte("2")}, 3}}; !equal(got, want) {
		t.Errorf("got reply %v, want %v", got, want)
	}
}

func TestSubscriberCannotSend(t *testing.T) {
	t.Parallel()
	s := mustOpen(t, newSocket(t, newContext(t), zmq4.SUB))
	if err := s.Send([][]byte{{}}); err == nil {
		t.Error("got no error")
	}
}

func TestSocketsLeakNoFiles(t *testing.T) {
	before := openFiles(t)
	zctx, err := zmq4.NewContext()
	if err == nil {
		err = zctx.SetMaxSockets(20_000)
	}
	if err != nil {
		t.Fatal(err)
	}
	b := libzmq.NewBatch(1)
	for i := range 1000 {
		zs, err := zctx.NewSocket(zmq4.SUB)
		if err != nil {
			t.Fatal(i, err)
		}
		m, err := libzmq.NewMonitor(zs, libzmq.ConnectEvents)
		if err != nil {
			t.Fatal(i, err)
		}
		s, err := libzmq.Open(zs)
		if err != nil {
			t.Fatal(i, err)
		}
		if n, err := receive(s, b); n != 0 || err != nil {
			t.Fatal(i, n, err)
		}
		if err := errors.Join(s.Close(), m.Close(), s.Close(), m.Close()); err != nil {
			t.Fatal(i, err)
		}
	}
	if err := zctx.Term(); err != nil {
		t.Fatal(err)
	}
	if after := openFiles(t); after > before {
		t.Errorf("got %d open files, want the %d of before", after, before)
	}
}
