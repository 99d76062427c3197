package cluster_test

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/nats-io/nats.go/jetstream"
	"google.golang.org/protobuf/proto"

	kvcastv1 "github.com/kvcast/kvcast/proto/kvcast/v1"
)

// stream is the name of the stream, and subjects are those of its entries.
const (
	stream   = "kvcast"
	subjects = "kvcast." + stream + "."
)

// owners reads the stream as it is stored, and checks who writes: only the owner of a worker does, until it releases the
// worker or another one claims it, and the worker's event ids are contiguous across all owners.
type owners struct {
	mu      sync.Mutex // guards all below
	changed chan struct{}
	first   uint64 // seq of the first entry; a worker may have had events before it unless it is 1
	last    uint64 // seq of the last entry; read writes it
	workers map[string]*worker
	records int
	batches int   // entries that were written with others, which name their writer
	err     error // the first violation
}

// worker is a worker as the stream shows it.
type worker struct {
	owner    string // empty: nobody
	released bool   // to owner, which has not claimed it
	claimed  uint64 // seq of the last claim by another owner than before
	event    uint64 // seq of the last entry with events
	eventID  uint64
}

// readOwners reads the stream from its first entry on, until the test ends. The stream must exist.
func readOwners(t *testing.T, js jetstream.JetStream) *owners {
	t.Helper()
	s, err := js.Stream(t.Context(), stream)
	if err != nil {
		t.Fatal(err)
	}
	first := max(s.CachedInfo().State.FirstSeq, 1)
	o := &owners{changed: make(chan struct{}), workers: make(map[string]*worker), first: first, last: first - 1}
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan struct{})
	t.Cleanup(func() { cancel(); <-done })
	go func() {
		defer close(done)
		for ctx.Err() == nil {
			o.read(ctx, js)
		}
	}()
	return o
}

// readWait is how long the reader waits for entries, and for the NATS servers.
const readWait = time.Second

// read reads entries by a consumer until none come for a while: consumers do not survive each loss of NATS servers.
func (o *owners) read(ctx context.Context, js jetstream.JetStream) {
	creating, cancel := context.WithTimeout(ctx, readWait)
	defer cancel()
	c, err := js.CreateConsumer(creating, stream, jetstream.ConsumerConfig{
		DeliverPolicy: jetstream.DeliverByStartSequencePolicy, OptStartSeq: o.last + 1, AckPolicy: jetstream.AckNonePolicy,
		FilterSubject: subjects + ">", MemoryStorage: true, Replicas: 1, InactiveThreshold: 5 * readWait,
	})
	if err != nil {
		<-creating.Done() // no server answers
		return
	}
	for ctx.Err() == nil {
		batch, err := c.Fetch(1000, jetstream.FetchMaxWait(readWait))
		if err != nil {
			return
		}
		count := 0
		for m := range batch.Messages() {
			count++
			if !o.receive(m) {
				return
			}
		}
		if count == 0 {
			return
		}
	}
}

// receive handles the next entry. It returns false for another one: a consumer that is created while NATS servers start may
// begin elsewhere.
func (o *owners) receive(m jetstream.Msg) bool {
	meta, err := m.Metadata()
	if err != nil || meta.Sequence.Stream != o.last+1 {
		<-time.After(readWait / 10)
		return false
	}
	o.mu.Lock()
	defer o.mu.Unlock()
	if err := o.entry(meta.Sequence.Stream, m); err != nil && o.err == nil {
		o.err = err
	}
	close(o.changed)
	o.changed = make(chan struct{})
	return true
}

