// Package rawzmtp implements the sending side of ZMTP 3.1 (RFC 37) over plain TCP, for tests that
// send what no well-behaved publisher sends: commands between messages, unterminated messages, and
// connection resets.
package rawzmtp

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"net"
	"time"
)

// Frame flags.
const (
	flagMore    = 1
	flagLong    = 2
	flagCommand = 4
)

// greetingBytes is the length of the greeting of either side.
const greetingBytes = 64

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

// greet exchanges greetings and READY commands, and reads the subscription to all topics.
func (c *Conn) greet() error {
	greeting := make([]byte, greetingBytes)
	greeting[0], greeting[9], greeting[10], greeting[11] = 0xff, 0x7f, 3, 1
	copy(greeting[12:], "NULL")
	if _, err := c.tcp.Write(greeting); err != nil {
		return err
	}
	if _, err := io.ReadFull(c.tcp, greeting); err != nil {
		return fmt.Errorf("read greeting: %w", err)
	}
	c.Command("READY", append(binary.BigEndian.AppendUint32([]byte("\x0bSocket-Type"), 3), "PUB"...))
	if err := c.Flush(); err != nil {
		return err
	}
	for _, what := range []string{"READY", "subscription"} {
		if err := c.skipFrame(); err != nil {
			return fmt.Errorf("read %s: %w", what, err)
		}
	}
	return nil
}

// skipFrame reads a short frame.
func (c *Conn) skipFrame() error {
	var head [2]byte
	if _, err := io.ReadFull(c.tcp, head[:]); err != nil {
		return err
	}
	if head[0]&flagLong != 0 {
		return errors.New("frame is long")
	}
	_, err := io.CopyN(io.Discard, c.tcp, int64(head[1]))
	return err
}

// Command appends a command.
func (c *Conn) Command(name string, body []byte) {
	c.frame(flagCommand, append(append([]byte{byte(len(name))}, name...), body...))
}

// Ping appends a PING with a TTL and a context of the maximum size, 16 bytes.
func (c *Conn) Ping() { c.Command("PING", append([]byte{0, 100}, make([]byte, 16)...)) }

// Message appends a message.
func (c *Conn) Message(frames ...[]byte) {
	for i, f := range frames {
		if i < len(frames)-1 {
			c.More(f)
		} else {
			c.frame(0, f)
		}
	}
}

// More appends a frame that has the MORE flag set.
func (c *Conn) More(body []byte) { c.frame(flagMore, body) }

func (c *Conn) frame(flags byte, body []byte) {
	if len(body) > 255 {
		c.buf = append(c.buf, flags|flagLong)
		c.buf = binary.BigEndian.AppendUint64(c.buf, uint64(len(body)))
	} else {
		c.buf = append(c.buf, flags, byte(len(body)))
	}
	c.buf = append(c.buf, body...)
}

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
