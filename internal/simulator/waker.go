package simulator

import (
	"sync"

	zmq "github.com/pebbe/zmq4"
)

// waker ends another goroutine's poll. It may be used by any goroutine, also when
// it is closed.
type waker struct {
	mu     sync.Mutex
	socket *zmq.Socket // guarded by mu; nil when closed
}

// openWaker connects the waker with the poller.
func (s *sockets) openWaker() (err error) {
	const endpoint = "inproc://wake" // of this context alone
	if s.inside, err = zmq.NewContext(); err != nil {
		return err
	}
	// Nothing goes beyond the process, which takes no thread.
	if err = s.inside.SetIoThreads(0); err != nil {
		return err
	}
	if s.woken, err = s.inside.NewSocket(zmq.PAIR); err != nil {
		return err
	}
	if err = s.woken.Bind(endpoint); err != nil {
		return err
	}
	if s.waker.socket, err = s.inside.NewSocket(zmq.PAIR); err != nil {
		return err
	}
	return s.waker.socket.Connect(endpoint)
}

func (w *waker) wake() {
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.socket != nil {
		// Where there is no room, enough calls wait to be heard already.
		_, _ = w.socket.SendBytes(nil, zmq.DONTWAIT)
	}
}

func (w *waker) close() error {
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.socket == nil {
		return nil
	}
	soc := w.socket
	w.socket = nil
	if err := soc.SetLinger(0); err != nil {
		return err
	}
	return soc.Close()
}
