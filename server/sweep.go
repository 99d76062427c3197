package server

import (
	"context"
	"errors"
	"net/netip"
	"sync"
	"sync/atomic"
	"time"

	"google.golang.org/grpc/mem"
	"google.golang.org/protobuf/encoding/protowire"
	"google.golang.org/protobuf/proto"

	"github.com/kvcast/kvcast/internal/core/index"
	kvcastv1 "github.com/kvcast/kvcast/proto/kvcast/v1"
	"github.com/kvcast/kvcast/server/internal/admission"
)

const (
	// sweepBytes bounds the encoded messages that a sweep keeps for the streams that have not sent them.
	sweepBytes = 16 << 20
	// sweepOpenFor is how long streams may join a sweep of all workers after it has begun.
	sweepOpenFor = time.Second
	// sweepPatience is how long a sweep waits for the slowest streams while others have sent everything.
	sweepPatience = time.Second
	// maxSweepKey bounds the filters, in bytes, whose streams share sweeps.
	maxSweepKey = 1 << 10
)

// errTooSlowToShare means that a stream has held up the other streams of its sweep.
var errTooSlowToShare = errors.New("slower than the other streams of the sweep")

// sweep is one pass over the index, which encodes a snapshot once for all streams that want the same at the same time:
//
//  1. The first stream begins it. It waits for a slot; other streams with the same filter join meanwhile. A sweep of all
//     workers may be joined for a second after its begin, while it has all its messages.
//  2. It encodes one message after the other. Each is kept until all streams have sent it, within sweepBytes.
//  3. If some streams hold it up while another has sent everything, it goes on without them.
//  4. The slot is released when all streams have left.
//
// Its methods are safe for concurrent use.
type sweep struct {
	server *Server
	key    string
	filter *filter
	// begun is closed when the sweep has a slot, or failed. begin is the newest seq then.
	begun chan struct{}
	begin uint64
	// included are the last seqs that workers' blocks include, by worker. Streams read it at the end of the messages.
	included map[string]uint64

	mu      sync.Mutex    // guards all below
	changed chan struct{} // closed at the next change
	streams map[*sweepStream]struct{}
	parts   []sweepPart // the first has the number first
	first   int
	bytes   int  // of parts
	open    bool // streams may join
	ended   bool
	err     error // why it ended early
	cancel  context.CancelFunc
}

// sweepPart is an encoded SubscribeResponse.
type sweepPart struct {
	message mem.BufferSlice
	bytes   int
	left    int // streams that have not taken it
}

// sweepStream is a stream that reads a sweep.
type sweepStream struct {
	*sweep
	at   int  // number of the next part
	slow bool // the sweep goes on without it
}

// snapshots are those of Snapshot and Subscribe streams.
type snapshots struct {
	slots            *admission.Limiter // of sweeps
	sweeps           sweeps
	waiting, sending atomic.Int64 // streams that wait for a sweep, and that send one
}

// sweeps are those that streams may join, by key.
type sweeps struct {
	mu  sync.Mutex
	all map[string]*sweep
}

// sweepKey returns a key that is the same for streams with the same filter, and empty without a filter; ok is false if the filter is
// too large to be compared.
func sweepKey(f *kvcastv1.Filter) (key string, ok bool) {
	if proto.Size(f) > maxSweepKey {
		return "", false
	}
	b, err := proto.MarshalOptions{Deterministic: true}.Marshal(f)
	return string(b), err == nil
}

// joinSweep returns a stream of a new sweep, which waits among those of the address, or of one that was begun for the same filter, if shared. The caller
// calls leave.
func (s *Server) joinSweep(address netip.Prefix, f *filter, key string, shared bool) *sweepStream {
	x := &s.snapshots.sweeps
	x.mu.Lock()
	defer x.mu.Unlock()
	if w := x.all[key]; shared && w != nil && w.retained() {
		if m := w.join(); m != nil {
			return m
		}
	}
	ctx, cancel := context.WithCancel(context.Background())
	w := &sweep{
		server: s, key: key, filter: &filter{workers: f.workers, models: f.models, tiers: f.tiers}, begun: make(chan struct{}), included: make(map[string]uint64),
		changed: make(chan struct{}), streams: make(map[*sweepStream]struct{}), open: true, cancel: cancel,
	}
	m := w.join()
	if shared {
		if x.all == nil {
			x.all = make(map[string]*sweep)
		}
		x.all[key] = w
	} else {
		w.open = false
	}
	go w.run(ctx, address)
	return m
}

