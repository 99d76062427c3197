//go:build cgo

package bench_test

import (
	"encoding/binary"
	"errors"
	"fmt"
	"net"
	"strconv"
	"sync"
	"testing"
	"time"

	"github.com/kvcast/kvcast/internal/core/testclass"
	"github.com/kvcast/kvcast/internal/transport"
	"github.com/kvcast/kvcast/internal/transport/libzmq"
	"github.com/kvcast/kvcast/internal/transport/native"
	"github.com/kvcast/kvcast/internal/zmtp"
	"github.com/kvcast/kvcast/internal/zmtp/outbound"
	"github.com/kvcast/kvcast/test/bench"
	"github.com/kvcast/kvcast/test/harness"
)

const (
	// manyConnections is the number of publishers, and of batches per second of all together.
	manyConnections = 1000
	// connectionSeconds is the shortest measurement.
	connectionSeconds = 10
)

// openTransport has the implementations of package transport.
var openTransport = map[string]func() (transport.Transport, error){
	"native": func() (transport.Transport, error) { return native.New(native.Config{}), nil },
	"libzmq": func() (transport.Transport, error) {
		return libzmq.New(libzmq.Config{MaxSockets: 4 * manyConnections})
	},
}

// connectionCase is which side of the connections listens.
type connectionCase struct {
	name       string
	publishers string // role
	// subscribe returns a transport's receivers.
	subscribe func(t transport.Transport, port, n int) ([]transport.Receiver, error)
}

var connectionCases = []connectionCase{
	{"listen", "publishers-connect", func(t transport.Transport, port, _ int) ([]transport.Receiver, error) {
		r, _, err := t.Bind("tcp://"+publisherAddress(0, port), nil)
		return []transport.Receiver{r}, err
	}},
	{"connect", "publishers-bind", func(t transport.Transport, port, n int) (all []transport.Receiver, err error) {
		for i := range n {
			r, err := t.Subscribe("tcp://"+publisherAddress(i, port), "", nil)
			if err != nil {
				return all, err
			}
			all = append(all, r)
		}
		return all, nil
	}},
}

func init() {
	for name, open := range openTransport {
		for _, c := range connectionCases {
			roles[name+"-"+c.name] = func(s childSetup) (work, error) { return newConnections(s, open, c) }
		}
	}
	roles["publishers-connect"] = func(s childSetup) (work, error) {
		return newPublishers(s, func(_ int, c outbound.Config) (*outbound.Socket, error) {
			return outbound.Connect("tcp", s.Address, c), nil
		})
	}
	roles["publishers-bind"] = func(s childSetup) (work, error) {
		port, err := portOf(s.Address)
		if err != nil {
			return nil, err
		}
		return newPublishers(s, func(i int, c outbound.Config) (*outbound.Socket, error) {
			return outbound.Bind("tcp", publisherAddress(i, port), c)
		})
	}
}

// BenchmarkConnections measures the receiving side of 1,000 publishers of one B1 batch per second
// each, which connect to one listener, or listen and are connected to: package native or libzmq in a
// process that counts the messages and does nothing else. b.N is seconds, with a minimum of
// connectionSeconds.
//
// cpu-s/s (CPU seconds per second), threads, fds and rss-MB cover that process only. A connection is
// a descriptor with either implementation.
//
// Check: every message arrives, in the order of its publisher.
func BenchmarkConnections(b *testing.B) {
	requireProc(b)
	for _, c := range connectionCases {
		for _, name := range []string{"native", "libzmq"} {
			open := func() (*connecting, error) { return openConnecting(name, c, manyConnections) }
			benchmarkWith(b, c.name+"/"+name, open, func(b *testing.B, c *connecting) {
				seconds := max(b.N, connectionSeconds)
				b.ResetTimer()
				report, err := c.measure(seconds * manyConnections)
				b.StopTimer()
				if err != nil {
					b.Fatal(err)
				}
				pid := c.receiver.cmd.Process.Pid
				threads, err1 := harness.Threads(pid)
				descriptors, _, err2 := harness.Descriptors(pid)
				rss, err3 := harness.ResidentBytes(pid)
				if err := errors.Join(err1, err2, err3); err != nil {
					b.Fatal(err)
				}
				b.ReportMetric(report.CPU.Seconds()/float64(seconds), "cpu-s/s")
				b.ReportMetric(float64(threads), "threads")
				b.ReportMetric(float64(descriptors), "fds")
				b.ReportMetric(float64(rss)/1e6, "rss-MB")
				messages := float64(seconds * manyConnections)
				b.ReportMetric(float64(report.Waits)/messages, "waits/msg")
				reportAllocations(b, float64(report.Mallocs)/messages, float64(report.Alloced)/messages)
			})
		}
	}
}

