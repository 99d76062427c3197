package recovery

import (
	"context"
	"errors"
	"maps"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/kvcast/kvcast/internal/core/index"
	"github.com/kvcast/kvcast/internal/core/kvblock"
	"github.com/kvcast/kvcast/internal/feed"
	"github.com/kvcast/kvcast/internal/journal"
	"github.com/kvcast/kvcast/internal/journal/jetstream"
	"github.com/kvcast/kvcast/internal/wire"
	"github.com/kvcast/kvcast/pipeline"
	statev1 "github.com/kvcast/kvcast/proto/kvcast/state/v1"
	"github.com/kvcast/kvcast/test/harness"
)

// sharedLog is what is left of the entries of a run: those from first on.
type sharedLog struct {
	*durableJournal
	first uint64
	err   error // of LoadWorker
}

func (l *sharedLog) LoadWorker(_ context.Context, worker string, after, until uint64, each func(jetstream.Entry) error) error {
	for _, e := range l.entries {
		if e.Worker == worker && e.Seq > after && e.Seq <= until && e.Seq >= l.first {
			if err := each(e); err != nil {
				return err
			}
		}
	}
	return l.err
}

func (l *sharedLog) First(context.Context) (uint64, error) { return max(l.first, 1), nil }

func (s *store) Get(_ context.Context, name string) ([]byte, error) {
	if s.damaged[name] {
		return nil, errors.New("the checksum is wrong")
	}
	return s.objects[name], nil
}

// TestWorkerIsRecoveredAtItsClaim has a worker with a checkpoint and an entry after it. Another instance claims it.
func TestWorkerIsRecoveredAtItsClaim(t *testing.T) {
	t.Parallel()
	cfg := pipeline.Config{Durable: true, Shared: true}
	for _, tt := range []struct {
		name   string
		change func(l *sharedLog)
		lost   string // why the state is lost; "": it is not
		log    string
	}{
		{"all is there", func(*sharedLog) {}, "", ""},
		{"entries before the checkpoint are removed", func(l *sharedLog) { l.first = 3 }, "", ""},
		{"no checkpoint", func(l *sharedLog) { clear(l.store.objects) }, "", ""},
		{"the checkpoint is damaged", func(l *sharedLog) { l.store.damaged["worker.a"] = true }, "", "the checksum is wrong"},
		{"neither checkpoint nor entries", func(l *sharedLog) { clear(l.store.objects); l.first = 3 }, "its WorkerAdded is missing", ""},
		{"an entry is missing", func(l *sharedLog) { l.entries = l.entries[:2] }, "routers have events up to 3", ""},
		{"an entry cannot be applied", func(l *sharedLog) { l.entries[2].Body = []byte{0xff} }, "routers have events up to 3", "an entry cannot be applied"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			j := &durableJournal{Memory: journal.NewMemory(journal.Config{}), store: newStore()}
			r := start(t, j)
			r.add("a")
			r.store("a", 100, 5)
			if err := r.Follower.Wait(t.Context(), 2); err != nil {
				t.Fatal(err)
			}
			if err := r.write(t.Context(), "a"); err != nil {
				t.Fatal(err)
			}
			r.store("a", 200, 5)
			r.turn(t)
			l := &sharedLog{durableJournal: j}
			tt.change(l)
			var lines harness.Log
			state, err := Worker(t.Context(), l, j.store, lines.Logger(), r.Follower.Index(), "a", 3, cfg)
			if err != nil {
				t.Fatal(err)
			}
			if !strings.Contains(lines.String(), tt.log) || tt.log == "" && lines.String() != "" {
				t.Errorf("logged %q, want %q", lines.String(), tt.log)
			}
			cause := state.Recovery.Lost()["a"]
			if (cause != nil) != (tt.lost != "") {
				t.Fatalf("lost: got %v, want %q", cause, tt.lost)
			}
			next := journal.NewMemory(journal.Config{})
			p, err := pipeline.New(cfg, next)
			if err != nil {
				t.Fatal(err)
			}
			if err := p.Adopt(state.Recovery); err != nil {
				t.Fatal(err)
			}
			lane := p.AddWorker(feed.Worker{Name: "a", Model: "m"})
			lane.Batch(&feed.Batch{Events: []wire.Event{{Kind: wire.KindRemoved, Tier: kvblock.TierDevice, BlockHashes: []uint64{101, 201}}}})
			c, err := next.Read(t.Context(), journal.Query{MaxBytes: 1 << 20})
			if err != nil {
				t.Fatal(err)
			}
			if want := map[bool]int{false: 1, true: 3}[tt.lost != ""]; c.Entries != want { // the batch, or WorkerRemoved and WorkerAdded before
				t.Errorf("%d entries follow, want %d", c.Entries, want)
			}
		})
	}
}

