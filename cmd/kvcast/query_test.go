package main_test

import (
	"encoding/json"
	"fmt"
	"slices"
	"strings"
	"testing"

	"github.com/kvcast/kvcast/internal/core/testclass"
	"github.com/kvcast/kvcast/internal/simulator"
	"github.com/kvcast/kvcast/internal/wire"
	kvcastv1 "github.com/kvcast/kvcast/proto/kvcast/v1"
	"github.com/kvcast/kvcast/test/harness"
	"github.com/kvcast/kvcast/test/harness/natstest"
)

// serverWithGap returns a server with a worker that has three blocks, after a gap.
func serverWithGap(t *testing.T) *process {
	t.Helper()
	p, s := engineWith(t, ",engine=sglang") // of vLLM, not all of what is on disk is known
	publish(t, p, wire.Event{Kind: wire.KindStored, BlockHashes: []uint64{1, 2}, Tokens: []uint32{1, 2, 3, 4}, BlockSize: 2})
	if _, err := p.Lose(); err != nil {
		t.Fatal(err)
	}
	publish(t, p,
		wire.Event{Kind: wire.KindStored, BlockHashes: []uint64{3}, HasParent: true, Parent: 2, Tokens: []uint32{5, 6}, BlockSize: 2},
		wire.Event{Kind: wire.KindStored, BlockHashes: []uint64{9}, Tokens: []uint32{5, 6}, BlockSize: 2, Medium: "DISK"})
	s.AwaitSample(`kvcast_ingest_batches_total{worker="w"} 2`)
	return s
}

// objects parses an object per line.
func objects(t *testing.T, text string) (all []map[string]any) {
	t.Helper()
	for line := range strings.Lines(text) {
		var o map[string]any
		if err := json.Unmarshal([]byte(line), &o); err != nil {
			t.Fatalf("%v in %q", err, line)
		}
		all = append(all, o)
	}
	return all
}

// kinds returns the kind of each line of JSON.
func kinds(all []map[string]any) string {
	words := make([]string, len(all))
	for i, o := range all {
		switch event, _ := o["event"].(map[string]any); {
		case o["control"] != nil:
			words[i] = fmt.Sprint(o["control"])
		case event != nil:
			for kind := range event {
				switch kind {
				case "event_id", "dp_rank", "tier":
				default:
					words[i] = kind
				}
			}
			if o["seq"] != nil {
				words[i] += fmt.Sprint("@", o["seq"])
			}
		}
	}
	return strings.Join(words, " ")
}

func TestReplayCommand(t *testing.T) {
	testclass.Process(t)
	t.Parallel()
	s := serverWithGap(t)
	for _, tt := range []struct {
		args string
		want string
	}{
		{"", "accepted worker_added@1 stored@2 gap@3 stored@4 stored@4"},
		{"--after :1 --until :3", "accepted stored@2 gap@3"},
		{"--after :4", "accepted"},
		{"--tier disk", "accepted worker_added@1 gap@3 stored@4"},
		{"--worker w --after :3", "accepted stored@4 stored@4"},
	} {
		got := kvcast(t, nil, append([]string{"replay", "--addr", s.Address(), "-o", "json"}, strings.Fields(tt.args)...)...)
		if words := kinds(objects(t, got.out)); words != tt.want || got.status != 0 {
			t.Errorf("replay %s: got status %d and %q, want %q\n%s", tt.args, got.status, words, tt.want, got.err)
		}
	}
	for args, says := range map[string]string{
		"--after :9":            "OUT_OF_RANGE: ",
		"--after feed:1":        "FAILED_PRECONDITION: ",
		"--after :3 --until :2": "INVALID_ARGUMENT: until: ",
		"--until :7":            "OUT_OF_RANGE: ",
	} {
		got := kvcast(t, nil, append([]string{"replay", "--addr", s.Address()}, strings.Fields(args)...)...)
		if got.status != 1 || !strings.Contains(got.err, says) {
			t.Errorf("replay %s: got status %d and %q, want %q", args, got.status, got.err, says)
		}
	}
}

