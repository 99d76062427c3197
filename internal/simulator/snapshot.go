package simulator

import (
	"crypto/rand"
	"encoding/hex"
	"math"
	"slices"

	"github.com/tinylib/msgp/msgp"

	"github.com/kvcast/kvcast/internal/wire"
	"github.com/kvcast/kvcast/internal/zmtp/outbound"
)

// snapshotBatchEvents is the number of events in a batch of a snapshot.
const snapshotBatchEvents = 50

// noSnapshotNow is the seq of an engine that has no snapshot now: -2.
const noSnapshotNow = math.MaxUint64 - 1

// SnapshotFaults are the faults of the answers to requests for snapshots. The zero value has no faults.
type SnapshotFaults struct {
	// NoAnswer leaves requests unanswered.
	NoAnswer bool
	// Unavailable answers that there is no snapshot now.
	Unavailable bool
	// Edit changes the frames of a message of an answer, without the delimiter; nil changes nothing. It is called by
	// the goroutine that owns the sockets.
	Edit func(frames [][]byte) [][]byte
	// Requests is the number of requests with faults; 0 means all. Later requests are answered correctly.
	Requests int
}

// snapshot is what an engine has cached, as its events say. A nil snapshot does nothing.
type snapshot struct {
	blocks map[uint64]*cachedBlock
	order  []uint64 // of the first stores since the last clear: parents before their children
	faults SnapshotFaults
}

// cachedBlock is a block that was stored since the last clear.
type cachedBlock struct {
	store  wire.Event // of the block alone
	copies int
}

// restart empties the cache, and gives the engine another publisher id or epoch.
func (s *snapshot) restart(f *feed) {
	if s == nil {
		return
	}
	*s = snapshot{blocks: make(map[uint64]*cachedBlock)}
	id := make([]byte, wire.PublisherIDBytes)
	_, _ = rand.Read(id) // never fails
	if f.cfg.SnapshotForm == SnapshotSGLang {
		f.epoch = hex.EncodeToString(id)
	} else {
		f.encoder.publisher = id
	}
}

// apply applies the events of a batch.
func (s *snapshot) apply(events []wire.Event) {
	if s == nil {
		return
	}
	for i := range events {
		switch ev := &events[i]; ev.Kind {
		case wire.KindStored:
			s.store(ev)
		case wire.KindRemoved:
			for _, h := range ev.BlockHashes {
				if b := s.blocks[h]; b != nil && b.copies > 0 {
					b.copies--
				}
			}
		case wire.KindCleared:
			clear(s.blocks)
			s.order = nil
		}
	}
}

func (s *snapshot) store(ev *wire.Event) {
	for i, h := range ev.BlockHashes {
		b := s.blocks[h]
		if b == nil {
			b = &cachedBlock{store: *ev}
			b.store.BlockHashes = []uint64{h}
			if n := int(ev.BlockSize); len(ev.Tokens) >= (i+1)*n {
				b.store.Tokens = append([]uint32(nil), ev.Tokens[i*n:(i+1)*n]...)
			}
			if i > 0 {
				b.store.HasParent, b.store.Parent = true, ev.BlockHashes[i-1]
			}
			s.blocks[h] = b
			s.order = append(s.order, h)
		}
		b.copies++
	}
}

// events returns the events that build the cache from nothing: stores, one for each copy, of the cached blocks and
// their evicted ancestors, and removes of the latter.
func (s *snapshot) events() (all []wire.Event) {
	needed := make(map[uint64]bool)
	for h, b := range s.blocks {
		for b != nil && (b.copies > 0 || needed[h]) {
			needed[h] = true
			parent := s.blocks[b.store.Parent]
			if !b.store.HasParent || parent == nil || needed[b.store.Parent] {
				break
			}
			h, b = b.store.Parent, parent
			needed[h] = true
		}
	}
	var removes []wire.Event
	for _, h := range s.order {
		if !needed[h] {
			continue
		}
		b := s.blocks[h]
		for range max(1, b.copies) {
			all = append(all, b.store)
		}
		if b.copies == 0 {
			removes = append(removes, wire.Event{Kind: wire.KindRemoved, BlockHashes: []uint64{h}, Medium: b.store.Medium})
		}
	}
	return append(all, removes...)
}

