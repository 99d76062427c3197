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

// ErrInterrupted is what Wait returns once Interrupt was called.
var ErrInterrupted = errors.New("wait was interrupted")

// ErrWouldBlock is what Send returns where there is nobody to send to, or the
// queues to them are full.
var ErrWouldBlock = errors.New("no peer can take the message now")

// Socket is a ZeroMQ socket that is waited for on Go's poller.
//
// As with all ZeroMQ sockets, one goroutine at a time may use it: Wait, Receive,
// Send and Close, and the zmq4 socket itself. SetDeadline and Interrupt are for
// any goroutine at any time.
type Socket struct {
	zmq *zmq4.Socket
	// views tells that Receive can reach libzmq's handle.
	views bool

	// file is a duplicate of the descriptor by which libzmq signals, and conn how
	// it is waited for.
	file *os.File
	conn syscall.RawConn
	// ready is what conn calls to look whether the wait is over, failed how that
	// went wrong.
	ready  func(fd uintptr) bool
	failed error

	mu          sync.Mutex
	interrupted bool // guarded by mu; once set the deadline stays in the past
}

// Open takes over a socket, which may be connected and bound before or after.
// On an error it stays the caller's.
func Open(s *zmq4.Socket) (*Socket, error) { return open(s, handleKnown) }

func open(zs *zmq4.Socket, views bool) (*Socket, error) {
	fd, err := zs.GetFd()
	if err != nil {
		return nil, fmt.Errorf("look up socket's file descriptor: %w", err)
	}
	// libzmq closes its own, and the poller wants one that is its alone.
	if fd, err = duplicate(fd); err != nil {
		return nil, fmt.Errorf("duplicate socket's file descriptor: %w", err)
	}
	s := &Socket{zmq: zs, views: views}
	// The descriptor is in non-blocking mode already, which duplicates share, so
	// that NewFile gives it to the poller.
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

// Wait blocks until the socket has something to receive. It returns
// os.ErrDeadlineExceeded once the deadline has passed and ErrInterrupted once
// Interrupt was called, even where there is something. Who waits also does the
// socket's own work meanwhile: a SUB socket subscribes to a peer that connects to
// it only when somebody waits or receives.
//
// The descriptor is no sign that there is a message: it is readable while
// commands from libzmq's I/O threads wait in the socket's mailbox, and the poller
// tells about its edges only. That none is lost:
//
//  1. RawConn.Read forgets the edges so far, and then calls ready.
//  2. ready asks for ZMQ_EVENTS, which executes all waiting commands until the
//     mailbox is empty, and looks through the socket's pipes. Where it finds no
//     message, mailbox and pipes are all marked as asleep, atomically with being
//     found empty.
//  3. Who writes to a pipe that is asleep sends a command to its reader; who
//     sends the first command to a mailbox that is asleep signals the descriptor,
//     and each signal is an edge, whether or not it was readable before.
//  4. So a message that 2 did not see makes an edge after 2, thus after 1, and
//     RawConn.Read goes back to 2: at once where the edge came before it began to
//     wait. What Receive or Send do between two Waits can take edges away, but 2
//     comes again before anything is waited for.
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

// receivable tells whether waiting is over.
func (s *Socket) receivable(uintptr) bool {
	events, err := s.events()
	s.failed = nil
	if err != nil {
		s.failed = fmt.Errorf("wait for socket: %w", err)
	}
	return err != nil || events&zmq4.POLLIN != 0
}

// SetDeadline sets when Wait ends, the one under way included. The zero time is
// none.
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

// Interrupt ends Wait, the one under way and all that follow.
func (s *Socket) Interrupt() {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.interrupted = true
	// It fails once the socket is closed, when nothing is left to interrupt.
	_ = s.file.SetReadDeadline(time.Unix(1, 0))
}

// Receive takes up to as many whole messages as b has room for, without blocking.
// Those of b's last Receive are given back first, on an error as well. It returns
// how many there were; 0 means that there is nothing now. An error that comes
// after messages is returned by the next call.
func (s *Socket) Receive(b *Batch) (int, error) {
	b.Release()
	return s.ReceiveMore(b)
}

// ReceiveMore is Receive into a batch that keeps the messages it has. It returns how
// many there are then.
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

// Send sends one message of one or more frames, which are copied, without
// blocking: it is ErrWouldBlock where it would. A message is sent whole or not at
// all; and it can be lost, as any, with the connection that it was given to.
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
		// The connection broke within the message: libzmq drops what it has of it,
		// and the frames that follow, up to the last.
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

// Close closes the ZeroMQ socket. A Monitor of it is told, and is still to be
// closed. Batches stay good. Close must not be called while Wait or Receive is
// under way: Interrupt first. Closing again does nothing.
func (s *Socket) Close() error {
	// First what the poller has, so that it polls nothing that is gone.
	err := s.file.Close()
	if errors.Is(err, os.ErrClosed) {
		return nil
	}
	return errors.Join(err, unhook(s.zmq), s.zmq.Close())
}
