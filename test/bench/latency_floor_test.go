//go:build cgo

package bench_test

import (
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"slices"
	"time"

	"github.com/kvcast/kvcast/test/bench"
)

func init() { roles["seqs"] = newSeqWriter }

// latencyFloor is the minimal path between an engine and a subscriber: a child process whose C loop
// writes the seq of each message to a TCP connection. Its latency is the cost of the machine, ZeroMQ
// and TCP on any path.
type latencyFloor struct {
	publisher *publisher
	child     *child
	conn      net.Conn
	load      *load
	latencies []time.Duration
}

func newLatencyFloor(s shape) (_ *latencyFloor, err error) {
	l, err := net.Listen("tcp", "127.0.0.1:0") //nolint:noctx // returns at once
	if err != nil {
		return nil, fmt.Errorf("listen for seqs: %w", err)
	}
	defer func() { err = errors.Join(err, l.Close()) }()
	r := &latencyFloor{load: newLoad(s)}
	if r.publisher, err = newPublisher(); err != nil {
		return nil, err
	}
	// The listen backlog accepts the child's connection before Accept is called.
	r.child, err = startChild("seqs", childSetup{Address: r.publisher.endpoint, Conn: l.Addr().String()})
	if err == nil {
		r.conn, err = l.Accept()
	}
	if err == nil {
		err = r.publisher.subscribed()
	}
	if err != nil {
		return nil, closeAfter(fmt.Errorf("open latency floor: %w", err), r)
	}
	return r, nil
}

// measure sends n batches at pacedRate, and returns once the last has arrived.
func (r *latencyFloor) measure(n int) error {
	_, err := r.child.measure(n, func() error {
		sent := make(chan time.Time, n)
		read := make(chan error, 1)
		first := r.publisher.seq
		go func() { read <- r.read(first, sent) }()
		err := paced(n, pacedRate, func() error {
			now := time.Now()
			sent <- now
			return r.publisher.send(r.load.next(now))
		})
		close(sent)
		return errors.Join(err, <-read)
	})
	return err
}

// read reads one seq per batch.
func (r *latencyFloor) read(seq uint64, sent <-chan time.Time) error {
	var b [8]byte
	for at := range sent {
		if err := r.conn.SetReadDeadline(time.Now().Add(stall)); err != nil {
			return fmt.Errorf("wait for seq: %w", err)
		}
		if _, err := io.ReadFull(r.conn, b[:]); err != nil {
			return fmt.Errorf("read seq: %w", err)
		}
		r.latencies = append(r.latencies, time.Since(at))
		if got := binary.BigEndian.Uint64(b[:]); got != seq {
			return fmt.Errorf("check seq: got %d, want %d", got, seq)
		}
		seq++
	}
	return nil
}

// seen returns the latencies since the last call, sorted.
func (r *latencyFloor) seen() []time.Duration {
	latencies := slices.Sorted(slices.Values(r.latencies))
	r.latencies = r.latencies[:0]
	return latencies
}

// Close closes all parts.
func (r *latencyFloor) Close() error {
	var closers []io.Closer
	if r.child != nil {
		closers = append(closers, r.child)
	}
	if r.conn != nil {
		closers = append(closers, r.conn)
	}
	return closeAll(append(closers, r.publisher)...)
}

// seqWriter is a child that writes the seq of each message that it reads.
type seqWriter struct {
	receiver *bench.Receiver
	file     *os.File
}

func newSeqWriter(s childSetup) (work, error) {
	conn, err := net.Dial("tcp", s.Conn) //nolint:noctx // returns at once
	if err != nil {
		return nil, err
	}
	file, err := conn.(*net.TCPConn).File()
	if err = errors.Join(err, conn.Close()); err != nil {
		return nil, err
	}
	r, err := bench.NewReceiver(s.Address)
	return seqWriter{r, file}, err
}

func (w seqWriter) do(n int) (uint64, error) { return 0, w.receiver.WriteSeqs(n, int(w.file.Fd())) }

// Close closes the receiver and the connection.
func (w seqWriter) Close() error { return closeAll(w.receiver, w.file) }