// retained reports whether the journal still has the entries that streams need after the sweep.
func (w *sweep) retained() bool {
	select {
	case <-w.begun:
		return w.begin+1 >= w.server.journal.Bounds().Oldest
	default:
		return true
	}
}

// join returns another stream; nil if the sweep is not open.
func (w *sweep) join() *sweepStream {
	w.mu.Lock()
	defer w.mu.Unlock()
	if !w.open {
		return nil
	}
	m := &sweepStream{sweep: w}
	w.streams[m] = struct{}{}
	for i := range w.parts {
		w.parts[i].left++
	}
	return m
}

// leave ends the stream's use of the sweep.
func (m *sweepStream) leave() {
	w := m.sweep
	w.mu.Lock()
	w.remove(m)
	w.trim()
	w.wake()
	abandoned := len(w.streams) == 0
	w.mu.Unlock()
	select {
	case <-w.begun:
	default:
		if abandoned {
			w.close() // it gives up its place in the queue
		}
	}
}

// remove removes a stream. The caller holds the mutex, and calls trim and wake.
func (w *sweep) remove(m *sweepStream) {
	if _, ok := w.streams[m]; !ok {
		return
	}
	delete(w.streams, m)
	for i := m.at - w.first; i < len(w.parts); i++ {
		w.parts[i].left--
	}
	if len(w.streams) == 0 && !w.open {
		w.cancel()
	}
}

// close ends the time in which streams may join.
func (w *sweep) close() {
	x := &w.server.snapshots.sweeps
	x.mu.Lock()
	if x.all[w.key] == w {
		delete(x.all, w.key)
	}
	x.mu.Unlock()
	w.mu.Lock()
	defer w.mu.Unlock()
	w.open = false
	if len(w.streams) == 0 {
		w.cancel()
	}
	w.trim()
	w.wake()
}

// trim drops the parts that all streams have taken, unless others may join.
func (w *sweep) trim() {
	for len(w.parts) > 0 && w.parts[0].left == 0 && !w.open {
		w.parts[0].message.Free()
		w.bytes -= w.parts[0].bytes
		w.parts[0] = sweepPart{}
		w.parts, w.first = w.parts[1:], w.first+1
	}
}

// wake wakes all that wait for a change. The caller holds the mutex.
func (w *sweep) wake() {
	close(w.changed)
	w.changed = make(chan struct{})
}

// failure returns why the sweep ended early; nil if it has not.
func (w *sweep) failure() error {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.err
}

// next returns the next message, of which the caller frees one reference, or which it sends; nil at the end.
func (m *sweepStream) next(ctx context.Context) (message mem.BufferSlice, err error) {
	w := m.sweep
	w.mu.Lock()
	defer w.mu.Unlock()
	for {
		switch i := m.at - w.first; {
		case m.slow:
			return nil, errTooSlowToShare
		case i < len(w.parts):
			p := &w.parts[i]
			m.at++
			p.left--
			message = p.message
			message.Ref()
			w.trim()
			w.wake()
			return message, nil
		case w.ended:
			return nil, w.err
		}
		changed := w.changed
		w.mu.Unlock()
		select {
		case <-changed:
		case <-ctx.Done():
		}
		w.mu.Lock()
		if err := ctx.Err(); err != nil {
			return nil, context.Cause(ctx)
		}
	}
}