// connecting is a process that receives and one that publishes.
type connecting struct{ receiver, publishers *child }

// openConnecting returns once all are connected.
func openConnecting(name string, c connectionCase, conns int) (*connecting, error) {
	port, err := harness.AllocatePorts(1)
	if err != nil {
		return nil, err
	}
	setup := childSetup{Address: fmt.Sprintf("127.0.0.1:%d", port), Conns: conns}
	var k connecting
	start := []func() error{
		func() (err error) { k.receiver, err = startChild(name+"-"+c.name, setup); return err },
		func() (err error) { k.publishers, err = startChild(c.publishers, setup); return err },
	}
	if c.publishers == "publishers-bind" {
		start[0], start[1] = start[1], start[0]
	}
	for _, f := range start {
		if err := f(); err != nil {
			return nil, closeAfter(err, &k)
		}
	}
	if _, err := k.measure(conns); err != nil {
		return nil, closeAfter(err, &k)
	}
	return &k, nil
}

// measure publishes n messages, and returns what receiving them took.
func (k *connecting) measure(n int) (childReport, error) {
	return k.receiver.measure(n, func() error {
		_, err := k.publishers.measure(n, func() error { return nil })
		return err
	})
}

// Close ends both processes.
func (k *connecting) Close() error {
	var errs []error
	for _, c := range []*child{k.receiver, k.publishers} {
		if c != nil {
			errs = append(errs, c.Close())
		}
	}
	return errors.Join(errs...)
}

// publisherAddress returns the address of a publisher: each has its own loopback address.
func publisherAddress(i, port int) string {
	return net.JoinHostPort(fmt.Sprintf("127.0.%d.%d", i/250, 1+i%250), strconv.Itoa(port))
}

func portOf(address string) (int, error) {
	_, port, err := net.SplitHostPort(address)
	if err != nil {
		return 0, err
	}
	return strconv.Atoi(port)
}

// publishers is a child's PUB sockets, which publish in turn.
type publishers struct {
	sockets    []*outbound.Socket
	topics     [][]byte
	subscribed chan struct{} // has an element for each subscription
	waiting    int           // sockets that were not subscribed to
	load       *load
	sent       int
}

func newPublishers(s childSetup, open func(i int, c outbound.Config) (*outbound.Socket, error)) (work, error) {
	p := &publishers{subscribed: make(chan struct{}, 2*s.Conns), waiting: s.Conns, load: newLoad(shapeB1)}
	c := outbound.Config{Type: zmtp.PUB, HighWater: 10_000, OnEvent: func(e outbound.Event) {
		if e.Kind == zmtp.Subscribe {
			p.subscribed <- struct{}{}
		}
	}}
	for i := range s.Conns {
		socket, err := open(i, c)
		if err != nil {
			return nil, closeAfter(err, p)
		}
		p.sockets = append(p.sockets, socket)
		p.topics = append(p.topics, fmt.Appendf(nil, "kv@10.0.%d.%d@%s", i/250, i%250, modelName))
	}
	return p, nil
}

// do publishes n messages, at manyConnections per second.
func (p *publishers) do(n int) (sum uint64, err error) {
	timeout := time.After(bench.IdleLimit)
	for ; p.waiting > 0; p.waiting-- {
		select {
		case <-p.subscribed:
		case <-timeout:
			return 0, fmt.Errorf("%d publishers have no subscriber", p.waiting)
		}
	}
	due, err := bench.NewTicks(time.Second / manyConnections)
	if err != nil {
		return 0, err
	}
	defer func() { err = errors.Join(err, due.Close()) }()
	var seq [8]byte
	for range n {
		if err := due.Wait(); err != nil {
			return 0, err
		}
		i := p.sent % len(p.sockets)
		binary.BigEndian.PutUint64(seq[:], uint64(p.sent/len(p.sockets)))
		payload := p.load.next(time.Now())
		p.sockets[i].Publish(p.topics[i], seq[:], payload)
		sum += uint64(len(payload))
		p.sent++
	}
	return sum, nil
}

