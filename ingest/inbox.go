package ingest

import (
	"errors"
	"maps"
	"os"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/kvcast/kvcast/ingest/config"
	"github.com/kvcast/kvcast/ingest/transport"
	"github.com/kvcast/kvcast/ingest/wire"
	"github.com/kvcast/kvcast/internal/budget"
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
	// maxLostTopics is how many topics are remembered of messages that were dropped; of
	// the others the connections are, which are no more than file descriptors.
	maxLostTopics = 1024
)

// inbox drains a socket into a bounded buffer, in a goroutine of its own. libzmq must
// never stop reading a connection, which it does at a high-water mark: when such a
// connection then fails, libzmq 4.3 ends the process (assertion _io_error). So its
// sockets have no high-water mark here, and are read whether or not anybody processes
// what comes. What does not fit is dropped, and the topics are handed on in its place:
// the batches are missing, which is repaired like any other gap.
type inbox struct {
	socket *transport.Socket
	// monitor is read together with the socket, so that the events of connections and
	// their messages keep their order; nil where somebody else reads it.
	monitor *transport.Monitor
	budget  *budget.Budget
	pool    *sync.Pool // of *transport.Batch
	// shared reports whether several connections use the socket.
	shared bool
	// onDrop is called with the number of messages dropped.
	onDrop func(n int)

	// What waits, of which the drain adds and the reader takes away. They share no lock
	// for it: a drain that never rests would keep the reader from its turn.
	messages atomic.Int64
	bytes    atomic.Int64
	byFD     map[int]*share // by connection, where shared; the drain's

	order sync.Mutex // held from receiving messages, or events, until they are added; before mu
	mu    sync.Mutex // guards all below, for as short as can be
	// parcels are those that wait, the first to be taken next.
	parcels []*parcel
	err     error // why draining ended; nil while it goes on
	wake    chan struct{}
	timer   *time.Timer // the reader's
}

// parcel is some messages, and what came between and after them.
type parcel struct {
	events []parcelEvent
	batch  *transport.Batch // nil where there are no messages
	away   bool             // messages are being added
	// messages, bytes and byFD are what is counted for it.
	messages, bytes int64
	byFD            map[*share]*counted
	// lost are the topics of messages that were dropped, by what stands before a NUL,
	// and the connections that they came by. lostBy are the connections whose topics were
	// more than are remembered.
	lost   map[string]int
	lostBy map[int]struct{}
}

// share is what waits of one connection.
type share struct{ messages, bytes atomic.Int64 }

// counted is the part of a share that a parcel has.
type counted struct{ messages, bytes int64 }

// parcelEvent is what happened to a connection before the message of an index came.
type parcelEvent struct {
	transport.Event
	before int
}

func newInbox(s *transport.Socket, b *budget.Budget, pool *sync.Pool, onDrop func(int)) *inbox {
	return &inbox{socket: s, budget: b, pool: pool, onDrop: onDrop, wake: make(chan struct{}, 1), byFD: make(map[int]*share)}
}

// drain reads the socket until it is interrupted or fails. It is the only user of the
// socket meanwhile.
func (b *inbox) drain() {
	for {
		err := b.socket.Wait()
		interrupted := errors.Is(err, transport.ErrInterrupted)
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
	b.order.Lock()
	defer b.order.Unlock()
	p, batch := b.tail()
	had := batch.Len()
	_, err = b.socket.ReceiveMore(batch)
	more = err == nil && batch.Full()
	b.put(p, batch, had)
	return more, err
}

// tail returns a batch with room: that of the last parcel, if nobody has taken it yet,
// so that messages that come one by one share a batch; else an empty one, and nil.
func (b *inbox) tail() (*parcel, *transport.Batch) {
	b.mu.Lock()
	defer b.mu.Unlock()
	if n := len(b.parcels); n > 0 {
		if last := b.parcels[n-1]; last.batch != nil && !last.losses() && !last.batch.Full() {
			last.away = true
			return last, last.batch
		}
	}
	return nil, b.pool.Get().(*transport.Batch)
}

// put adds the messages of a batch from an index on, to the parcel that it is of or a
// new one.
func (b *inbox) put(p *parcel, batch *transport.Batch, had int) {
	there := p != nil
	if !there {
		p = &parcel{}
	}
	p.events = b.events(p.events, had)
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
		if !b.admit(p, m.FD, int64(size)) {
			p.lose(m)
			batch.Drop(i)
			dropped++
		}
	}
	if dropped > 0 {
		b.onDrop(dropped)
	}
	b.add(p, batch, there)
}

// add gives a parcel its batch, and appends it unless it is there. One that holds no
// messages is merged into losses before it.
func (b *inbox) add(p *parcel, batch *transport.Batch, there bool) {
	if p.messages == 0 {
		batch.Release()
		b.pool.Put(batch)
		batch = nil
	}
	b.mu.Lock()
	defer b.mu.Unlock()
	p.batch, p.away = batch, false
	n := len(b.parcels)
	switch {
	case there:
	case p.messages > 0, len(p.events) > 0:
		b.parcels = append(b.parcels, p)
	case n > 0 && b.parcels[n-1].losses():
		b.parcels[n-1].merge(p)
		return
	case p.losses():
		b.parcels = append(b.parcels, p)
	default:
		return
	}
	b.notify()
}