func TestSnapshotCommand(t *testing.T) {
	testclass.Process(t)
	t.Parallel()
	s := serverWithGap(t)
	got := kvcast(t, nil, "snapshot", "--addr", s.Address(), "-o", "json")
	all := objects(t, got.out)
	if words := kinds(all); words != "snapshot_begin snapshot_worker stored stored snapshot_end" {
		t.Fatalf("got %q\n%s", words, got.err)
	}
	record := all[1]["record"].(map[string]any)
	if record["worker"] != "w" || record["last_event_id"] != "5" || fmt.Sprint(record["incomplete_ranks"]) != "[0]" {
		t.Errorf("record: got %v", record)
	}
	if all[4]["seq"] != "4" || !strings.Contains(got.err, "--after "+all[4]["epoch"].(string)+":4") {
		t.Errorf("end: got %v and %q", all[4], got.err)
	}
	got = kvcast(t, nil, "snapshot", "--addr", s.Address(), "--tier", "disk")
	if !strings.Contains(got.out, "at seq 4: 1 worker, 1 block") || !strings.Contains(got.out, "INCOMPLETE at dp ranks [0]") {
		t.Errorf("as text, one tier: got %q", got.out)
	}
	got = kvcast(t, nil, "subscribe", "--addr", s.Address(), "--from", "earliest", "--count", "1")
	if got.status != 0 {
		t.Errorf("subscribe: %q", got.err)
	}
}

// TestChunksOfAConnectorMatch has chunks of four tokens in host memory beside blocks of two on the device.
func TestChunksOfAConnectorMatch(t *testing.T) {
	testclass.Process(t)
	t.Parallel()
	p := publisherOf(t, simulator.SocketConfig{})
	s := serve(t, "--worker", "name=w,connect="+p.Endpoint()+",replay="+p.ReplayEndpoint())
	if err := p.WaitSubscribed(harness.Context(t), 1); err != nil {
		t.Fatal(err)
	}
	batches := 0
	match := func(events ...wire.Event) string {
		t.Helper()
		publish(t, p, events...)
		batches++
		s.AwaitSample(fmt.Sprintf(`kvcast_ingest_batches_total{worker="w"} %d`, batches))
		s.AwaitSample("kvcast_index_behind_entries 0")
		got, err := s.Client().MatchPrefix(t.Context(), &kvcastv1.MatchPrefixRequest{Prompts: []*kvcastv1.Prompt{{TokenIds: []uint32{1, 2, 3, 4, 5, 6, 7, 8, 9}}}})
		if err != nil {
			t.Fatal(err)
		}
		text := ""
		for _, m := range got.GetPrompts()[0].GetMatches() {
			text += fmt.Sprintf("%d tokens", m.GetTokens())
			for _, tier := range m.GetTiers() {
				text += fmt.Sprintf(", %v %v %d", tier.GetTier(), tier.GetTrust(), tier.GetTokens())
			}
		}
		return text
	}
	chunks := wire.Event{
		Kind: wire.KindStored, Medium: "CPU", BlockHashes: []uint64{71, 72}, BlockSize: 4, Tokens: []uint32{1, 2, 3, 4, 5, 6, 7, 8},
	}
	for _, c := range []struct {
		event wire.Event
		want  string
	}{
		{wire.Event{Kind: wire.KindStored, BlockHashes: []uint64{1}, BlockSize: 2, Tokens: []uint32{1, 2}}, "2 tokens, TIER_DEVICE TRUST_UNSPECIFIED 2"},
		{chunks, "8 tokens, TIER_DEVICE TRUST_EXACT 2, TIER_HOST_PINNED TRUST_DEGRADED 8"},
		{wire.Event{Kind: wire.KindRemoved, Medium: "CPU", BlockHashes: []uint64{72}}, "4 tokens, TIER_DEVICE TRUST_EXACT 2, TIER_HOST_PINNED TRUST_DEGRADED 4"},
		{wire.Event{Kind: wire.KindRemoved, Medium: "CPU", BlockHashes: []uint64{71}}, "2 tokens, TIER_DEVICE TRUST_EXACT 2"},
	} {
		if got := match(c.event); got != c.want {
			t.Errorf("after %v: got %s, want %s", c.event.BlockHashes, got, c.want)
		}
	}
	s.AwaitSample(`kvcast_index_degraded{dp_rank="0",reason="connector_tier",worker="w"} 1`)
	s.AwaitSample(`kvcast_ingest_events_skipped_total{reason="chunks",worker="w"} 1`)
}

