package ingest

import (
	"errors"
	"os"
	"sync"
	"time"

	"github.com/kvcast/kvcast/ingest/wire"
	"github.com/kvcast/kvcast/internal/budget"
	"github.com/kvcast/kvcast/internal/zmqio"
)

// Bounds of what is received and waits to be processed.
const (
	// maxInboxMessages and maxInboxBytes are those of one socket: as many batches as an
	// engine remembers.
	maxInboxMessages = 10_000
	maxInboxBytes    = 64 << 20
	// peerShare is the part of an inbox that one connection may fill where a socket has
	// several: one that floods leaves room for the others.
	peerShare = 4
	// inboxBatch is how many messages are handed to the reader at most at a time, and
	// batchOverhead about what libzmq's and Go's descriptions of so many take.
	inboxBatch    = 64
	batchOverhead = 32 << 10
	// inboxReserve is what each inbox may hold whatever the others hold: a batch's worth.
	inboxReserve = 2 << 20
	// maxLostTopics is how many topics are remembered of messages that were dropped.
	maxLostTopics = 1024
)

// inbox drains a socket into a bounded buffer, in a goroutine of its own. libzmq must
// never stop reading a connection, which it does at a high-water mark: when such a
// connection then fails, libzmq 4.3 ends the process (assertion _io_error). So its
// sockets have no high-water mark here, and are read whether or not anybody processes
// what comes. What does not fit is dropped, and the topics are handed on in its place:
// the batches are missing, which is repaired like any other gap.
type inbox struct {
	socket *zmqio.Socket
	// monitor is read together with the socket, so that the events of connections and
	// their messages keep their order; nil where somebody else reads it.
	monitor *zmqio.Monitor
	budget  *budget.Budget
	pool    *sync.Pool // of *zmqio.Batch
	// shared reports whether several connections use the socket.
	shared bool
	// onDrop is called with the number of messages dropped.
	onDrop func(n int)

	mu       sync.Mutex // guards all below
	parcels  []*parcel
	messages int
	bytes    int
	perFD    map[int]int // messages by connection, where shared
	err      error       // why draining ended; nil while it goes on
	wake     chan struct{}
	timer    *time.Timer // the reader's
}

// parcel is some messages, and what came between and after them.
type parcel struct {
	events []parcelEvent
	batch  *zmqio.Batch // nil while messages are added, and where there are none
	bytes  int          // counted for it
	// lost are the topics of messages that were dropped, by what stands before a NUL.
	// lostAny reports whether there were more than are remembered.
	lost    map[string]struct{}
	lostAny bool
}

// parcelEvent is what happened to a connection before the message of an index came.
type parcelEvent struct {
	zmqio.Event
	before int
}

func newInbox(s *zmqio.Socket, b *budget.Budget, pool *sync.Pool, onDrop func(int)) *inbox {
	return &inbox{socket: s, budget: b, pool: pool, onDrop: onDrop, wake: make(chan struct{}, 1), perFD: make(map[int]int)}
}

// drain reads the socket until it is interrupted or fails. It is the only user of the
// socket meanwhile.
func (b *inbox) drain() {
	for {
		err := b.socket.Wait()
		interrupted := errors.Is(err, zmqio.ErrInterrupted)
		for more := err == nil || interrupted; more; { // what has come is read all the same
			var failed error
			if more, failed = b.receive(); failed != nil {
				err = failed
			}
		}
		if err != nil {
			b.end(err)
			return
		}
	}
}

// receive takes what there is, up to a batch, and reports whether there may be more.
func (b *inbox) receive() (more bool, err error) {
	batch, had := b.tail()
	_, err = b.socket.ReceiveMore(batch)
	more = err == nil && batch.Full()
	b.put(batch, had)
	return more, err
}

// tail returns a batch with room: the last one, if nobody has taken it yet, so that
// messages that come one by one share a batch.
func (b *inbox) tail() (batch *zmqio.Batch, had int) {
	b.mu.Lock()
	defer b.mu.Unlock()
	if n := len(b.parcels); n > 0 {
		last := b.parcels[n-1]
		if last.batch != nil && !last.losses() && !last.batch.Full() {
			batch, had = last.batch, last.batch.Len()
			last.batch = nil
			return batch, had
		}
	}
	return b.pool.Get().(*zmqio.Batch), 0
}

// put adds the messages of a batch from an index on.
func (b *inbox) put(batch *zmqio.Batch, had int) {
	b.mu.Lock()
	defer b.mu.Unlock()
	var p *parcel
	if had > 0 {
		p = b.parcels[len(b.parcels)-1]
		p.events = b.events(p.events, had)
	} else {
		p = &parcel{events: b.events(nil, 0)}
	}
	dropped := 0
	for i := had; i < batch.Len(); i++ {
		m := batch.Message(i)
		size := 0
		for _, f := range m.Frames {
			size += len(f)
		}
		if p.bytes == 0 {
			size += batchOverhead
		}
		if !b.admit(m.FD, size) {
			p.lose(m)
			batch.Drop(i)
			dropped++
			continue
		}
		p.bytes += size
	}
	if dropped > 0 {
		b.onDrop(dropped)
	}
	p.batch = batch
	if had == 0 {
		b.add(p)
	}
	b.notify()
}

// add appends a parcel. One that holds no messages is merged into losses before it.
func (b *inbox) add(p *parcel) {
	if p.bytes == 0 {
		p.batch.Release()
		b.pool.Put(p.batch)
		p.batch = nil
		if n := len(b.parcels); n > 0 && b.parcels[n-1].losses() && len(p.events) == 0 {
			b.parcels[n-1].merge(p)
			return
		}
		if len(p.events) == 0 && !p.losses() {
			return
		}
	}
	b.parcels = append(b.parcels, p)
}

