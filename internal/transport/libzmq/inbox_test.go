//go:build cgo

package libzmq

import (
	"errors"
	"fmt"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/pebbe/zmq4"

	"github.com/kvcast/kvcast/internal/budget"
	"github.com/kvcast/kvcast/internal/transport"
)

// testInbox is an inbox that is drained, and a socket to send to it.
type testInbox struct {
	*inbox
	t       *testing.T
	sender  *zmq4.Socket
	dropped atomic.Int64
}

var testInboxes atomic.Int64

func newTestInbox(t *testing.T, b *budget.Budget, prepare func(*inbox)) *testInbox {
	t.Helper()
	zctx, err := zmq4.NewContext()
	if err != nil {
		t.Fatal(err)
	}
	var ends [2]*zmq4.Socket
	for i, kind := range []zmq4.Type{zmq4.PULL, zmq4.PUSH} {
		if ends[i], err = zctx.NewSocket(kind); err != nil {
			t.Fatal(err)
		}
		if err := errors.Join(ends[i].SetLinger(0), ends[i].SetRcvhwm(0), ends[i].SetSndhwm(0)); err != nil {
			t.Fatal(err)
		}
	}
	address := fmt.Sprint("inproc://", testInboxes.Add(1))
	if err := errors.Join(ends[0].Bind(address), ends[1].Connect(address)); err != nil {
		t.Fatal(err)
	}
	socket, err := Open(ends[0])
	if err != nil {
		t.Fatal(err)
	}
	x := &testInbox{t: t, sender: ends[1]}
	x.inbox = &inbox{
		socket: socket, budget: b, pool: new(pool), onDrop: func(n int) { x.dropped.Add(int64(n)) },
		wake: make(chan struct{}, 1), connections: make(map[int]usage),
		nextEvent: func() (transport.Event, bool) { return transport.Event{}, false },
	}
	if prepare != nil {
		prepare(x.inbox)
	}
	drained := make(chan struct{})
	go func() {
		defer close(drained)
		x.finish(x.drain())
	}()
	t.Cleanup(func() {
		socket.Interrupt()
		<-drained
		x.discard()
		if x.usage != (usage{}) || len(x.connections) != 0 || b.Used() != 0 {
			t.Errorf("left: %+v, connections %v, %d bytes of the budget", x.usage, x.connections, b.Used())
		}
		if err := errors.Join(socket.Close(), ends[1].Close(), zctx.Term()); err != nil {
			t.Error(err)
		}
	})
	return x
}

// send sends messages of a topic, with payloads of a size, and waits until all are
// buffered or dropped.
func (x *testInbox) send(topic string, n, size int) {
	x.t.Helper()
	payload := make([]byte, size)
	want := x.arrived() + n
	for range n {
		if _, err := x.sender.SendMessage(topic, make([]byte, 8), payload); err != nil {
			x.t.Fatal(err)
		}
	}
	for deadline := time.Now().Add(testPatience); x.arrived() < want; {
		if time.Now().After(deadline) {
			x.t.Fatalf("%d of %d messages arrived", x.arrived(), want)
		}
	}
}

func (x *testInbox) arrived() int {
	x.order.Lock() // not while messages are being added
	defer x.order.Unlock()
	x.mu.Lock()
	defer x.mu.Unlock()
	return x.usage.messages + int(x.dropped.Load())
}

// read drains the inbox, and returns the number of messages by topic, and the topics dropped
// after them.
func (x *testInbox) read() (got map[string]int, lost *transport.Drops) {
	x.t.Helper()
	got = make(map[string]int)
	for {
		p, err := x.pop()
		if err != nil {
			x.t.Fatal(err)
		}
		if p == nil {
			return got, lost
		}
		for _, m := range p.Messages {
			if m.Count > 0 {
				got[string(m.Frames[0])]++
			}
		}
		if p.Drops != nil {
			lost = p.Drops
		}
		x.Recycle(p)
	}
}

// testPatience bounds each wait of a test.
const testPatience = 2 * time.Minute