// run waits for a slot, encodes the messages, and releases the slot when all streams have left.
func (w *sweep) run(ctx context.Context, address netip.Prefix) {
	if err := w.server.snapshots.slots.Acquire(ctx, address); err != nil {
		w.close()
		w.end(err)
		close(w.begun)
		return
	}
	defer w.server.snapshots.slots.Release(address)
	w.begin = w.server.journal.Bounds().Newest
	close(w.begun)
	if w.key == "" {
		time.AfterFunc(sweepOpenFor, w.close)
	} else {
		w.close()
	}
	w.end(w.server.recoverPanic(ctx, w.encode))
	w.mu.Lock()
	defer w.mu.Unlock()
	for len(w.streams) > 0 {
		changed := w.changed
		w.mu.Unlock()
		<-changed
		w.mu.Lock()
	}
}

// end ends the messages.
func (w *sweep) end(err error) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.ended, w.err = true, err
	w.wake()
}

// encode encodes the messages of all workers.
func (w *sweep) encode(ctx context.Context) error {
	workers, _ := w.server.index.Workers(w.filter.worker)
	for i := range workers {
		name := workers[i].Name
		snapshot, ok := w.server.index.Snapshot(name)
		if !ok || !w.filter.worker(name, snapshot.Worker.GetAdded().GetModel()) {
			continue // an entry after begin removed or replaced the worker
		}
		if err := w.encodeWorker(ctx, &snapshot); err != nil {
			return err
		}
		w.included[name] = snapshot.Seq
	}
	return nil
}

func (w *sweep) encodeWorker(ctx context.Context, s *index.Snapshot) error {
	b, err := proto.Marshal(&kvcastv1.SubscribeResponse{SnapshotWorker: s.Worker})
	if err != nil {
		return err
	}
	if err := w.push(ctx, mem.BufferSlice{mem.SliceBuffer(b)}); err != nil {
		return err
	}
	for blocks := range s.Blocks(ctx, w.filter.tiers) {
		head := protowire.AppendTag(nil, kvcastv1.ResponseSnapshotBlocksField, protowire.BytesType)
		head = protowire.AppendVarint(head, uint64(len(blocks)))
		if err := w.push(ctx, mem.BufferSlice{mem.SliceBuffer(head), mem.NewBuffer(&blocks, recycler(s.Reuse))}); err != nil {
			return err
		}
	}
	return ctx.Err()
}

// push adds a message, after streams have sent earlier ones if there is no room. It returns an error if no stream is left.
func (w *sweep) push(ctx context.Context, message mem.BufferSlice) error {
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.bytes >= sweepBytes {
		w.mu.Unlock()
		w.close() // what all streams have sent makes room
		w.mu.Lock()
		w.makeRoom(ctx)
	}
	if err := ctx.Err(); err != nil {
		message.Free()
		return err
	}
	w.parts = append(w.parts, sweepPart{message: message, bytes: message.Len(), left: len(w.streams)})
	w.bytes += message.Len()
	w.wake()
	return nil
}

// makeRoom waits until streams have sent the first messages. Streams that are slow while another has sent everything are removed.
func (w *sweep) makeRoom(ctx context.Context) {
	patience := time.NewTimer(sweepPatience)
	defer patience.Stop()
	for w.bytes >= sweepBytes {
		changed := w.changed
		w.mu.Unlock()
		select {
		case <-changed:
			w.mu.Lock()
		case <-ctx.Done():
			w.mu.Lock()
			return
		case <-patience.C:
			w.mu.Lock()
			w.removeSlow()
			patience.Reset(sweepPatience)
		}
	}
}

// removeSlow removes the streams that have sent less than half of the kept messages, if another has sent all.
func (w *sweep) removeSlow() {
	head := w.first + len(w.parts)
	var slow []*sweepStream
	fast := false
	for m := range w.streams {
		switch {
		case m.at == head:
			fast = true
		case m.at < head-len(w.parts)/2:
			slow = append(slow, m)
		}
	}
	if !fast {
		return
	}
	for _, m := range slow {
		m.slow = true
		w.remove(m)
	}
	w.trim()
	w.wake()
}
