//go:build cgo

package bench_test

import (
	"encoding/binary"
	"errors"
	"fmt"
	"syscall"
	"testing"
	"time"

	"github.com/pebbe/zmq4"

	"github.com/kvcast/kvcast/internal/core/testclass"
	"github.com/kvcast/kvcast/test/bench"
)

func init() {
	roles["receive"], roles["pebbe"] = newBareReceive, newPebbeReceive
}

// BenchmarkFloorReceive measures the minimal cost of receiving a message of three frames: a C loop
// with its libzmq I/O thread, in a separate process.
//
// Included: the kernel's share of reading from loopback TCP, which the reader pays. Excluded: the
// publisher, decoding, and wakeups per message: the loop sleeps for 5 ms on an empty socket, so
// that messages accumulate. waits/msg is the number of waits, mostly of the I/O thread, per message.
//
// Check: the loop counts messages and verifies that their seqs are contiguous, and it received as
// many bytes as were published.
func BenchmarkFloorReceive(b *testing.B) {
	for _, s := range storeShapes {
		benchmarkReceive(b, s.name, "receive", s.shape)
	}
}

// BenchmarkReceive is BenchmarkFloorReceive with another loop: pebbe uses that package's
// RecvMessageBytes, which calls C twice per frame and copies each frame. The allocations are the
// allocations of the loop.
func BenchmarkReceive(b *testing.B) {
	for _, s := range storeShapes {
		benchmarkReceive(b, "pebbe/"+s.name, "pebbe", s.shape)
	}
}

func benchmarkReceive(b *testing.B, name, role string, s shape) {
	open := func() (*receiving, error) { return newReceiving(role, s) }
	benchmarkWith(b, name, open, func(b *testing.B, r *receiving) {
		b.ResetTimer()
		report, err := r.measure(b.N)
		b.StopTimer()
		if err != nil {
			b.Fatal(err)
		}
		n := float64(b.N)
		b.ReportMetric(float64(report.CPU.Nanoseconds())/n, "cpu-ns/msg")
		b.ReportMetric(float64(report.Waits)/n, "waits/msg")
		b.ReportMetric(float64(report.Moved)/n, "B/msg")
		reportAllocations(b, float64(report.Mallocs)/n, float64(report.Alloced)/n)
	})
}

// receiving is a publisher in this process and a receiver in a child.
type receiving struct {
	publisher *publisher
	child     *child
	load      *load
}

func newReceiving(role string, s shape) (*receiving, error) {
	p, err := newPublisher()
	if err != nil {
		return nil, err
	}
	c, err := startChild(role, childSetup{Address: p.endpoint})
	if err != nil {
		return nil, errors.Join(err, p.Close())
	}
	r := &receiving{publisher: p, child: c, load: newLoad(s)}
	if err := p.subscribed(); err != nil {
		return nil, errors.Join(err, r.Close())
	}
	return r, nil
}

// measure publishes n batches and returns the resources that the child used to receive them.
func (r *receiving) measure(n int) (childReport, error) {
	var sent uint64
	report, err := r.child.measure(n, func() error {
		for range n {
			payload := r.load.next(time.Now())
			sent += uint64(len(topic) + 8 + len(payload))
			if err := r.publisher.send(payload); err != nil {
				return err
			}
		}
		return nil
	})
	if err == nil && report.Moved != sent {
		err = fmt.Errorf("check receiver: it received %d bytes, want %d", report.Moved, sent)
	}
	return report, err
}

// Close closes the publisher and the child.
func (r *receiving) Close() error { return closeAll(r.child, r.publisher) }

// bareReceive is a child's C loop.
type bareReceive struct{ *bench.Receiver }

func newBareReceive(s childSetup) (work, error) {
	r, err := bench.NewReceiver(s.Address)
	return bareReceive{r}, err
}

func (r bareReceive) do(n int) (uint64, error) { return r.Drain(n) }

// pebbeReceive is a child's Go loop.
type pebbeReceive struct {
	zctx   *zmq4.Context
	socket *zmq4.Socket
	seq    uint64 // of the next message
}

func newPebbeReceive(s childSetup) (work, error) {
	zctx, err := zmq4.NewContext()
	if err != nil {
		return nil, err
	}
	r := &pebbeReceive{zctx: zctx}
	if r.socket, err = zctx.NewSocket(zmq4.SUB); err != nil {
		return nil, errors.Join(err, zctx.Term())
	}
	if err := errors.Join(
		r.socket.SetRcvhwm(10_000), r.socket.SetLinger(0), r.socket.SetSubscribe(""), r.socket.Connect(s.Address),
	); err != nil {
		return nil, errors.Join(err, r.Close())
	}
	return r, nil
}

func (r *pebbeReceive) do(n int) (sum uint64, err error) {
	idle := time.Duration(0)
	for got := 0; got < n; {
		frames, err := r.socket.RecvMessageBytes(zmq4.DONTWAIT)
		if errors.Is(err, zmq4.Errno(syscall.EAGAIN)) && idle < bench.IdleLimit {
			bench.Pause(bench.IdlePause)
			idle += bench.IdlePause
			continue
		}
		if err != nil {
			return 0, fmt.Errorf("receive message %d: %w", r.seq, err)
		}
		idle = 0
		if len(frames) != 3 || len(frames[1]) != 8 || binary.BigEndian.Uint64(frames[1]) != r.seq {
			return 0, fmt.Errorf("receive message %d: got %x", r.seq, frames)
		}
		for _, f := range frames {
			sum += uint64(len(f))
		}
		r.seq++
		got++
	}
	return sum, nil
}

// Close closes the socket.
func (r *pebbeReceive) Close() error { return errors.Join(r.socket.Close(), r.zctx.Term()) }

func TestReceiversReceiveEverything(t *testing.T) {
	testclass.Process(t)
	for _, role := range []string{"receive", "pebbe", "batch", "wait"} {
		r, err := newReceiving(role, shapeB1)
		if err != nil {
			t.Fatal(err)
		}
		for _, n := range []int{1, 500} {
			report, err := r.measure(n)
			if err != nil {
				t.Fatal(err)
			}
			if report.CPU <= 0 {
				t.Errorf("%s: %d messages took %v", role, n, report.CPU)
			}
		}
		if err := r.Close(); err != nil {
			t.Error(err)
		}
	}
}
