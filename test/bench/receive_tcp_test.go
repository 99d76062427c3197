//go:build cgo

package bench_test

import (
	"context"
	"encoding/binary"
	"fmt"
	"net"
	"strings"
	"testing"
	"time"

	"github.com/kvcast/kvcast/internal/zmtp"
	"github.com/kvcast/kvcast/test/bench"
)

func init() {
	roles["tcp"] = newTCPReceive
}

// BenchmarkFloorTCP measures the minimal cost of receiving a message in Go: one goroutine reads a TCP
// connection into a buffer of 64 KiB, and finds the ends of messages. Like BenchmarkReceiveNative it
// waits for each batch of bytes.
func BenchmarkFloorTCP(b *testing.B) {
	for _, s := range storeShapes {
		benchmarkReceive(b, s.name, "tcp", s.shape)
	}
}

// tcpReceive is a child's loop that reads a connection.
type tcpReceive struct {
	conn net.Conn
	in   []byte // received and not processed, at the beginning of buf
	buf  [64 << 10]byte
	seq  uint64 // of the next message
}

func newTCPReceive(s childSetup) (work, error) {
	ctx, cancel := context.WithTimeout(context.Background(), bench.IdleLimit)
	defer cancel()
	conn, err := new(net.Dialer).DialContext(ctx, "tcp", strings.TrimPrefix(s.Address, "tcp://"))
	if err != nil {
		return nil, err
	}
	r := &tcpReceive{conn: conn}
	session := zmtp.New(zmtp.Config{Socket: zmtp.SUB}, time.Now())
	for !session.Established() {
		if _, err := conn.Write(session.Out()); err != nil {
			return nil, err
		}
		if err := r.read(); err != nil {
			return nil, err
		}
		for used := -1; used != 0 && !session.Established(); {
			var e zmtp.Event
			if used, err = session.Next(time.Now(), r.in, &e); err != nil {
				return nil, err
			}
			r.consume(used)
		}
	}
	_, err = conn.Write(session.Out())
	return r, err
}

func (r *tcpReceive) read() error {
	n, err := r.conn.Read(r.buf[len(r.in):])
	r.in = r.buf[:len(r.in)+n]
	return err
}

func (r *tcpReceive) consume(n int) {
	r.in = r.buf[:copy(r.buf[:], r.in[n:])]
}

// nextFrame returns a frame's body and its end in b, and whether another frame of the message follows; ok
// is false if the frame is incomplete.
func nextFrame(b []byte) (body []byte, end int, more, ok bool) {
	const moreFlag, longFlag = 1, 2
	if len(b) < 2 {
		return nil, 0, false, false
	}
	from, size := 2, int(b[1])
	if b[0]&longFlag != 0 {
		if len(b) < 9 {
			return nil, 0, false, false
		}
		from, size = 9, int(binary.BigEndian.Uint64(b[1:]))
	}
	if end = from + size; end > len(b) {
		return nil, 0, false, false
	}
	return b[from:end], end, b[0]&moreFlag != 0, true
}

func (r *tcpReceive) do(n int) (sum uint64, err error) {
	if err := r.conn.SetReadDeadline(time.Now().Add(bench.IdleLimit)); err != nil {
		return 0, err
	}
	for got := 0; got < n; {
		used := 0
		for got < n {
			end, bytes, frames := used, 0, 0
			for more := true; more; frames++ {
				var body []byte
				var next int
				var ok bool
				if body, next, more, ok = nextFrame(r.in[end:]); !ok {
					frames = 0
					break
				}
				if frames == 1 && (len(body) != 8 || binary.BigEndian.Uint64(body) != r.seq) {
					return 0, fmt.Errorf("receive message %d: got seq %x", r.seq, body)
				}
				end += next
				bytes += len(body)
			}
			if frames != 3 {
				break // it is incomplete
			}
			used, sum, got, r.seq = end, sum+uint64(bytes), got+1, r.seq+1
		}
		r.consume(used)
		if got < n {
			if err := r.read(); err != nil {
				return 0, fmt.Errorf("receive message %d: %w", r.seq, err)
			}
		}
	}
	return sum, nil
}

// Close closes the connection.
func (r *tcpReceive) Close() error { return r.conn.Close() }
