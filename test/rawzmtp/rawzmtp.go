// Package rawzmtp implements the sending side of ZMTP 3.1 (RFC 37) over plain TCP, for tests that
// send what no well-behaved publisher sends: commands between messages, unterminated messages, and
// connection resets.
package rawzmtp

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"time"

	"github.com/kvcast/kvcast/internal/zmtp"
)

// Conn is a connection of a PUB socket that has completed the handshake with a SUB socket. Its
// methods append to a buffer, which Flush writes.
type Conn struct {
	tcp *net.TCPConn
	buf []byte
}

// Publish connects to a bound SUB socket. Connecting and the handshake may each take timeout.
func Publish(ctx context.Context, address string, timeout time.Duration) (*Conn, error) {
	dialer := net.Dialer{Timeout: timeout}
	conn, err := dialer.DialContext(ctx, "tcp", address)
	if err != nil {
		return nil, fmt.Errorf("connect: %w", err)
	}
	return handshake(conn.(*net.TCPConn), timeout)
}

// Accept completes the handshake with a SUB socket that connects to a listener.
func Accept(l *net.TCPListener, timeout time.Duration) (*Conn, error) {
	if err := l.SetDeadline(time.Now().Add(timeout)); err != nil {
		return nil, fmt.Errorf("set deadline: %w", err)
	}
	conn, err := l.AcceptTCP()
	if err != nil {
		return nil, fmt.Errorf("accept: %w", err)
	}
	return handshake(conn, timeout)
}

func handshake(tcp *net.TCPConn, timeout time.Duration) (*Conn, error) {
	c := &Conn{tcp: tcp}
	err := errors.Join(tcp.SetDeadline(time.Now().Add(timeout)), c.greet())
	if err != nil {
		return nil, errors.Join(fmt.Errorf("shake hands: %w", err), tcp.Close())
	}
	return c, tcp.SetDeadline(time.Time{})
}

// greet completes the handshake, and reads the subscription to all topics.
func (c *Conn) greet() error {
	session := zmtp.New(zmtp.Config{Socket: zmtp.PUB}, time.Now())
	in := make([]byte, 4096)
	for n := 0; ; {
		if _, err := c.tcp.Write(session.Out()); err != nil {
			return err
		}
		got, err := c.tcp.Read(in[n:])
		if err != nil {
			return err
		}
		n += got
		for {
			var e zmtp.Event
			used, err := session.Next(time.Now(), in[:n], &e)
			switch {
			case err != nil, e.Kind == zmtp.Subscribe:
				return err
			}
			if used == 0 {
				break
			}
			n = copy(in, in[used:n])
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

// LocalAddr returns the local address.
func (c *Conn) LocalAddr() net.Addr { return c.tcp.LocalAddr() }

// Reset ends the connection with an RST.
func (c *Conn) Reset() error { return errors.Join(c.tcp.SetLinger(0), c.tcp.Close()) }

// Close closes the connection gracefully.
func (c *Conn) Close() error { return c.tcp.Close() }