// note adds what has happened to connections while no messages came.
func (b *inbox) note() {
	b.order.Lock()
	defer b.order.Unlock()
	events := b.events(nil, 0)
	if len(events) == 0 {
		return
	}
	b.mu.Lock()
	defer b.mu.Unlock()
	if n := len(b.parcels); n > 0 && b.parcels[n-1].messages == 0 && !b.parcels[n-1].losses() {
		b.parcels[n-1].events = append(b.parcels[n-1].events, events...)
	} else {
		b.parcels = append(b.parcels, &parcel{events: events})
	}
	b.notify()
}

// events appends the connection events that the monitor has, which happened before the
// message at index before. A monitor's error is left to the monitor's own reader.
func (b *inbox) events(all []parcelEvent, before int) []parcelEvent {
	for b.monitor != nil {
		e, ok, err := b.monitor.Next()
		if err != nil || !ok {
			break
		}
		if e.Kind == transport.Accepted || e.Kind == transport.Disconnected {
			all = append(all, parcelEvent{e, before})
		}
	}
	return all
}

// size returns how many messages there are, those dropped included.
func (p *parcel) size() int {
	if p.batch == nil {
		return 0
	}
	return p.batch.Len()
}

// losses reports whether messages were dropped after those of the parcel.
func (p *parcel) losses() bool { return p.lost != nil }

// merge adds the losses of the next parcel.
func (p *parcel) merge(next *parcel) {
	for fd := range next.lostBy {
		p.loseBy(fd)
	}
	for topic, fd := range next.lost {
		p.loseTopic(topic, fd)
	}
}

// admit counts a message for a parcel, and reports whether there is room for it.
func (b *inbox) admit(p *parcel, fd int, size int64) bool {
	if b.messages.Load() >= maxInboxMessages || b.bytes.Load()+size > maxInboxBytes {
		return false
	}
	var of *share
	if b.shared {
		of = b.ofFD(fd)
		if of.messages.Load() >= maxInboxMessages/peerShare || of.bytes.Load()+size > maxInboxBytes/peerShare {
			return false
		}
	}
	after := b.bytes.Add(size)
	over := beyondReserve(after) - beyondReserve(after-size)
	if !b.budget.Take(over) {
		// The reader may have taken away from it meanwhile: what it has released of this
		// message was not taken.
		after = b.bytes.Add(-size)
		b.budget.Release(beyondReserve(after+size) - beyondReserve(after) - over)
		return false
	}
	b.messages.Add(1)
	p.messages++
	p.bytes += size
	if of != nil {
		of.messages.Add(1)
		of.bytes.Add(size)
		p.count(of, size)
	}
	return true
}

// count adds a message to what the parcel has of a share.
func (p *parcel) count(of *share, size int64) {
	if p.byFD == nil {
		p.byFD = make(map[*share]*counted)
	}
	n := p.byFD[of]
	if n == nil {
		n = new(counted)
		p.byFD[of] = n
	}
	n.messages++
	n.bytes += size
}

// beyondReserve is the part of an inbox's bytes that counts for the budget of all.
func beyondReserve(bytes int64) int64 { return max(0, bytes-inboxReserve) }

// ofFD returns the counter of a connection. Those that count nothing are forgotten now
// and then.
func (b *inbox) ofFD(fd int) *share {
	n := b.byFD[fd]
	if n == nil {
		if len(b.byFD) >= maxLostTopics {
			maps.DeleteFunc(b.byFD, func(_ int, n *share) bool { return n.messages.Load() == 0 })
		}
		n = new(share)
		b.byFD[fd] = n
	}
	return n
}

// lose remembers the topic of a message that is dropped.
func (p *parcel) lose(m transport.Message) {
	if p.lost == nil {
		p.lost = make(map[string]int)
	}
	if len(m.Frames) != messageFrames {
		return // no engine's
	}
	topic, _, _ := wire.CutTopic(m.Frames[0])
	if _, ok := p.lost[string(topic)]; !ok && len(topic) <= config.MaxTopicBytes {
		p.loseTopic(string(topic), m.FD)
	}
}

func (p *parcel) loseTopic(topic string, fd int) {
	if len(p.lost) >= maxLostTopics {
		p.loseBy(fd)
		return
	}
	p.lost[topic] = fd
}

func (p *parcel) loseBy(fd int) {
	if p.lostBy == nil {
		p.lostBy = make(map[int]struct{})
	}
	p.lostBy[fd] = struct{}{}
}

// losesOf reports whether a message of a topic may have been dropped, whose publisher
// was read by these connections, as far as is known.
func (p *parcel) losesOf(topic string, by ...int) bool {
	if _, ok := p.lost[topic]; ok {
		return true
	}
	return slices.ContainsFunc(by, func(fd int) bool { _, ok := p.lostBy[fd]; return ok })
}

// end records why draining ended, and wakes the reader.
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
// returns os.ErrDeadlineExceeded when the time that deadline returns has passed; a zero
// time means no deadline. Once draining has ended and all parcels were taken, it returns
// the error that ended it.
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
	if p.away {
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
	p.batch.Release()
	b.pool.Put(p.batch)
	p.batch = nil
	after := b.bytes.Add(-p.bytes)
	b.budget.Release(beyondReserve(after+p.bytes) - beyondReserve(after))
	b.messages.Add(-p.messages)
	for of, n := range p.byFD {
		of.bytes.Add(-n.bytes)
		of.messages.Add(-n.messages)
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