func (o *owners) entry(seq uint64, m jetstream.Msg) error {
	o.last = seq
	name := strings.TrimPrefix(m.Subject(), subjects)
	w := o.workers[name]
	if w == nil {
		w = &worker{}
		o.workers[name] = w
	}
	if record := m.Headers().Get("Kvcast-Owner"); record != "" {
		return o.record(seq, name, w, record)
	}
	if w.owner == "" || w.released {
		return fmt.Errorf("entry %d of %s was appended while nobody had claimed it", seq, name)
	}
	if batch := m.Headers().Get("Nats-Batch-Id"); batch != "" {
		o.batches++
		if writer, _, _ := strings.Cut(batch, "-"); writer != w.owner {
			return fmt.Errorf("entry %d of %s was appended by %s; the owner is %s", seq, name, writer, w.owner)
		}
	}
	fields := strings.Split(m.Headers().Get("Kvcast"), " ")
	if len(fields) != 3 {
		return fmt.Errorf("entry %d has header %q", seq, fields)
	}
	state, err := strconv.Atoi(fields[1])
	if err != nil {
		return err
	}
	var e kvcastv1.Entry
	if err := proto.Unmarshal(m.Data()[:len(m.Data())-state], &e); err != nil {
		return fmt.Errorf("entry %d: %w", seq, err)
	}
	for _, ev := range e.GetEvents() {
		if id := ev.GetEventId(); id != w.eventID+1 && (w.eventID > 0 || o.first == 1) {
			return fmt.Errorf("entry %d of %s has event %d after event %d", seq, name, id, w.eventID)
		}
		w.eventID = ev.GetEventId()
		w.event = seq
	}
	return nil
}

func (o *owners) record(seq uint64, name string, w *worker, record string) error {
	o.records++
	owner, writer, _ := strings.Cut(record, " ")
	switch {
	case owner == writer && (owner != w.owner || w.released): // a claim, and not one that is written again
		w.claimed = seq
	case owner != writer && writer != w.owner:
		return fmt.Errorf("entry %d: %s was released by %s; the owner is %s", seq, name, writer, w.owner)
	}
	if owner != writer && w.released {
		return fmt.Errorf("entry %d: %s was released by %s, which has not claimed it", seq, name, writer)
	}
	if owner == "-" {
		owner = ""
	}
	w.owner, w.released = owner, owner != writer && owner != ""
	return nil
}

// all returns the state of all workers, and the seq of the last entry.
func (o *owners) all() (map[string]worker, uint64) {
	o.mu.Lock()
	defer o.mu.Unlock()
	return o.copy(), o.last
}

func (o *owners) copy() map[string]worker {
	all := make(map[string]worker, len(o.workers))
	for name, w := range o.workers {
		all[name] = *w
	}
	return all
}

// until waits until a condition of the workers returns no error.
func (o *owners) until(ctx context.Context, limit time.Duration, condition func(map[string]worker) error) error {
	ctx, cancel := context.WithTimeout(ctx, limit)
	defer cancel()
	for {
		o.mu.Lock()
		failed, all, changed := o.err, o.copy(), o.changed
		o.mu.Unlock()
		if failed != nil {
			return failed
		}
		unmet := condition(all)
		if unmet == nil {
			return nil
		}
		select {
		case <-changed:
		case <-ctx.Done():
			return fmt.Errorf("after %v: %w", limit, unmet)
		}
	}
}

// instances returns the ids of the instances that have sent a heartbeat lately, by process.
func instances(ctx context.Context, js jetstream.JetStream) (map[int]string, error) {
	kv, err := js.KeyValue(ctx, stream+"-instances")
	if errors.Is(err, jetstream.ErrBucketNotFound) {
		return nil, nil
	}
	if err != nil {
		return nil, err
	}
	keys, err := kv.ListKeys(ctx)
	if err != nil {
		return nil, err
	}
	ids := make(map[int]string)
	for id := range keys.Keys() {
		if strings.Contains(id, ".") {
			continue
		}
		value, err := kv.Get(ctx, id)
		if errors.Is(err, jetstream.ErrKeyNotFound) {
			continue
		}
		if err != nil {
			return nil, err
		}
		var h struct{ PID int }
		if err := json.Unmarshal(value.Value(), &h); err != nil {
			return nil, err
		}
		ids[h.PID] = id
	}
	return ids, nil
}