// makeSnapshot returns the messages that answer a request, without the delimiter.
func (f *feed) makeSnapshot() (messages [][][]byte) {
	s := f.snapshot
	faults := s.faults
	if s.faults.Requests > 0 {
		if s.faults.Requests--; s.faults.Requests == 0 {
			s.faults = SnapshotFaults{}
		}
	}
	if f.cfg.SnapshotForm == SnapshotSGLang {
		messages = f.makeRecords(faults.Unavailable)
	} else {
		messages = [][][]byte{f.makeBatches(faults.Unavailable)}
	}
	switch {
	case faults.NoAnswer:
		return nil
	case faults.Edit != nil:
		for i := range messages {
			messages[i] = faults.Edit(messages[i])
		}
	}
	return messages
}

// makeBatches returns the frames of vLLM's answer.
func (f *feed) makeBatches(unavailable bool) [][]byte {
	if unavailable {
		return [][]byte{outbound.SeqFrame(noSnapshotNow), f.encoder.publisher}
	}
	frames := [][]byte{outbound.SeqFrame(f.next - 1), f.encoder.publisher} // -1 before the first batch
	if f.next == f.encoder.cfg.FirstSeq {
		frames[0] = outbound.SeqFrame(math.MaxUint64)
	}
	events := f.snapshot.events()
	for len(events) > 0 {
		n := min(len(events), snapshotBatchEvents)
		frames, events = append(frames, f.encoder.encode(events[:n])), events[n:]
	}
	return frames
}

// makeRecords publishes a barrier, and returns the messages of SGLang's answer.
func (f *feed) makeRecords(unavailable bool) (messages [][][]byte) {
	message := func(kind string, body []byte) { messages = append(messages, [][]byte{[]byte(kind), body}) }
	if unavailable {
		message("error", []byte("snapshot provider busy"))
		return messages
	}
	barrier := f.add(nil, true)
	id := rand.Text()
	f.publishAs(f.liveTopic()+"\x00sgl-kv-snapshot="+id, barrier.seq, barrier.payload)
	var records [][]byte
	for _, h := range f.snapshot.order {
		b := f.snapshot.blocks[h]
		if b.copies == 0 {
			continue
		}
		r := msgp.AppendArrayHeader(nil, 2)
		if b.store.HasParent {
			r = msgp.AppendUint64(r, b.store.Parent)
		} else {
			r = msgp.AppendNil(r)
		}
		records = append(records, msgp.AppendUint64(msgp.AppendArrayHeader(r, 1), h))
	}
	header := msgp.AppendString(msgp.AppendInt(msgp.AppendArrayHeader(nil, 7), 1), f.epoch)
	header = msgp.AppendUint64(msgp.AppendUint32(header, f.encoder.cfg.Rank), barrier.seq+1)
	header = msgp.AppendInt(msgp.AppendString(msgp.AppendUint64(header, barrier.seq), id), len(records))
	message("header", header)
	for chunk := range slices.Chunk(records, snapshotBatchEvents) {
		body := msgp.AppendArrayHeader(nil, uint32(len(chunk)))
		for _, r := range chunk {
			body = append(body, r...)
		}
		message("chunk", body)
	}
	message("end", nil)
	return messages
}

// serveSnapshot answers a request for a snapshot.
func (s *sockets) serveSnapshot(request outbound.Event) {
	want := map[SnapshotForm]string{SnapshotVLLM: "snapshot", SnapshotSGLang: "snapshot-v1"}[s.cfg.SnapshotForm]
	if len(request.Frames) != 2 || string(request.Frames[1]) != want {
		return
	}
	for _, frames := range s.answerSnapshot() {
		s.snapshots.Send(request.Peer, append([][]byte{nil}, frames...)...)
	}
	s.counters.add(counts{snapshots: 1})
}
