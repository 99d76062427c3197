//go:build cgo

package libzmq

import (
	"errors"
	"fmt"
	"os"
	"syscall"
	"time"

	"github.com/pebbe/zmq4"
	"golang.org/x/sys/unix"

	"github.com/kvcast/kvcast/internal/transport"
)

// Socket is a ZeroMQ socket on Go's poller.
//
// As with all ZeroMQ sockets, one goroutine at a time may use it: Wait, Receive, Close,
// and the zmq4 socket itself. Interrupt is safe for concurrent use.
type Socket struct {
	zmq *zmq4.Socket
	// file is a duplicate of the file descriptor that libzmq signals, and conn waits for it on the poller.
	file *os.File
	conn syscall.RawConn
	// ready reports whether Wait is over. readyErr is why ready failed.
	ready    func(fd uintptr) bool
	readyErr error
}

// Open returns a Socket that owns s, which may be connected or bound before or after. If Open fails, the caller still owns s.
func Open(s *zmq4.Socket) (*Socket, error) {
	if err := checkHandle(); err != nil {
		return nil, err
	}
	fd, err := s.GetFd()
	if err != nil {
		return nil, fmt.Errorf("look up socket's file descriptor: %w", err)
	}
	// libzmq closes its own descriptor, and the poller needs one of its own.
	fd, err = unix.FcntlInt(uintptr(fd), unix.F_DUPFD_CLOEXEC, 0)
	if err != nil {
		return nil, fmt.Errorf("duplicate socket's file descriptor: %w", err)
	}
	// The descriptor is in non-blocking mode, which duplicates share, so that NewFile adds it
	// to the poller.
	socket := &Socket{zmq: s, file: os.NewFile(uintptr(fd), "zmq")}
	socket.ready = socket.receivable
	err = socket.file.SetReadDeadline(time.Time{}) // fails without a poller
	if err == nil {
		socket.conn, err = socket.file.SyscallConn()
	}
	if err != nil {
		return nil, errors.Join(fmt.Errorf("poll socket's file descriptor: %w", err), socket.file.Close())
	}
	return socket, nil
}

// Wait blocks until there is a message. After a call of Interrupt, it returns transport.ErrInterrupted, even if there is a message. It also
// executes the socket's pending commands: a SUB socket subscribes to a new peer only during Wait or Receive.
//
// A readable descriptor does not mean that there is a message. It is readable while commands of libzmq's I/O threads wait in the socket's
// mailbox, and the poller reports its edges only. No message is missed:
//
//  1. RawConn.Read discards the edges so far, and then calls ready.
//  2. ready reads ZMQ_EVENTS, which executes all commands until the mailbox is empty, and
//     then checks the socket's pipes. If there is no message, mailbox and pipes are marked
//     as asleep. Finding them empty and marking them is one atomic step.
//  3. A writer to a pipe that is asleep sends a command to the mailbox. The first command to
//     a mailbox that is asleep signals the descriptor, and each signal is an edge.
//  4. So a message that step 2 did not see causes an edge after step 2, hence after step 1,
//     and RawConn.Read repeats step 2. Receive may consume edges between two calls of Wait,
//     but step 2 always precedes the wait.
func (s *Socket) Wait() error {
	err := s.conn.Read(s.ready)
	switch {
	case errors.Is(err, os.ErrDeadlineExceeded):
		return transport.ErrInterrupted
	case err == nil:
		err = s.readyErr
	}
	if err != nil {
		return fmt.Errorf("wait for socket: %w", err)
	}
	return nil
}

// receivable reports whether there is a message or an error.
func (s *Socket) receivable(uintptr) bool {
	var events zmq4.State
	events, s.readyErr = s.events()
	return s.readyErr != nil || events&zmq4.POLLIN != 0
}

// Interrupt ends the call of Wait in progress, and all later ones.
func (s *Socket) Interrupt() {
	// The error means that the socket is closed: then no Wait is in progress.
	_ = s.file.SetReadDeadline(time.Unix(1, 0))
}

// endInterrupt lets later calls of Wait block again after Interrupt.
func (s *Socket) endInterrupt() {
	_ = s.file.SetReadDeadline(time.Time{})
}

// Receive adds whole messages to b until it is full or there are no more, without
// blocking. An error that follows messages is returned by the next call.
func (s *Socket) Receive(b *Batch) error {
	if err := s.receive(b); err != nil {
		return fmt.Errorf("receive from socket: %w", err)
	}
	return nil
}

// send sends a message without blocking. The message may be lost with its connection.
func (s *Socket) send(frames [][]byte) error {
	if _, err := s.zmq.SendMessageDontwait(frames); err != nil {
		return fmt.Errorf("send to socket: %w", err)
	}
	return nil
}

// unbind makes libzmq accept no more connections, which takes a moment: see Monitor.awaitUnbound.
func (s *Socket) unbind() error {
	endpoint, err := s.zmq.GetLastEndpoint()
	if err == nil {
		err = s.zmq.Unbind(endpoint)
	}
	if err != nil {
		return fmt.Errorf("unbind socket: %w", err)
	}
	return nil
}

// Close closes the ZeroMQ socket, and stops its Monitor, which must be closed as well. Batches stay valid. Close must not be called while
// Wait or Receive is in progress: call Interrupt first. Closing again does nothing.
func (s *Socket) Close() error {
	// The poller's descriptor is closed first, so that it polls no closed one.
	err := s.file.Close()
	if errors.Is(err, os.ErrClosed) {
		return nil
	}
	return errors.Join(err, stopMonitor(s.zmq), s.zmq.Close())
}