// Close closes the sockets.
func (p *publishers) Close() error {
	for _, s := range p.sockets {
		s.Close(0)
	}
	return nil
}

// connections is a child's receivers.
type connections struct {
	transport transport.Transport
	receivers []transport.Receiver
	readers   sync.WaitGroup

	arrived chan struct{} // has an element if got has reached want, or err is set

	mu    sync.Mutex // guards all below
	got   int
	want  int // messages of all calls of do
	bytes uint64
	err   error
}

func newConnections(s childSetup, open func() (transport.Transport, error), c connectionCase) (work, error) {
	port, err := portOf(s.Address)
	if err != nil {
		return nil, err
	}
	k := &connections{arrived: make(chan struct{}, 1)}
	if k.transport, err = open(); err != nil {
		return nil, err
	}
	if k.receivers, err = c.subscribe(k.transport, port, s.Conns); err != nil {
		return nil, closeAfter(err, k)
	}
	for _, r := range k.receivers {
		k.readers.Go(func() { k.read(r) })
	}
	return k, nil
}

// read reads a receiver until it is closed.
func (k *connections) read(r transport.Receiver) {
	next := make(map[string]uint64) // seq, by topic
	for {
		c, err := r.Next(func() time.Time { return time.Time{} })
		if errors.Is(err, transport.ErrInterrupted) {
			return
		}
		var sum uint64
		if err == nil {
			sum, err = check(c, next)
		}
		k.mu.Lock()
		if c != nil {
			k.got += len(c.Messages)
			k.bytes += sum
		}
		k.err = errors.Join(k.err, err)
		k.signal()
		k.mu.Unlock()
		if err != nil {
			return
		}
		r.Recycle(c)
	}
}

// check checks that messages are the next ones of their publishers, and returns their size.
func check(c *transport.Chunk, next map[string]uint64) (sum uint64, err error) {
	for _, e := range c.Events {
		if e.Kind != transport.Connected {
			err = errors.Join(err, fmt.Errorf("event %+v", e))
		}
	}
	for _, m := range c.Messages {
		if m.Count != 3 || len(m.Frames[1]) != 8 || binary.BigEndian.Uint64(m.Frames[1]) != next[string(m.Frames[0])] {
			return 0, fmt.Errorf("unexpected message %.30q", m.Frames)
		}
		next[string(m.Frames[0])]++
		sum += uint64(m.Bytes())
	}
	return sum, err
}

// signal wakes do if it need not wait any more. The caller locks mu.
func (k *connections) signal() {
	if k.got < k.want && k.err == nil {
		return
	}
	select {
	case k.arrived <- struct{}{}:
	default:
	}
}

// do waits until n more messages have arrived.
func (k *connections) do(n int) (bytes uint64, err error) {
	k.mu.Lock()
	defer k.mu.Unlock()
	k.want += n
	limit := time.Duration(n)*time.Second/manyConnections + bench.IdleLimit
	for timeout := time.After(limit); k.got < k.want && k.err == nil; {
		k.mu.Unlock()
		select {
		case <-k.arrived:
		case <-timeout:
			err = fmt.Errorf("not all of %d messages have arrived within %v", n, limit)
		}
		k.mu.Lock()
		k.err = errors.Join(k.err, err)
	}
	bytes, k.bytes = k.bytes, 0
	return bytes, k.err
}

// Close closes the receivers and the transport.
func (k *connections) Close() error {
	var errs []error
	for _, r := range k.receivers {
		r.Interrupt()
	}
	k.readers.Wait()
	for _, r := range k.receivers {
		errs = append(errs, r.Close())
	}
	return errors.Join(append(errs, k.transport.Close())...)
}

func TestConnectionsReceiveEverything(t *testing.T) {
	testclass.Process(t)
	for name := range openTransport {
		for _, c := range connectionCases {
			t.Run(name+"/"+c.name, func(t *testing.T) {
				k, err := openConnecting(name, c, 5)
				if err != nil {
					t.Fatal(err)
				}
				report, err := k.measure(50)
				if err != nil || report.Moved == 0 {
					t.Errorf("report %+v, error %v", report, err)
				}
				if err := k.Close(); err != nil {
					t.Error(err)
				}
			})
		}
	}
}
