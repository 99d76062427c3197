package pipeline_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"sync"
	"testing/synctest"
	"time"
	"unsafe"

	"github.com/google/go-cmp/cmp"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/testing/protocmp"

	"github.com/kvcast/kvcast/internal/core/index"
	"github.com/kvcast/kvcast/internal/core/kvblock"
	"github.com/kvcast/kvcast/internal/feed"
	"github.com/kvcast/kvcast/internal/journal"
	"github.com/kvcast/kvcast/internal/wire"
	"github.com/kvcast/kvcast/pipeline"
	kvcastv1 "github.com/kvcast/kvcast/proto/kvcast/v1"
)

// call is one call by ingest. Exactly one field after Worker is set.
type call struct {
	Worker    string
	Add       *feed.Worker
	Batch     *feed.Batch
	Gap       *feed.Gap
	Restarted *feed.Restart
	Remove    feed.RemoveReason
	Pass      time.Duration
	Close     bool
}

// target receives calls: the pipeline or its model.
type target interface {
	add(feed.Worker)
	batch(worker string, b feed.Batch)
	gap(worker string, g feed.Gap)
	restarted(worker string, r feed.Restart)
	remove(worker string, reason feed.RemoveReason)
	pass(time.Duration)
	close()
}

func (c call) on(t target) {
	switch {
	case c.Add != nil:
		t.add(*c.Add)
	case c.Batch != nil:
		t.batch(c.Worker, *c.Batch)
	case c.Gap != nil:
		t.gap(c.Worker, *c.Gap)
	case c.Restarted != nil:
		t.restarted(c.Worker, *c.Restarted)
	case c.Remove != 0:
		t.remove(c.Worker, c.Remove)
	case c.Pass != 0:
		t.pass(c.Pass)
	case c.Close:
		t.close()
	}
}

// recorder is a journal that decodes its records, and checks that their bytes equal the
// encoding by proto.Marshal.
type recorder struct {
	index   *index.Index // has applied all records
	mu      sync.Mutex   // guards the fields below
	entries map[string][]*kvcastv1.Entry
	errs    []error
}

func newRecorder() *recorder {
	return &recorder{index: index.New(), entries: make(map[string][]*kvcastv1.Entry)}
}

func (r *recorder) Append(_ context.Context, rec journal.Record) (none journal.Pending, _ error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	var e kvcastv1.Entry
	if err := proto.Unmarshal(rec.Body, &e); err != nil {
		r.errs = append(r.errs, fmt.Errorf("decode a record: %w", err))
		return none, nil
	}
	again, err := proto.MarshalOptions{Deterministic: true}.Marshal(&e)
	if err != nil {
		r.errs = append(r.errs, fmt.Errorf("encode a record again: %w", err))
	}
	if !bytes.Equal(again, rec.Body) { // cmp.Diff is slow where nothing differs
		r.errs = append(r.errs, fmt.Errorf("record is not what proto.Marshal gives (-want +got):\n%s", cmp.Diff(again, rec.Body)))
	}
	var tiers kvblock.Tiers
	for _, ev := range e.GetEvents() {
		tiers |= kvblock.TierBit(uint8(ev.GetTier()))
	}
	if rec.Tiers != tiers || rec.Source.Worker != e.GetWorker() || rec.Source.Model != e.GetModel() {
		r.errs = append(r.errs, fmt.Errorf("record of %+v and tiers %b has %v", rec.Source, rec.Tiers, &e))
	}
	r.entries[e.GetWorker()] = append(r.entries[e.GetWorker()], &e)
	r.index.ApplyEntry(&e)
	return none, nil
}

// all returns the entries so far by worker.
func (r *recorder) all() map[string][]*kvcastv1.Entry {
	r.mu.Lock()
	defer r.mu.Unlock()
	return maps.Clone(r.entries)
}

// removedBy returns the blocks that an event removes.
func (r *recorder) removedBy(worker string, eventID uint64) []uint64 {
	for _, entry := range r.all()[worker] {
		for _, e := range entry.GetEvents() {
			if e.GetEventId() == eventID {
				return e.GetRemoved().GetBlockHashes()
			}
		}
	}
	return nil
}

// err describes the invalid records.
func (r *recorder) err() error {
	r.mu.Lock()
	defer r.mu.Unlock()
	return errors.Join(r.errs...)
}

// check describes invalid records, or the difference from the entries wanted by worker; ""
// if there is none.
func (r *recorder) check(want map[string][]*kvcastv1.Entry) string {
	if err := r.err(); err != nil {
		return err.Error()
	}
	if diff := cmp.Diff(want, r.all(), protocmp.Transform()); diff != "" {
		return "entries (-want +got):\n" + diff
	}
	return ""
}

// subject is a pipeline under test. It overwrites the memory passed to a call as soon as the
// call returns.
type subject struct {
	pipeline *pipeline.Pipeline
	lanes    map[string]feed.Lane
	journal  *recorder
}

func newSubject(cfg pipeline.Config) (*subject, error) {
	j := newRecorder()
	p, err := pipeline.New(cfg, j)
	return &subject{pipeline: p, lanes: make(map[string]feed.Lane), journal: j}, err
}

func (s *subject) add(w feed.Worker) { s.lanes[w.Name] = s.pipeline.AddWorker(w) }

func (s *subject) remove(worker string, reason feed.RemoveReason) {
	s.pipeline.RemoveWorker(worker, reason)
	delete(s.lanes, worker)
}

func (s *subject) gap(worker string, g feed.Gap)           { s.lanes[worker].Gap(g) }
func (s *subject) restarted(worker string, r feed.Restart) { s.lanes[worker].Restarted(r) }
func (s *subject) close() {
	if err := s.pipeline.Close(context.Background()); err != nil {
		panic(err)
	}
}

// pass needs a synctest bubble.
func (*subject) pass(d time.Duration) {
	<-time.After(d)
	synctest.Wait()
}

func (s *subject) batch(worker string, b feed.Batch) {
	b.Events = slices.Clone(b.Events)
	var scribble []func()
	lend := func(s string) string {
		if s == "" {
			return ""
		}
		b := []byte(s)
		scribble = append(scribble, func() { fill(b, '!') })
		return unsafe.String(&b[0], len(b))
	}
	for i := range b.Events {
		e := &b.Events[i]
		e.BlockHashes = slices.Clone(e.BlockHashes)
		e.TokensHashes = slices.Clone(e.TokensHashes)
		e.Tokens = slices.Clone(e.Tokens)
		e.LoRAName = lend(e.LoRAName)
		e.CacheSalt = lend(e.CacheSalt)
	}
	s.lanes[worker].Batch(&b)
	for i := range b.Events {
		fill(b.Events[i].BlockHashes, 0xdead)
		fill(b.Events[i].TokensHashes, 0xdead)
		fill(b.Events[i].Tokens, 0xdead)
	}
	for _, f := range scribble {
		f()
	}
	fill(b.Events, wire.Event{})
}

func fill[T any](s []T, v T) {
	for i := range s {
		s[i] = v
	}
}
