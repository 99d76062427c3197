// Package rawzmtp implements connections of ZMTP 3.1 (RFC 37) over plain TCP, for tests that send
// what no well-behaved peer sends: commands between messages, unterminated messages, and connection
// resets; and for tests that receive message by message.
package rawzmtp

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"time"

	"github.com/kvcast/kvcast/internal/zmtp"
)

// Conn is a connection that has completed the handshake. The methods that send append to a buffer,
// which Flush writes.
type Conn struct {
	tcp     *net.TCPConn
	buf     []byte
	session *zmtp.Session
	in      []byte // received and not processed
}

// Dial connects a socket. Connecting and the handshake may each take timeout.
func Dial(ctx context.Context, socket zmtp.SocketType, address string, timeout time.Duration) (*Conn, error) {
	return DialFrom(ctx, nil, socket, address, timeout)
}

// DialFrom connects as Dial does, from a local IP address; nil for any.
func DialFrom(ctx context.Context, local net.IP, socket zmtp.SocketType, address string, timeout time.Duration) (*Conn, error) {
	dialer := net.Dialer{Timeout: timeout, LocalAddr: &net.TCPAddr{IP: local}}
	conn, err := dialer.DialContext(ctx, "tcp", address)
	if err != nil {
		return nil, fmt.Errorf("connect: %w", err)
	}
	return handshake(conn.(*net.TCPConn), socket, timeout)
}

// Accept completes the handshake of a socket with a peer that connects to a listener.
func Accept(l *net.TCPListener, socket zmtp.SocketType, timeout time.Duration) (*Conn, error) {
	if err := l.SetDeadline(time.Now().Add(timeout)); err != nil {
		return nil, fmt.Errorf("set deadline: %w", err)
	}
	conn, err := l.AcceptTCP()
	if err != nil {
		return nil, fmt.Errorf("accept: %w", err)
	}
	return handshake(conn, socket, timeout)
}

// handshake completes the handshake. A PUB socket also awaits a subscription, and a SUB socket
// subscribes to all topics.
func handshake(tcp *net.TCPConn, socket zmtp.SocketType, timeout time.Duration) (*Conn, error) {
	c := &Conn{tcp: tcp, session: zmtp.New(zmtp.Config{Socket: socket, Split: true}, time.Now())}
	last := zmtp.Established
	if socket == zmtp.PUB {
		last = zmtp.Subscribe
	}
	var e zmtp.Event
	err := tcp.SetDeadline(time.Now().Add(timeout))
	for err == nil && e.Kind != last {
		err = c.next(&e)
	}
	if err != nil {
		return nil, errors.Join(fmt.Errorf("shake hands: %w", err), tcp.Close())
	}
	return c, tcp.SetDeadline(time.Time{})
}

// next reads an event, and writes what the session answers.
func (c *Conn) next(e *zmtp.Event) error {
	for {
		used, err := c.session.Next(time.Now(), c.in, e)
		if err != nil {
			return err
		}
		if _, err := c.tcp.Write(c.session.Out()); err != nil {
			return err
		}
		if e.Kind != zmtp.Incomplete {
			c.in = c.in[used:]
			return nil
		}
		more := make([]byte, 64<<10)
		n, err := c.tcp.Read(more)
		if err != nil {
			return err
		}
		c.in = append(c.in, more[:n]...)
	}
}

// Receive returns the frames of the next message. It may take timeout; afterwards,
// Receive can be called again.
func (c *Conn) Receive(timeout time.Duration) (frames [][]byte, err error) {
	if err := c.tcp.SetReadDeadline(time.Now().Add(timeout)); err != nil {
		return nil, fmt.Errorf("set deadline: %w", err)
	}
	for {
		var e zmtp.Event
		if err := c.next(&e); err != nil {
			return nil, fmt.Errorf("receive: %w", err)
		}
		if e.Kind != zmtp.Message {
			continue
		}
		frames = append(frames, bytes.Clone(e.Frames[0]))
		if !e.More {
			return frames, nil
		}
	}
}

// Command appends a command.
func (c *Conn) Command(name string, data []byte) { c.buf = zmtp.AppendCommand(c.buf, name, data...) }

// Ping appends a PING with a TTL and a context of the maximum size, 16 bytes.
func (c *Conn) Ping() { c.Command("PING", append([]byte{0, 100}, make([]byte, 16)...)) }

// Message appends a message.
func (c *Conn) Message(frames ...[]byte) { c.buf = zmtp.AppendMessage(c.buf, frames...) }

// More appends a frame that has the MORE flag set.
func (c *Conn) More(body []byte) { c.buf = zmtp.AppendMore(c.buf, body) }

// Buffered returns the number of bytes that Flush will write.
func (c *Conn) Buffered() int { return len(c.buf) }

// Append appends bytes to the buffer as they are.
func (c *Conn) Append(b []byte) { c.buf = append(c.buf, b...) }

// Flush writes the buffer.
func (c *Conn) Flush() error {
	_, err := c.tcp.Write(c.buf)
	c.buf = c.buf[:0]
	return err
}

// SetWriteDeadline bounds how long Flush may take.
func (c *Conn) SetWriteDeadline(t time.Time) error { return c.tcp.SetWriteDeadline(t) }

// Drain reads and discards what the peer sends, such as PONGs, until the connection ends.
func (c *Conn) Drain() { _, _ = io.Copy(io.Discard, c.tcp) }

// Answer reads what the peer sends until the connection ends, and answers its PINGs, so that the peer keeps it. Meanwhile, only the methods that
// send may be called.
func (c *Conn) Answer() {
	var e zmtp.Event
	for c.next(&e) == nil {
	}
}

// LocalAddr returns the local address.
func (c *Conn) LocalAddr() net.Addr { return c.tcp.LocalAddr() }

// Reset ends the connection with an RST.
func (c *Conn) Reset() error { return errors.Join(c.tcp.SetLinger(0), c.tcp.Close()) }

// Close closes the connection gracefully.
func (c *Conn) Close() error { return c.tcp.Close() }