func TestInboxDropsWhatDoesNotFit(t *testing.T) {
	t.Parallel()
	reserve := inboxReserve / (512 << 10)
	tests := []struct {
		name           string
		budget         int64
		prepare        func(*inbox)
		messages, size int
		want           int
	}{
		{name: "messages", messages: maxInboxMessages + 500, want: maxInboxMessages},
		{name: "bytes", messages: 200, size: 512 << 10, want: maxInboxBytes / (512 << 10)},
		{name: "bytes of all inboxes", budget: 1 << 20, messages: 10, size: 512 << 10, want: reserve + 1},
		{name: "a connection's share", prepare: func(b *inbox) { b.bound = true }, messages: 4000, want: maxInboxMessages / connectionShare},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			x := newTestInbox(t, budget.New("test", tt.budget), tt.prepare)
			x.send("a\x00suffix", tt.messages, tt.size)
			x.mu.Lock()
			if n := len(x.chunks); n > tt.want+1 {
				t.Errorf("%d chunks for %d messages", n, tt.want)
			}
			x.mu.Unlock()
			got, lost := x.read()
			if n := got["a\x00suffix"]; n < tt.want-tt.want/20 || n > tt.want {
				t.Errorf("%d messages are kept, want %d", n, tt.want)
			}
			if !lost.MayInclude("a") || lost.MayInclude("b") {
				t.Errorf("lost %+v, want topic a", lost)
			}
			x.send("b", 1, 0)
			if got, lost := x.read(); got["b"] != 1 || lost != nil {
				t.Errorf("after all was read: got %v, lost %v", got, lost)
			}
		})
	}
}

// Messages that arrive one by one share the memory of a batch.
func TestInboxFillsBatches(t *testing.T) {
	t.Parallel()
	x := newTestInbox(t, nil, nil)
	for range 3 * batchSize {
		x.send("a", 1, 1)
	}
	x.mu.Lock()
	defer x.mu.Unlock()
	if n := len(x.chunks); n != 3 {
		t.Errorf("%d chunks for %d messages, want 3", n, 3*batchSize)
	}
}

// Connections open and close while messages are received: every message is delivered, none
// before the event of its connection.
func TestInboxKeepsTheOrderOfEventsAndMessages(t *testing.T) {
	t.Parallel()
	const senders, rounds = 4, 50
	zctx, err := zmq4.NewContext()
	if err != nil {
		t.Fatal(err)
	}
	pull, err := zctx.NewSocket(zmq4.PULL)
	if err != nil {
		t.Fatal(err)
	}
	b, err := new(Transport).newReceiver(pull, bindEvents, func(int) { t.Error("messages are dropped") })
	if err != nil {
		t.Fatal(err)
	}
	b.bound, b.nextEvent = true, b.nextOfMany
	if err := errors.Join(pull.SetRcvhwm(0), pull.Bind("tcp://127.0.0.1:*")); err != nil {
		t.Fatal(err)
	}
	address, err := pull.GetLastEndpoint()
	if err != nil {
		t.Fatal(err)
	}
	b.start()
	var sending sync.WaitGroup
	for range senders {
		sending.Go(func() {
			for range rounds {
				s, err := zctx.NewSocket(zmq4.PUSH)
				if err == nil {
					err = errors.Join(s.SetLinger(testPatience), s.Connect(address))
				}
				for i := 0; err == nil && i < 3; i++ {
					_, err = s.SendMessage("a", make([]byte, 8), "p")
				}
				if err = errors.Join(err, s.Close()); err != nil {
					t.Error(err)
				}
			}
		})
	}
	accepted := make(map[int]bool)
	deadline := time.Now().Add(testPatience)
	for n := 0; n < 3*senders*rounds; {
		p, err := b.Next(func() time.Time { return deadline })
		if err != nil {
			t.Fatalf("after %d messages: %v", n, err)
		}
		events := p.Events
		for i, m := range p.Messages {
			for len(events) > 0 && events[0].Before <= i {
				if events[0].Kind == transport.Connected {
					accepted[events[0].Conn] = true
				}
				events = events[1:]
			}
			if !accepted[m.Conn] {
				t.Errorf("message of connection %d, which is not known", m.Conn)
			}
			n++
		}
		for _, e := range events {
			if e.Kind == transport.Connected {
				accepted[e.Conn] = true
			}
		}
		b.Recycle(p)
	}
	sending.Wait()
	if err := errors.Join(b.Close(), zctx.Term()); err != nil {
		t.Error(err)
	}
}

func TestInboxReleasesItsBudget(t *testing.T) {
	t.Parallel()
	b := budget.New("x", 1000)
	box := &inbox{budget: b, pool: new(pool), wake: make(chan struct{}, 1)}
	var chunks []*chunk
	for _, size := range []int{inboxReserve - batchOverhead, 500, 600} {
		c := newChunk(NewBatch(1))
		c.bytes = 1 // not the first message of its chunk
		if len(chunks) == 0 {
			c.bytes = 0
		}
		if box.reserve(c, 0, &transport.Message{Frames: [][]byte{make([]byte, size)}, Count: 1}) {
			chunks = append(chunks, c)
		}
	}
	if len(chunks) != 2 || b.Used() != 500 {
		t.Errorf("%d of 3 messages are admitted, with %d bytes of the budget; want 2 and 500", len(chunks), b.Used())
	}
	for _, c := range chunks {
		box.Recycle(&c.Chunk)
	}
	if b.Used() != 0 {
		t.Errorf("%d bytes of the budget are in use after all was recycled", b.Used())
	}
}