// note adds what has happened to connections while no messages came.
func (b *inbox) note() {
	b.mu.Lock()
	defer b.mu.Unlock()
	events := b.events(nil, 0)
	if len(events) == 0 {
		return
	}
	if n := len(b.parcels); n > 0 && b.parcels[n-1].bytes == 0 && !b.parcels[n-1].losses() {
		b.parcels[n-1].events = append(b.parcels[n-1].events, events...)
	} else {
		b.parcels = append(b.parcels, &parcel{events: events})
	}
	b.notify()
}

// events appends what the monitor tells, which came before the message of an index. An
// error of the monitor is one of its own reader, which waits for it.
func (b *inbox) events(all []parcelEvent, before int) []parcelEvent {
	for b.monitor != nil {
		e, ok, err := b.monitor.Next()
		if err != nil || !ok {
			break
		}
		if e.Kind == zmqio.Accepted || e.Kind == zmqio.Disconnected {
			all = append(all, parcelEvent{e, before})
		}
	}
	return all
}

// count returns how many messages there are, those dropped included.
func (p *parcel) count() int {
	if p.batch == nil {
		return 0
	}
	return p.batch.Len()
}

// losses reports whether messages were dropped after those of the parcel.
func (p *parcel) losses() bool { return p.lost != nil }

// merge adds the losses of the next parcel.
func (p *parcel) merge(next *parcel) {
	p.lostAny = p.lostAny || next.lostAny
	for topic := range next.lost {
		p.loseTopic(topic)
	}
}

// admit counts a message, and reports whether there is room for it.
func (b *inbox) admit(fd, size int) bool {
	if b.messages >= maxInboxMessages || b.bytes+size > maxInboxBytes ||
		b.shared && b.perFD[fd] >= maxInboxMessages/peerShare {
		return false
	}
	over := max(0, b.bytes+size-inboxReserve) - max(0, b.bytes-inboxReserve)
	if !b.budget.Take(int64(over)) {
		return false
	}
	b.messages++
	b.bytes += size
	if b.shared {
		b.perFD[fd]++
	}
	return true
}

// lose remembers the topic of a message that is dropped.
func (p *parcel) lose(m zmqio.Message) {
	if p.lost == nil {
		p.lost = make(map[string]struct{})
	}
	if len(m.Frames) != messageFrames {
		return // no engine's
	}
	topic, _, _ := wire.CutTopic(m.Frames[0])
	if _, ok := p.lost[string(topic)]; !ok && len(topic) <= maxTopicBytes {
		p.loseTopic(string(topic))
	}
}

func (p *parcel) loseTopic(topic string) {
	if len(p.lost) >= maxLostTopics {
		p.lostAny = true
		return
	}
	p.lost[topic] = struct{}{}
}

// end lets the reader know that no more comes.
func (b *inbox) end(err error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.err = err
	b.notify()
}

func (b *inbox) notify() {
	select {
	case b.wake <- struct{}{}:
	default:
	}
}

// next waits for the next parcel, which goes back by giveBack. Where none comes it
// returns os.ErrDeadlineExceeded once deadline is over, which is asked again whenever
// the time that it returned has come, and is never where it is zero; and the error that
// ended the draining once all has been taken.
func (b *inbox) next(deadline func() time.Time) (*parcel, error) {
	for {
		p, err := b.take()
		if p != nil || err != nil {
			return p, err
		}
		var due <-chan time.Time
		if at := deadline(); !at.IsZero() {
			wait := time.Until(at)
			if wait <= 0 {
				return nil, os.ErrDeadlineExceeded
			}
			if b.timer == nil {
				b.timer = time.NewTimer(wait)
			} else {
				b.timer.Reset(wait)
			}
			due = b.timer.C
		}
		select {
		case <-b.wake:
		case <-due:
		}
	}
}

// take takes the first parcel; nil where there is none, or its batch is being added to.
func (b *inbox) take() (*parcel, error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	if len(b.parcels) == 0 {
		return nil, b.err
	}
	p := b.parcels[0]
	if p.bytes > 0 && p.batch == nil {
		return nil, nil
	}
	b.parcels[0] = nil
	if b.parcels = b.parcels[1:]; len(b.parcels) == 0 {
		b.parcels = nil
	}
	return p, nil
}

// giveBack takes the memory of a parcel back.
func (b *inbox) giveBack(p *parcel) {
	if p.batch == nil {
		return
	}
	b.mu.Lock()
	b.uncount(p)
	b.mu.Unlock()
	p.batch.Release()
	b.pool.Put(p.batch)
	p.batch = nil
}

// uncount forgets the messages of a parcel.
func (b *inbox) uncount(p *parcel) {
	before := b.bytes
	b.bytes -= p.bytes
	b.budget.Release(int64(max(0, before-inboxReserve) - max(0, b.bytes-inboxReserve)))
	for i := range p.batch.Len() {
		m := p.batch.Message(i)
		if m.Count == 0 { // dropped
			continue
		}
		b.messages--
		if !b.shared {
			continue
		}
		if b.perFD[m.FD]--; b.perFD[m.FD] <= 0 {
			delete(b.perFD, m.FD)
		}
	}
}

// discard gives back everything that was not taken. Draining has ended.
func (b *inbox) discard() {
	for {
		p, _ := b.take()
		if p == nil {
			return
		}
		b.giveBack(p)
	}
}
