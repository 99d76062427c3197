package transport_test

import (
	"errors"
	"fmt"
	"os"
	"testing"
	"time"

	"github.com/pebbe/zmq4"

	"github.com/kvcast/kvcast/ingest/transport"
)

func TestWaitEndsAtItsDeadline(t *testing.T) {
	s := openers[0].mustOpen(t, newSocket(t, newContext(t), zmq4.SUB))
	for range 3 {
		began := time.Now()
		deadline := began.Add(5 * time.Millisecond)
		if err := s.SetDeadline(deadline); err != nil {
			t.Fatal(err)
		}
		if err := s.Wait(); !errors.Is(err, os.ErrDeadlineExceeded) {
			t.Errorf("got %v, want %v", err, os.ErrDeadlineExceeded)
		}
		if time.Now().Before(deadline) {
			t.Error("Wait ended before its deadline")
		}
	}
}

func TestDeadlineOfTheWaitUnderWay(t *testing.T) {
	s := openers[0].mustOpen(t, newSocket(t, newContext(t), zmq4.SUB))
	for range 500 {
		if err := s.SetDeadline(time.Time{}); err != nil {
			t.Fatal(err)
		}
		ended := make(chan error)
		go func() { ended <- s.Wait() }()
		if err := s.SetDeadline(time.Now()); err != nil {
			t.Fatal(err)
		}
		if err := <-ended; !errors.Is(err, os.ErrDeadlineExceeded) {
			t.Fatalf("got %v, want %v", err, os.ErrDeadlineExceeded)
		}
	}
}

func TestInterruptEndsWaitNowAndLater(t *testing.T) {
	zctx := newContext(t)
	for i := range 200 {
		receiver, sender := pair(t, zctx, fmt.Sprintf("inproc://interrupt-%d", i)) // closing takes time
		s := openers[0].mustOpen(t, receiver)
		ended := make(chan error)
		go func() { ended <- s.Wait() }()
		deadlines := make(chan error)
		go func() { deadlines <- s.SetDeadline(time.Time{}) }() // retracts nothing
		s.Interrupt()
		if err := <-ended; !errors.Is(err, transport.ErrInterrupted) {
			t.Fatalf("got %v, want %v", err, transport.ErrInterrupted)
		}
		if err := <-deadlines; err != nil {
			t.Fatal(err)
		}
		sendTo(t, sender, nil)
		if err := s.SetDeadline(time.Now().Add(patience)); err != nil {
			t.Fatal(err)
		}
		if err := s.Wait(); !errors.Is(err, transport.ErrInterrupted) {
			t.Fatalf("with a message there: got %v, want %v", err, transport.ErrInterrupted)
		}
		if n, err := s.Receive(transport.NewBatch(1)); n != 1 || err != nil {
			t.Fatal(n, err)
		}
		closeNow(t, s)
		closeNow(t, sender)
		s.Interrupt()
	}
}

func TestOpenOfAClosedSocket(t *testing.T) {
	zs := newSocket(t, newContext(t), zmq4.SUB)
	closeNow(t, zs)
	if _, err := transport.Open(zs); !errors.Is(err, zmq4.ErrorSocketClosed) {
		t.Errorf("got %v, want %v", err, zmq4.ErrorSocketClosed)
	}
}

func TestSendAndReceiveOfADealer(t *testing.T) {
	zctx := newContext(t)
	router, dealer := newSocket(t, zctx, zmq4.ROUTER), newSocket(t, zctx, zmq4.DEALER)
	connectTo(t, dealer, bindOf(t, router, "tcp://127.0.0.1:*"))
	s := openers[0].mustOpen(t, dealer)
	if err := s.Send(); err == nil {
		t.Error("Send of no frames: got no error")
	}
	if err := s.Send(nil, []byte("start"), []byte("end")); err != nil {
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
	got, err := take(s, transport.NewBatch(8), 1)
	if err != nil {
		t.Fatal(err)
	}
	if want := []received{{[][]byte{nil, []byte("1"), []byte("2")}, 3}}; !equal(got, want) {
		t.Errorf("got reply %v, want %v", got, want)
	}
}

func TestSendThatWouldBlock(t *testing.T) {
	zctx := newContext(t)
	alone := openers[0].mustOpen(t, newSocket(t, zctx, zmq4.DEALER))
	if err := alone.Send(nil, nil); !errors.Is(err, transport.ErrWouldBlock) {
		t.Errorf("to nobody: got %v, want %v", err, transport.ErrWouldBlock)
	}

	dealer, router := newSocket(t, zctx, zmq4.DEALER), newSocket(t, zctx, zmq4.ROUTER)
	if err := errors.Join(dealer.SetSndhwm(10), router.SetRcvhwm(10)); err != nil {
		t.Fatal(err)
	}
	connectTo(t, dealer, bindOf(t, router, "inproc://would-block"))
	full := openers[0].mustOpen(t, dealer)
	var sent int
	for {
		err := full.Send([]byte{byte(sent)}, nil, nil)
		if errors.Is(err, transport.ErrWouldBlock) {
			break
		}
		if err != nil {
			t.Fatal(err)
		}
		sent++
	}
	// Every message that was accepted arrives complete.
	for i := range sent {
		m, err := router.RecvMessageBytes(zmq4.DONTWAIT)
		if err != nil || len(m) != 4 || m[1][0] != byte(i) {
			t.Fatalf("message %d of %d: got %q, %v", i, sent, m, err)
		}
	}
	if m, err := router.RecvMessageBytes(zmq4.DONTWAIT); !errors.Is(err, wouldBlock) {
		t.Errorf("got %q, %v; want nothing that was refused", m, err)
	}
}

func TestSubscriberCannotSend(t *testing.T) {
	s := openers[0].mustOpen(t, newSocket(t, newContext(t), zmq4.SUB))
	if err := s.Send(nil); err == nil || errors.Is(err, transport.ErrWouldBlock) {
		t.Errorf("got %v, want that it is impossible", err)
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
	b := transport.NewBatch(1)
	for i := range 1000 {
		zs, err := zctx.NewSocket(zmq4.SUB)
		if err != nil {
			t.Fatal(i, err)
		}
		m, err := transport.NewMonitor(zs)
		if err != nil {
			t.Fatal(i, err)
		}
		s, err := transport.Open(zs)
		if err != nil {
			t.Fatal(i, err)
		}
		if n, err := s.Receive(b); n != 0 || err != nil {
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