func TestUnknownWorkersContinueTheirEventIDs(t *testing.T) {
	t.Parallel()
	removed := func(t *testing.T) *durableJournal {
		j := &durableJournal{Memory: journal.NewMemory(journal.Config{}), store: newStore()}
		r := start(t, j)
		r.add("a")
		r.Pipeline.RemoveWorker("a", feed.RemovedDeregistered)
		r.turn(t)
		return j
	}
	for _, tt := range []struct {
		name   string
		worker string
		first  uint64
		floor  uint64
		lastID uint64 // of the worker's next event
	}{
		{"never seen", "b", 1, 0, 1},
		{"removed", "a", 1, 0, 3},
		{"perhaps removed, and its entries too", "a", 3, 4 * eventIDsPerSeq, 4*eventIDsPerSeq + 1},
		{"never seen, and entries are removed", "b", 3, 4 * eventIDsPerSeq, 4*eventIDsPerSeq + 1},
	} {
		t.Run(tt.name, func(t *testing.T) {
			j := removed(t)
			j.store.objects["worker."+tt.worker] = []byte("outdated")
			var lines harness.Log
			state, err := Worker(t.Context(), &sharedLog{durableJournal: j, first: tt.first}, j.store, lines.Logger(), index.New(), tt.worker, 4, pipeline.Config{Durable: true, Shared: true})
			if err != nil {
				t.Fatal(err)
			}
			if state.EventIDFloor != tt.floor {
				t.Errorf("floor: got %d, want %d", state.EventIDFloor, tt.floor)
			}
			next := &durableJournal{Memory: journal.NewMemory(journal.Config{}), store: newStore()}
			p, err := pipeline.New(pipeline.Config{Durable: true, Shared: true}, next)
			if err != nil {
				t.Fatal(err)
			}
			if err := p.Adopt(state.Recovery); err != nil {
				t.Fatal(err)
			}
			if state.EventIDFloor > 0 {
				p.SetEventIDFloor(tt.worker, state.EventIDFloor)
			}
			p.AddWorker(feed.Worker{Name: tt.worker})
			x := index.New()
			if err := x.ApplyBody(1, next.entries[0].Body); err != nil {
				t.Fatal(err)
			}
			if w, _ := x.Worker(tt.worker); w.LastEventID != tt.lastID {
				t.Errorf("event id: got %d, want %d", w.LastEventID, tt.lastID)
			}
		})
	}
}

// TestUnreadableEntriesAreReadAgainLater loses the connection.
func TestUnreadableEntriesAreReadAgainLater(t *testing.T) {
	t.Parallel()
	j := &durableJournal{Memory: journal.NewMemory(journal.Config{}), store: newStore()}
	r := start(t, j)
	r.add("a")
	r.turn(t)
	l := &sharedLog{durableJournal: j, err: errors.New("interrupted")}
	var lines harness.Log
	if _, err := Worker(t.Context(), l, j.store, lines.Logger(), r.Follower.Index(), "a", 1, pipeline.Config{Durable: true}); !errors.Is(err, l.err) {
		t.Errorf("got %v, want %v", err, l.err)
	}
}