// TestBlocksOfAnotherSizeAreReported has a worker whose block size is not the engine's: kvcast must say so wherever an operator
// looks.
func TestBlocksOfAnotherSizeAreReported(t *testing.T) {
	testclass.Process(t)
	t.Parallel()
	p := publisherOf(t, simulator.SocketConfig{})
	s := serve(t, "--worker", "name=w,block_size=32,connect="+p.Endpoint()+",replay="+p.ReplayEndpoint())
	if err := p.WaitSubscribed(harness.Context(t), 1); err != nil {
		t.Fatal(err)
	}
	publish(t, p, wire.Event{Kind: wire.KindStored, BlockHashes: []uint64{1}, Tokens: []uint32{1, 2}, BlockSize: 2})
	s.AwaitSample(`kvcast_index_degraded{dp_rank="0",reason="block_size_mismatch",worker="w"} 1`)
	s.AwaitSample(`kvcast_pipeline_raw_event_holes_total{worker="w"} 1`)
	const detail = "the engine's blocks have 2 tokens; want 32"
	for _, command := range []string{"workers", "status", "top --once --interval 100ms"} {
		got := kvcast(t, nil, append(strings.Fields(command), "--addr", s.Address())...)
		if !strings.Contains(got.out, "\nw rank 0: block_size_mismatch in device: "+detail) {
			t.Errorf("%s: got\n%s%s", command, got.out, got.err)
		}
	}
	worker := objects(t, kvcast(t, nil, "workers", "--addr", s.Address(), "-o", "json").out)[0]
	rank, source := worker["ranks"].([]any)[0].(map[string]any), worker["sources"].([]any)[0].(map[string]any)
	if rank["detail"] != detail || fmt.Sprint(rank["reasons"]) != "[DEGRADED_REASON_BLOCK_SIZE_MISMATCH]" || rank["tier_reasons"] == nil || source["replay_state"] != "REPLAY_STATE_ANSWERS" {
		t.Errorf("as JSON: got %v and %v", rank, source)
	}
	inspection := kvcastv1.NewInspectionServiceClient(harness.Dial(t, s.Address()))
	incidents, err := inspection.ListIncidents(t.Context(), &kvcastv1.ListIncidentsRequest{Kinds: []kvcastv1.IncidentKind{kvcastv1.IncidentKind_INCIDENT_KIND_GAP}})
	if err != nil {
		t.Fatal(err)
	}
	all := slices.DeleteFunc(incidents.GetIncidents(), func(i *kvcastv1.Incident) bool { // the replay may be read before the message
		return i.GetReason() == "REASON_REPLAY_UNPROVED"
	})
	if len(all) != 1 || all[0].GetReason() != "REASON_BLOCK_SIZE_MISMATCH" || all[0].GetDetail() != detail || len(all[0].GetTiers()) != 1 {
		t.Errorf("got incidents %v", all)
	}
}

