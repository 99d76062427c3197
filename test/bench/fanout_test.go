package bench_test

import (
	"errors"
	"fmt"
	"io"
	"net"
	"sync"
	"testing"

	"github.com/kvcast/kvcast/internal/core/testclass"
)

// writeBytes is the approximate size of one write.
const writeBytes = 20 << 10

// fanouts are the measured numbers of subscribers.
var fanouts = []int{8, 64}

// BenchmarkFloorFanout measures the minimal cost of delivery: one goroutine, in a separate
// process, writes the bytes of each entry of B1 and B2 to 8 or 64 connections over loopback TCP, in
// writes of about 20 KiB.
//
// Included: the kernel's work for writing to loopback, which includes most of the
// receiver's share, as in the server. Excluded: HTTP/2, gRPC, selecting entries, and the readers, which run in
// the benchmark's process.
//
// Check: the bytes read from each connection are those written.
func BenchmarkFloorFanout(b *testing.B) {
	for _, s := range storeShapes {
		for _, conns := range fanouts {
			open := func() (*fanningOut, error) { return newFanningOut(entryBytes(s.shape.blocks), conns) }
			benchmarkWith(b, fmt.Sprintf("%s/%d", s.name, conns), open, func(b *testing.B, f *fanningOut) {
				b.ResetTimer()
				report, err := f.measure(b.N)
				b.StopTimer()
				if err != nil {
					b.Fatal(err)
				}
				deliveries := float64(b.N * conns)
				b.ReportMetric(float64(report.CPU.Nanoseconds())/deliveries, "cpu-ns/delivery")
				b.ReportMetric(float64(report.Moved)/deliveries, "B/delivery")
				reportAllocations(b, float64(report.Mallocs)/float64(b.N), float64(report.Alloced)/float64(b.N))
			})
		}
	}
}

// fanningOut contains the readers in this process and a writer in a child.
type fanningOut struct {
	child      *child
	conns      []net.Conn
	eventBytes int
}

func newFanningOut(eventBytes, conns int) (_ *fanningOut, err error) {
	l, err := net.Listen("tcp", "127.0.0.1:0") //nolint:noctx // returns at once
	if err != nil {
		return nil, fmt.Errorf("listen for writer: %w", err)
	}
	defer func() { err = errors.Join(err, l.Close()) }()
	// The listen backlog accepts the child's connections before Accept is called.
	c, err := startChild("fanout", childSetup{Address: l.Addr().String(), EventBytes: eventBytes, Conns: conns})
	if err != nil {
		return nil, err
	}
	f := &fanningOut{child: c, eventBytes: eventBytes}
	for range conns {
		conn, err := l.Accept()
		if err != nil {
			return nil, errors.Join(fmt.Errorf("accept writer: %w", err), f.Close())
		}
		f.conns = append(f.conns, conn)
	}
	return f, nil
}

// measure reads n events from each connection, and returns the resources that the child used to
// write them.
func (f *fanningOut) measure(n int) (childReport, error) {
	each := int64(n) * int64(f.eventBytes)
	report, err := f.child.measure(n, func() error {
		errs := make([]error, len(f.conns))
		var wg sync.WaitGroup
		for k, conn := range f.conns {
			wg.Go(func() {
				if _, err := io.CopyBuffer(onlyWriter{}, &exactly{conn, each}, make([]byte, 256<<10)); err != nil {
					errs[k] = fmt.Errorf("read of writer: %w", err)
				}
			})
		}
		wg.Wait()
		return errors.Join(errs...)
	})
	if want := uint64(each) * uint64(len(f.conns)); err == nil && report.Moved != want {
		err = fmt.Errorf("check writer: it wrote %d bytes, want %d", report.Moved, want)
	}
	return report, err
}

// exactly reads a fixed number of bytes. It fails if the connection ends earlier.
type exactly struct {
	conn net.Conn
	left int64
}

func (e *exactly) Read(p []byte) (int, error) {
	if e.left == 0 {
		return 0, io.EOF
	}
	n, err := e.conn.Read(p[:min(int64(len(p)), e.left)])
	e.left -= int64(n)
	if errors.Is(err, io.EOF) {
		err = io.ErrUnexpectedEOF
	}
	return n, err
}

// onlyWriter discards its input, and hides io.Discard's ReadFrom, whose buffer is smaller.
type onlyWriter struct{}

func (onlyWriter) Write(p []byte) (int, error) { return len(p), nil }

// Close closes both sides.
func (f *fanningOut) Close() error {
	closers := []io.Closer{f.child}
	for _, c := range f.conns {
		closers = append(closers, c)
	}
	return closeAll(closers...)
}

// fanout is a child that writes.
type fanout struct {
	conns      []net.Conn
	eventBytes int
	data       []byte
}

func newFanout(s childSetup) (work, error) {
	f := &fanout{eventBytes: s.EventBytes, data: make([]byte, max(1, writeBytes/s.EventBytes)*s.EventBytes)}
	for range s.Conns {
		conn, err := net.Dial("tcp", s.Address) //nolint:noctx // returns at once
		if err != nil {
			return nil, errors.Join(err, f.Close())
		}
		f.conns = append(f.conns, conn)
	}
	return f, nil
}

func (f *fanout) do(n int) (sum uint64, err error) {
	for left := n * f.eventBytes; left > 0; {
		data := f.data[:min(left, len(f.data))]
		for _, conn := range f.conns {
			written, err := conn.Write(data)
			if err != nil {
				return 0, fmt.Errorf("write events: %w", err)
			}
			sum += uint64(written)
		}
		left -= len(data)
	}
	return sum, nil
}

// Close closes the connections.
func (f *fanout) Close() error {
	var errs []error
	for _, c := range f.conns {
		errs = append(errs, c.Close())
	}
	return errors.Join(errs...)
}

func TestFanoutWritesAll(t *testing.T) {
	testclass.Process(t)
	f, err := newFanningOut(entryBytes(16), 8)
	if err != nil {
		t.Fatal(err)
	}
	for _, n := range []int{1, 1000} {
		report, err := f.measure(n)
		if err != nil {
			t.Fatal(err)
		}
		if report.CPU <= 0 {
			t.Errorf("%d events took %v", n, report.CPU)
		}
	}
	if err := f.Close(); err != nil {
		t.Error(err)
	}
}
