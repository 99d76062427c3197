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

// relayed is the least that stands between an engine and a subscriber: a child whose
// loop in C writes the seq of each message to a TCP connection. What its ways take is
// what the machine, ZeroMQ and TCP take of any way.
type relayed struct {
	publisher *publisher
	child     *child
	conn      net.Conn
	load      *load
	ways      []time.Duration
}

func newRelayed(s shape) (_ *relayed, err error) {
	l, err := net.Listen("tcp", "127.0.0.1:0") //nolint:noctx // it is there at once
	if err != nil {
		return nil, fmt.Errorf("listen for relay: %w", err)
	}
	defer func() { err = errors.Join(err, l.Close()) }()
	r := &relayed{load: newLoad(s)}
	if r.publisher, err = newPublisher(); err != nil {
		return nil, err
	}
	// The backlog takes its connection before it is accepted.
	r.child, err = startChild("relay", childSetup{Address: r.publisher.endpoint, Conn: l.Addr().String()})
	if err == nil {
		r.conn, err = l.Accept()
	}
	if err == nil {
		err = r.publisher.subscribed()
	}
	if err != nil {
		return nil, closeAfter(fmt.Errorf("open relay: %w", err), r)
	}
	return r, nil
}

// measure sends n batches at pacedRate, and is over when the last has come.
func (r *relayed) measure(n int) error {
	_, err := r.child.measure(n, func() error {
		sent := make(chan time.Time, n)
		read := make(chan error, 1)
		first := r.publisher.seq
		go func() { read <- r.read(first, sent) }()
		err := paced(n, func() error {
			now := time.Now()
			sent <- now
			return r.publisher.send(r.load.next(now))
		})
		close(sent)
		return errors.Join(err, <-read)
	})
	return err
}

// read reads a seq for each batch.
func (r *relayed) read(seq uint64, sent <-chan time.Time) error {
	var b [8]byte
	for at := range sent {
		if err := r.conn.SetReadDeadline(time.Now().Add(stall)); err != nil {
			return fmt.Errorf("wait for relay: %w", err)
		}
		if _, err := io.ReadFull(r.conn, b[:]); err != nil {
			return fmt.Errorf("read of relay: %w", err)
		}
		r.ways = append(r.ways, time.Since(at))
		if got := binary.BigEndian.Uint64(b[:]); got != seq {
			return fmt.Errorf("check relay: it wrote %d, want %d", got, seq)
		}
		seq++
	}
	return nil
}

// seen returns the ways since the last call, in order of size.
func (r *relayed) seen() []time.Duration {
	ways := slices.Sorted(slices.Values(r.ways))
	r.ways = r.ways[:0]
	return ways
}

// Close ends all parts.
func (r *relayed) Close() error {
	var closers []io.Closer
	if r.child != nil {
		closers = append(closers, r.child)
	}
	if r.conn != nil {
		closers = append(closers, r.conn)
	}
	return closeAll(append(closers, r.publisher)...)
}

// relay is a child that writes what it reads.
type relay struct {
	receiver *bench.Receiver
	file     *os.File
}

func newRelay(s childSetup) (work, error) {
	conn, err := net.Dial("tcp", s.Conn) //nolint:noctx // it is there at once
	if err != nil {
		return nil, err
	}
	file, err := conn.(*net.TCPConn).File()
	if err = errors.Join(err, conn.Close()); err != nil {
		return nil, err
	}
	r, err := bench.NewReceiver(s.Address)
	return relay{r, file}, err
}

func (r relay) do(n int) (uint64, error) { return 0, r.receiver.Relay(n, int(r.file.Fd())) }

// Close closes both ends.
func (r relay) Close() error { return closeAll(r.receiver, r.file) }