func TestWorkersAndStatusCommands(t *testing.T) {
	testclass.Process(t)
	t.Parallel()
	s := serverWithGap(t)
	got := kvcast(t, nil, "workers", "--addr", s.Address())
	if lines := strings.Split(got.out, "\n"); len(lines) != 5 || !strings.Contains(lines[1], "3, disk 1") || !strings.Contains(lines[1], "1 (1 batches) INCOMPLETE") ||
		!strings.Contains(lines[1], "  none  ") || !strings.HasPrefix(lines[3], "w rank 0: gap: ") {
		t.Errorf("workers: got %q %q", got.out, got.err)
	}
	all := objects(t, kvcast(t, nil, "workers", "--addr", s.Address(), "-o", "json").out)
	if len(all) != 1 || all[0]["name"] != "w" || all[0]["last_event_id"] != "5" {
		t.Errorf("workers as JSON: got %v", all)
	}
	for _, args := range []string{"w", "--worker w", "w --worker w"} {
		if got := kvcast(t, nil, append([]string{"workers", "--addr", s.Address()}, strings.Fields(args)...)...); got.status != 0 || !strings.Contains(got.out, "\nw ") {
			t.Errorf("workers %s: got status %d, %q and %q", args, got.status, got.out, got.err)
		}
	}
	got = kvcast(t, nil, "status", "--addr", s.Address())
	for _, want := range []string{"entries      1 to 4", "workers      1", "blocks       4", "subscribers  0", "degraded     gap 1", "replay       none 1", "\nw rank 0: gap: "} {
		if !strings.Contains(got.out, want) {
			t.Errorf("status: got %q, want %q in it", got.out, want)
		}
	}
	status := objects(t, kvcast(t, nil, "status", "--addr", s.Address(), "-o", "json").out)
	if len(status) != 1 || status[0]["newest_seq"] != "4" {
		t.Errorf("status as JSON: got %v", status)
	}
	for _, command := range []string{"replay", "snapshot", "workers", "status"} {
		if got := kvcast(t, nil, command, "--addr", "127.0.0.1:1"); got.status != 1 || !strings.Contains(got.err, "start one with kvcast serve") {
			t.Errorf("%s without a server: got status %d and %q", command, got.status, got.err)
		}
	}
}

// TestWhatDoesNotExistIsAnError names workers and models that do not exist, in text and as JSON.
func TestWhatDoesNotExistIsAnError(t *testing.T) {
	testclass.Process(t)
	t.Parallel()
	p, q := publisherOf(t, simulator.SocketConfig{}), publisherOf(t, simulator.SocketConfig{})
	publish(t, p, storedOf(1))
	publish(t, q, storedOf(1))
	s := serve(t, "--worker", "name=a,model=m,connect="+p.Endpoint()+",replay="+p.ReplayEndpoint(),
		"--worker", "name=b,model=n,connect="+q.Endpoint()+",replay="+q.ReplayEndpoint())
	s.AwaitSample(`kvcast_ingest_batches_total{worker="a"} 1`)
	s.AwaitSample(`kvcast_ingest_batches_total{worker="b"} 1`)
	const workers = `; workers: a (model "m"), b (model "n")` + "\n"
	for _, tt := range []struct {
		args string
		want string // standard error
	}{
		{"--worker nobody", `kvcast: worker "nobody" does not exist` + workers},
		{"--worker a --worker nobody --worker none", `kvcast: worker "nobody" does not exist, worker "none" does not exist` + workers},
		{"--model x", `kvcast: no worker has the model "x"` + workers},
		{"--worker nobody --model x", `kvcast: worker "nobody" does not exist, no worker has the model "x"` + workers},
		{"--worker a --model n", `kvcast: no worker matches --worker a --model n` + workers},
	} {
		for _, command := range []string{"workers", "match --tokens 1,2", "snapshot", "replay"} {
			for _, format := range []string{"text", "json"} {
				if command == "replay" && tt.args == "--worker a --model n" {
					continue // a has had entries of another model, for all that is known
				}
				args := strings.Fields(command + " " + tt.args + " -o " + format + " --addr " + s.Address())
				if got := kvcast(t, nil, args...); got.status != 1 || got.err != tt.want || command != "replay" && got.out != "" {
					t.Errorf("%s: got status %d, %q and %q, want 1 and %q", args, got.status, got.out, got.err, tt.want)
				}
			}
		}
	}
	if got := kvcast(t, nil, "workers", "nobody", "--addr", s.Address()); got.status != 1 || got.err != `kvcast: worker "nobody" does not exist`+workers {
		t.Errorf("workers nobody: got status %d and %q", got.status, got.err)
	}
	for _, args := range []string{"workers a --worker b", "workers --model m", "match --tokens 1,2 --worker a", "match --tokens 9,9 --worker b --model n", "snapshot --worker a --worker b --model m", "replay --model m --model n"} {
		if got := kvcast(t, nil, strings.Fields(args+" --addr "+s.Address())...); got.status != 0 {
			t.Errorf("%s: got status %d and %q", args, got.status, got.err)
		}
	}
}