// silent is a Getter whose servers do not answer.
type silent struct{}

func (silent) Get(context.Context, string) ([]byte, error) { return nil, jetstream.ErrUnanswered }

func TestUnansweredCheckpointIsReadAgainLater(t *testing.T) {
	t.Parallel()
	j := &durableJournal{Memory: journal.NewMemory(journal.Config{}), store: newStore()}
	r := start(t, j)
	r.add("a")
	r.turn(t)
	var lines harness.Log
	_, err := Worker(t.Context(), &sharedLog{durableJournal: j}, silent{}, lines.Logger(), r.Follower.Index(), "a", 1, pipeline.Config{Durable: true, Shared: true})
	if !errors.Is(err, jetstream.ErrUnanswered) || lines.String() != "" {
		t.Errorf("got error %v, want %v, and log %q", err, jetstream.ErrUnanswered, lines.String())
	}
}

// heartbeats are revisions of instances. That of the instance "live" grows.
type heartbeats map[string]uint64

func (h heartbeats) Revisions(context.Context) (map[string]uint64, error) {
	if _, ok := h["live"]; ok {
		h["live"]++
	}
	if _, ok := h["unanswered"]; ok {
		return nil, jetstream.ErrUnanswered
	}
	return maps.Clone(h), nil
}

// TestJoinDiscardsNothingThatOthersRead has a journal that is unreadable for this instance alone, or for all that is known.
func TestJoinDiscardsNothingThatOthersRead(t *testing.T) {
	for instance, want := range map[string]error{"live": jetstream.ErrUnreadable, "unanswered": jetstream.ErrUnanswered} {
		synctest.Test(t, func(t *testing.T) {
			w := newWorld(t)
			w.checkpoint(t, "a", 5, func(c *statev1.WorkerCheckpoint) { c.IndexUpTo = 99 })
			l := &followedLog{log: w.log, change: func(int) {}}
			err := Join(t.Context(), l, w.store, heartbeats{instance: 1, "dead": 7}, time.Minute, w.lines.Logger(), &w.progress, w.index)
			if !errors.Is(err, want) || w.log.epoch != "e" || len(w.store.objects) != 1 {
				t.Errorf("got %v, epoch %s and %d checkpoints; want %v, and all as before", err, w.log.epoch, len(w.store.objects), want)
			}
		})
	}
}

// TestJoinBeginsAnewIfTheJournalStaysUnreadable has a checkpoint that is newer than the entries, for good or at first.
func TestJoinBeginsAnewIfTheJournalStaysUnreadable(t *testing.T) {
	for _, unreadable := range []int{joinAttempts - 1, joinAttempts} {
		synctest.Test(t, func(t *testing.T) {
			w := newWorld(t)
			w.checkpoint(t, "a", 5, func(c *statev1.WorkerCheckpoint) { c.IndexUpTo = 99 })
			l := &followedLog{log: w.log, change: func(marks int) {
				if marks > unreadable {
					delete(w.store.objects, "worker.a")
				}
			}}
			began := time.Now()
			if err := Join(t.Context(), l, w.store, heartbeats{"dead": 7}, joinWait/2, w.lines.Logger(), &w.progress, w.index); err != nil {
				t.Fatal(err)
			}
			if took := time.Since(began); took != (joinAttempts-1)*joinWait {
				t.Errorf("took %v, want %v", took, (joinAttempts-1)*joinWait)
			}
			want := "e"
			if unreadable == joinAttempts {
				want = "e'"
				w.wantLogged(t, "level=ERROR", "starting with an empty journal and a new epoch")
			}
			if w.log.epoch != want || w.index.Seq() != w.log.newest {
				t.Errorf("epoch %s, index at %d of %d; want epoch %s", w.log.epoch, w.index.Seq(), w.log.newest, want)
			}
		})
	}
}
