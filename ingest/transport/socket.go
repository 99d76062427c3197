package transport

import (
	"errors"
	"fmt"
	"os"
	"sync"
	"syscall"
	"time"

	"github.com/pebbe/zmq4"
)

// ErrInterrupted is returned by Wait once Interrupt was called.
var ErrInterrupted = errors.New("wait was interrupted")

// ErrWouldBlock is returned by Send where there is no peer, or the queues to all peers are
// full.
var ErrWouldBlock = errors.New("no peer can take the message now")

// Socket is a ZeroMQ socket on Go's poller.
//
// As with all ZeroMQ sockets, one goroutine at a time may use it: Wait, Receive, Send,
// Close, and the zmq4 socket itself. SetDeadline and Interrupt are safe for concurrent use.
type Socket struct {
	zmq *zmq4.Socket
	// views reports whether Receive can use libzmq's handle.
	views bool

	// file is a duplicate of the descriptor that libzmq signals, and conn its connection to
	// the poller.
	file *os.File
	conn syscall.RawConn
	// ready is called by conn to check whether the wait is over; failed is its error.
	ready  func(fd uintptr) bool
	failed error

	mu          sync.Mutex
	interrupted bool // guarded by mu; once set, the deadline stays in the past
}

// Open returns a Socket that owns s, which may be connected or bound before or after. On an
// error s stays the caller's.
func Open(s *zmq4.Socket) (*Socket, error) { return open(s, handleKnown) }

func open(zs *zmq4.Socket, views bool) (*Socket, error) {
	fd, err := zs.GetFd()
	if err != nil {
		return nil, fmt.Errorf("look up socket's file descriptor: %w", err)
	}
	// libzmq closes its own descriptor, and the poller needs one of its own.
	if fd, err = duplicate(fd); err != nil {
		return nil, fmt.Errorf("duplicate socket's file descriptor: %w", err)
	}
	s := &Socket{zmq: zs, views: views}
	// The descriptor is in non-blocking mode, which duplicates share, so that NewFile adds it
	// to the poller.
	s.file = os.NewFile(uintptr(fd), "zmq")
	s.ready = s.receivable
	err = s.file.SetReadDeadline(time.Time{}) // works with a poller only
	if err == nil {
		s.conn, err = s.file.SyscallConn()
	}
	if err != nil {
		return nil, errors.Join(fmt.Errorf("poll socket's file descriptor: %w", err), s.file.Close())
	}
	return s, nil
}

func duplicate(fd int) (int, error) {
	// A process started between the two calls would inherit it.
	syscall.ForkLock.RLock()
	defer syscall.ForkLock.RUnlock()
	fd, err := syscall.Dup(fd)
	if err == nil {
		syscall.CloseOnExec(fd)
	}
	return fd, err
}

// Wait blocks until there is a message. It returns os.ErrDeadlineExceeded once the deadline
// has passed, and ErrInterrupted once Interrupt was called, even if there is a message. It
// also executes the socket's pending commands: a SUB socket subscribes to a new peer only
// during Wait or Receive.
//
// A readable descriptor does not mean that there is a message. It is readable while commands
// of libzmq's I/O threads wait in the socket's mailbox, and the poller reports its edges
// only. No message is missed:
//
//  1. RawConn.Read discards the edges so far, and then calls ready.
//  2. ready reads ZMQ_EVENTS, which executes all commands until the mailbox is empty, and
//     then checks the socket's pipes. If there is no message, mailbox and pipes are marked
//     as asleep, atomically with being found empty.
//  3. A writer to a pipe that is asleep sends a command to the mailbox. The first command to
//     a mailbox that is asleep signals the descriptor, and each signal is an edge.
//  4. So a message that step 2 did not see causes an edge after step 2, hence after step 1,
//     and RawConn.Read repeats step 2. Receive and Send may consume edges between two calls
//     of Wait, but step 2 always precedes the wait.
func (s *Socket) Wait() error {
	err := s.conn.Read(s.ready)
	if err == nil {
		return s.failed
	}
	if errors.Is(err, os.ErrDeadlineExceeded) {
		s.mu.Lock()
		defer s.mu.Unlock()
		if s.interrupted {
			return ErrInterrupted
		}
		return err
	}
	return fmt.Errorf("wait for socket: %w", err)
}

// receivable reports whether waiting is over.
func (s *Socket) receivable(uintptr) bool {
	events, err := s.events()
	s.failed = nil
	if err != nil {
		s.failed = fmt.Errorf("wait for socket: %w", err)
	}
	return err != nil || events&zmq4.POLLIN != 0
}

// SetDeadline sets the deadline of Wait, also of a call in progress. The zero time is none.
func (s *Socket) SetDeadline(t time.Time) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.interrupted {
		return nil
	}
	if err := s.file.SetReadDeadline(t); err != nil {
		return fmt.Errorf("set deadline of socket: %w", err)
	}
	return nil
}

// Interrupt ends the call of Wait in progress, and all that follow.
func (s *Socket) Interrupt() {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.interrupted = true
	// It fails once the socket is closed, when there is nothing to interrupt.
	_ = s.file.SetReadDeadline(time.Unix(1, 0))
}

// Receive releases b, and receives as many whole messages as it has room for, without
// blocking. It returns their number; 0 means that there is none now. An error that follows
// messages is returned by the next call.
func (s *Socket) Receive(b *Batch) (int, error) {
	b.Release()
	return s.ReceiveMore(b)
}

// ReceiveMore is Receive into a batch that keeps its messages. It returns the number of all.
func (s *Socket) ReceiveMore(b *Batch) (int, error) {
	var err error
	if s.views {
		err = s.receiveViews(b)
	} else {
		err = s.receiveCopies(b)
	}
	if err != nil {
		return 0, fmt.Errorf("receive from socket: %w", err)
	}
	return b.n, nil
}

// Send sends a message of one or more frames, which are copied, without blocking: it returns
// ErrWouldBlock instead. A message is sent whole or not at all, and may be lost with its
// connection.
func (s *Socket) Send(frames ...[]byte) error {
	if len(frames) == 0 {
		return errors.New("send to socket: want one frame or more")
	}
	var failed error
	last := len(frames) - 1
	for i, f := range frames {
		flags := zmq4.DONTWAIT
		if i < last {
			flags |= zmq4.SNDMORE
		}
		err := s.sendFrame(f, flags)
		if err == nil || failed != nil {
			continue
		}
		failed = fmt.Errorf("send to socket: %w", err)
		if errors.Is(err, zmq4.Errno(syscall.EAGAIN)) {
			failed = fmt.Errorf("send to socket: %w", ErrWouldBlock)
		}
		if i == 0 {
			break
		}
		// The connection broke within the message: libzmq drops its frames up to the last.
	}
	return failed
}

func (s *Socket) sendFrame(f []byte, flags zmq4.Flag) error {
	for {
		if _, err := s.zmq.SendBytes(f, flags); !errors.Is(err, zmq4.Errno(syscall.EINTR)) {
			return err
		}
	}
}

// Close closes the ZeroMQ socket, and stops its Monitor, which must be closed as well.
// Batches stay valid. Close must not be called while Wait or Receive is in progress: call
// Interrupt first. Closing again does nothing.
func (s *Socket) Close() error {
	// The poller's descriptor is closed first, so that it polls no closed one.
	err := s.file.Close()
	if errors.Is(err, os.ErrClosed) {
		return nil
	}
	return errors.Join(err, unhook(s.zmq), s.zmq.Close())
}
