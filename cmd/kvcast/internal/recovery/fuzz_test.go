package recovery

import (
	"bytes"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"google.golang.org/protobuf/proto"

	ingestconfig "github.com/kvcast/kvcast/ingest/config"
	"github.com/kvcast/kvcast/internal/core/index"
	"github.com/kvcast/kvcast/internal/feed"
	statev1 "github.com/kvcast/kvcast/proto/kvcast/state/v1"
	kvcastv1 "github.com/kvcast/kvcast/proto/kvcast/v1"
)

// FuzzObject recovers from a journal of workers a and b, and an object in the store. One that cannot be read is reported, and
// changes nothing else. One that can changes no other worker.
func FuzzObject(f *testing.F) {
	x := index.New() // has worker a as after entry 3
	for i, ev := range []*kvcastv1.RouterEvent{
		{EventId: 1, Event: &kvcastv1.RouterEvent_WorkerAdded{WorkerAdded: &kvcastv1.WorkerAdded{Model: "m", Ranks: []uint32{0}}}},
		{EventId: 2, DpRank: proto.Uint32(0), Tier: kvcastv1.Tier_TIER_DEVICE, Event: &kvcastv1.RouterEvent_Stored{
			Stored: &kvcastv1.Stored{BlockHashes: []uint64{10}, TokensHashes: []uint64{11}},
		}},
	} {
		x.ApplyEntry(&kvcastv1.Entry{Seq: uint64(1 + 2*i), Worker: "a", Model: "m", Events: []*kvcastv1.RouterEvent{ev}})
	}
	for _, change := range []func(*statev1.WorkerCheckpoint){
		func(*statev1.WorkerCheckpoint) {},
		func(c *statev1.WorkerCheckpoint) { c.IndexUpTo = 5 },
		func(c *statev1.WorkerCheckpoint) { c.IndexUpTo = 6 },
		func(c *statev1.WorkerCheckpoint) { c.PipelineSeq = 4 },
		func(c *statev1.WorkerCheckpoint) { c.Worker = "b" },
		func(c *statev1.WorkerCheckpoint) { c.Index.Worker.Worker, c.Index.Blocks = "v", nil },
		func(c *statev1.WorkerCheckpoint) { c.Index = nil },
		func(c *statev1.WorkerCheckpoint) { c.Version = 2 },
		func(c *statev1.WorkerCheckpoint) { c.Pipeline = []byte("bad") },
		func(c *statev1.WorkerCheckpoint) {
			c.Index.Blocks[0] = bytes.Replace(c.Index.Blocks[0], []byte("a"), []byte("b"), 1)
		},
		func(c *statev1.WorkerCheckpoint) { c.Worker, c.Index.Worker.Worker = "c", "c" },
		func(c *statev1.WorkerCheckpoint) { c.Worker, c.Index.Worker.Worker, c.Index.Blocks = "c", "c", nil },
	} {
		state, _, ok := x.Checkpoint(f.Context(), "a")
		if !ok {
			f.Fatal("there is no checkpoint")
		}
		c := &statev1.WorkerCheckpoint{Version: version, Worker: "a", Pipeline: []byte("of a"), PipelineSeq: 3, IndexSeq: 3,
			IndexUpTo: 3, Index: state}
		change(c)
		data, err := proto.Marshal(c)
		if err != nil {
			f.Fatal(err)
		}
		f.Add(workerPrefix+"a", data)
		f.Add(workerPrefix+"c", data)
	}
	f.Add(removedName, []byte("of removed workers"))
	f.Add(removedName, []byte("bad"))
	f.Add("another", []byte("x"))
	registration, err := encodeRegistration(ingestconfig.Worker{Name: "w", Sources: []ingestconfig.Source{{Connect: "tcp://h:1"}}})
	if err != nil {
		f.Fatal(err)
	}
	f.Add(registrationPrefix+"w", registration)
	f.Add(registrationPrefix+"v", registration)
	f.Fuzz(func(t *testing.T, name string, data []byte) {
		if name == "" {
			t.Skip("objects have names")
		}
		w := newWorld(t)
		w.store.objects[name] = data
		workers := w.recover(t)
		if w.log.epoch != "e" { // the checkpoint is newer than the journal, which has lost entries
			if n, _ := w.index.Len(); n != 0 || w.index.Seq() != 5 || len(w.store.objects) != 0 {
				t.Errorf("after the journal was discarded: %d workers, entry %d, %d objects", n, w.index.Seq(), len(w.store.objects))
			}
			return
		}
		log := slices.DeleteFunc(strings.Split(strings.TrimSpace(w.lines.String()), "\n"), func(line string) bool {
			return strings.Contains(line, "msg=recovering ") // progress, on a slow machine
		})
		reported := slices.ContainsFunc(log, func(line string) bool { return strings.Contains(line, "cannot be read") })
		registered, isRegistration := strings.CutPrefix(name, registrationPrefix)
		restored := w.progress.Workers.Load() == 1
		switch {
		case len(log) > 2: // the other one is the end of the recovery
			t.Errorf("%d lines:\n%s", len(log), w.lines.String())
		case isRegistration:
			if moved := w.store.objects[name] == nil; moved == reported || moved != (w.workers.objects[registered] != nil) ||
				moved != (len(workers) == 1) {
				t.Errorf("reported: %t, moved: %t, workers %v", reported, moved, workers)
			}
		case name == removedName:
			if bad := string(data) == "bad"; bad != reported || w.pipeline.calls[0] != "checkpoint "+string(data) {
				t.Errorf("reported: %t, calls %q", reported, w.pipeline.calls)
			}
		case restored == reported:
			t.Errorf("restored: %t, reported: %t", restored, reported)
		}
		if !restored && !slices.Contains(w.pipeline.calls, "checkpoint bad") { // of the index alone
			w.wantState(t)
			return
		}
		all, _ := w.index.Workers(nil)
		for _, worker := range all {
			if known := []string{"a", "b", strings.TrimPrefix(name, workerPrefix)}; !slices.Contains(known, worker.Name) {
				t.Errorf("worker %q is of another checkpoint", worker.Name)
			}
		}
		undisturbed := newWorld(t)
		undisturbed.recover(t)
		for _, other := range []string{"a", "b"} {
			if name == workerPrefix+other {
				continue
			}
			want, _ := undisturbed.index.Worker(other)
			got, _ := w.index.Worker(other)
			if diff := cmp.Diff(want, got, cmp.Comparer(equalAdded)); diff != "" {
				t.Errorf("worker %s (-want +got):\n%s", other, diff)
			}
		}
	})
}