// TestReplayHasRemovedWorkers replays entries of a worker that does not exist any more.
func TestReplayHasRemovedWorkers(t *testing.T) {
	testclass.Process(t)
	t.Parallel()
	p, s := engine(t, "--auth-open-registration")
	publish(t, p, storedOf(1))
	s.AwaitSample(`kvcast_ingest_batches_total{worker="w"} 1`)
	if _, err := s.Operator().DeregisterWorker(t.Context(), &kvcastv1.DeregisterWorkerRequest{Name: "w"}); err != nil {
		t.Fatal(err)
	}
	for args, want := range map[string]string{
		"--worker w":            "",
		"--worker w --worker v": "kvcast: worker \"v\" does not exist; workers: none\n",
		"--worker w --after :3": "kvcast: worker \"w\" does not exist; workers: none\n",
		"--worker w --until :2": "",
	} {
		got := kvcast(t, nil, append([]string{"replay", "--addr", s.Address(), "-o", "json"}, strings.Fields(args)...)...)
		if got.err != want || (got.status == 0) != (want == "") {
			t.Errorf("replay %s: got status %d and %q, want %q", args, got.status, got.err, want)
		}
	}
}

// TestCommandsShowTheInstances queries each of two servers that share a journal.
func TestCommandsShowTheInstances(t *testing.T) {
	testclass.Process(t)
	t.Parallel()
	p := publisherOf(t, simulator.SocketConfig{})
	publish(t, p, wire.Event{Kind: wire.KindStored, BlockHashes: []uint64{1}, Tokens: []uint32{1, 2}, BlockSize: 2})
	url := natstest.Start(t)
	var servers []*process
	for range 2 {
		// The worker stays where it is for twice the TTL.
		servers = append(servers, serve(t, "--journal", url, "--cluster-ttl", "1m", "--worker", "name=w,connect="+p.Endpoint()+",replay="+p.ReplayEndpoint()))
	}
	owners := make(map[string]bool)
	for _, s := range servers {
		s.AwaitSample(`kvcast_cluster_instances{state="live"} 2`)
		status := kvcast(t, nil, "status", "--addr", s.Address())
		if !strings.Contains(status.out, "\ninstance ") || !strings.Contains(status.out, "\n\nINSTANCE  STATE  HOST") || strings.Count(status.out, "  live  ") != 2 {
			t.Errorf("status: got %q %q", status.out, status.err)
		}
		workers := kvcast(t, nil, "workers", "--addr", s.Address())
		lines := strings.Split(workers.out, "\n")
		if len(lines) < 3 || !strings.HasPrefix(lines[0], "INSTANCE  WORKER") {
			t.Fatalf("workers: got %q %q", workers.out, workers.err)
		}
		owner, _, _ := strings.Cut(lines[1], " ")
		owners[owner] = true
		if !strings.Contains(status.out, "\n"+owner+"  live") {
			t.Errorf("the owner %q of the worker is not in %q", owner, status.out)
		}
		top := kvcast(t, nil, "top", "--addr", s.Address(), "--once", "--interval", "100ms")
		if !strings.Contains(top.out, " (this)  live") || !strings.Contains(top.out, owner) {
			t.Errorf("top: got %q %q", top.out, top.err)
		}
	}
	if len(owners) != 1 {
		t.Errorf("the servers show the owners %v, want the same", owners)
	}
}