// FuzzRegistration decodes what is stored of a registered worker: a valid worker with its name, which is the same after it is
// stored again.
func FuzzRegistration(f *testing.F) {
	for _, w := range []ingestconfig.Worker{
		{Name: "w", Sources: []ingestconfig.Source{{Connect: "tcp://h:1"}}},
		{
			Name: "w", Model: "m", BlockSize: 16, Endpoint: "h:8000", HTTP: "http://h:8000", Labels: map[string]string{"zone": "ü<"},
			Consolidate: feed.ConsolidateDedup,
			Sources: []ingestconfig.Source{{
				Engine: feed.EngineVLLM, Connect: "tcp://h:1", Replay: "tcp://h:2", Snapshot: "tcp://h:3", DPSize: 2, Topic: "kv",
				Copies: ingestconfig.CopiesCounted,
				Ranks:  []ingestconfig.RankEndpoints{{Rank: 1, Connect: "tcp://h:1", Replay: "tcp://h:2"}, {Rank: 5, Connect: "tcp://h:7"}},
			}},
		},
		{Name: "w", Sources: []ingestconfig.Source{{Connect: "smg://h:1"}, {Engine: feed.EngineKVBM, Connect: "ipc:///tmp/x"}}},
		{Name: "w"}, {Name: "v\n", Sources: []ingestconfig.Source{{Connect: "tcp://h"}}},
	} {
		data, err := encodeRegistration(w)
		if err != nil {
			f.Fatal(err)
		}
		f.Add("w", data)
		f.Add("v", data)
	}
	for _, text := range []string{"", "null", "[]", `{"Name": 1}`,
		`{"Name": "w", "Sources": [{"Connect": "tcp://h:1", "DPSize": 1e9}]}`, `{"name": "w", "sources": [{"CONNECT": "tcp://h:1"}]}`} {
		for version := range uint32(3) {
			data, err := proto.Marshal(&statev1.Registration{Version: version, Worker: []byte(text)})
			if err != nil {
				f.Fatal(err)
			}
			f.Add("w", data)
		}
	}
	f.Fuzz(func(t *testing.T, name string, data []byte) {
		w, err := DecodeRegistration(name, data)
		if err != nil {
			if err.Error() == "" {
				t.Error("an error without a text")
			}
			return
		}
		if err := (ingestconfig.Config{Workers: []ingestconfig.Worker{w}}).Validate(); err != nil || w.Name != name {
			t.Errorf("worker %q is %+v: %v", name, w, err)
		}
		again, err := encodeRegistration(w)
		if err != nil {
			t.Fatal(err)
		}
		got, err := DecodeRegistration(name, again)
		if diff := cmp.Diff(w, got); err != nil || diff != "" {
			t.Errorf("stored again: error %v (-want +got):\n%s", err, diff)
		}
	})
}
