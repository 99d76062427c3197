package config_test

import (
	"fmt"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/kvcast/kvcast/ingest/config"
	"github.com/kvcast/kvcast/internal/feed"
)

// workersOf returns a config with a worker for each list of sources, named a, b and so on.
func workersOf(workers ...[]config.Source) (c config.Config) {
	for i, sources := range workers {
		c.Workers = append(c.Workers, config.Worker{Name: string(rune('a' + i)), Sources: sources})
	}
	return c
}

// A socket belongs to one dp rank of one source: with another's events or replays, a rank would be said to have blocks that it
// does not have.
func TestSocketsBelongToOneRank(t *testing.T) {
	type sources = []config.Source
	at := func(connect, replay string) sources { return sources{{Connect: connect, Replay: replay}} }
	ranks := func(connect, replay string, n int) sources {
		return sources{{Connect: connect, Replay: replay, DPSize: n}}
	}
	tests := []struct {
		name   string
		config config.Config
		want   []string // the field and what it says, or none
	}{
		{"ports of their own", workersOf(at("tcp://h:1", "tcp://h:2"), at("tcp://h:3", "tcp://h:4"), at("tcp://g:1", "tcp://g:2")), nil},
		{"one connect", workersOf(at("tcp://h:1", ""), at("tcp://h:1", "")), []string{
			`Workers[1].Sources[0].Connect: a socket of its own: worker "b" would read the events of rank 0 at tcp://h:1, where worker "a" reads the events of rank 0`}},
		{"one replay", workersOf(at("tcp://h:1", "tcp://h:3"), at("tcp://h:2", "tcp://h:3")), []string{
			`Workers[1].Sources[0].Replay: a socket of its own: worker "b" would read the replays of rank 0 at tcp://h:3, where worker "a" reads the replays of rank 0`}},
		{"the replay socket of another's engine", workersOf(at("tcp://h:1", "tcp://h:2"), at("tcp://h:2", "")), []string{
			`Workers[1].Sources[0].Connect: a socket of its own: worker "b" would read the events of rank 0 at tcp://h:2, where worker "a" reads the replays of rank 0`}},
		{"replay is connect", workersOf(at("tcp://h:1", "tcp://h:1")), []string{
			`Workers[0].Sources[0].Replay: a socket of its own: worker "a" would read the replays of rank 0 at tcp://h:1, where worker "a" reads the events of rank 0`}},
		{"snapshot is replay", workersOf(sources{{Connect: "tcp://h:1", Replay: "tcp://h:2", Snapshot: "tcp://h:2"}}), []string{
			`Workers[0].Sources[0].Snapshot: a socket of its own: worker "a" would read the snapshots of rank 0 at tcp://h:2, where worker "a" reads the replays of rank 0`}},
		{"ports of ranks overlap", workersOf(ranks("tcp://h:5557", "tcp://h:5558", 2)), []string{
			`Workers[0].Sources[0].Replay: a socket of its own: worker "a" would read the replays of rank 0 at tcp://h:5558, where worker "a" reads the events of rank 1; leave room for the ports of all ranks`}},
		{"ports of ranks do not overlap", workersOf(ranks("tcp://h:5557", "tcp://h:5559", 2)), nil},
		{"ports of ranks overlap those of another worker", workersOf(ranks("tcp://h:1", "", 4), at("tcp://h:9", "tcp://h:4")), []string{
			`Workers[1].Sources[0].Replay: a socket of its own: worker "b" would read the replays of rank 0 at tcp://h:4, where worker "a" reads the events of rank 3; leave room for the ports of all ranks`}},
		{"one field is reported once", workersOf(ranks("tcp://h:1", "", 8), ranks("tcp://h:3", "", 8)), []string{
			`Workers[1].Sources[0].Connect: a socket of its own: worker "b" would read the events of rank 0 at tcp://h:3, where worker "a" reads the events of rank 2; leave room for the ports of all ranks`}},
		{"two sources of a worker", workersOf(sources{{Connect: "tcp://h:1"}, {Engine: feed.EngineKVBM, Connect: "tcp://h:1"}}), []string{
			`Workers[0].Sources[1].Connect: a socket of its own: source 1 of worker "a" would read the events of rank 0 at tcp://h:1, where worker "a" reads the events of rank 0`}},
		{"listed ranks", workersOf(sources{{Connect: "tcp://h:7", DPSize: 2, Ranks: []config.RankEndpoints{
			{Rank: 4, Connect: "tcp://h:7"}, {Rank: 5, Connect: "tcp://h:9", Replay: "tcp://h:7"}}}}), []string{
			`Workers[0].Sources[0].Ranks[1].Replay: a socket of its own: worker "a" would read the replays of rank 5 at tcp://h:7, where worker "a" reads the events of rank 4; leave room for the ports of all ranks`}},

		{"another case", workersOf(at("tcp://Vllm-0.llm:1", ""), at("tcp://vllm-0.LLM.:01", "")), []string{
			`Workers[1].Sources[0].Connect: a socket of its own: worker "b" would read the events of rank 0 at tcp://vllm-0.LLM.:1, where worker "a" reads the events of rank 0`}},
		{"another form of an address", workersOf(at("tcp://[fd00::5]:1", ""), at("tcp://[fd00:0::5]:1", "")), []string{
			`Workers[1].Sources[0].Connect: a socket of its own: worker "b" would read the events of rank 0 at tcp://[fd00:0::5]:1, where worker "a" reads the events of rank 0`}},
		{"an address mapped to IPv6", workersOf(at("tcp://10.0.0.5:1", ""), at("tcp://[::ffff:10.0.0.5]:1", "")), []string{
			`Workers[1].Sources[0].Connect: a socket of its own: worker "b" would read the events of rank 0 at tcp://[::ffff:10.0.0.5]:1, where worker "a" reads the events of rank 0`}},
		{"names are not resolved", workersOf(at("tcp://localhost:1", ""), at("tcp://127.0.0.1:1", ""), at("tcp://[::1]:1", "")), nil},

		{"paths", workersOf(at("ipc:///a", "ipc:///b"), at("ipc:///c", "ipc:///A")), nil},
		{"one path", workersOf(at("ipc:///a", ""), at("ipc:///b", "ipc:///a")), []string{
			`Workers[1].Sources[0].Replay: a socket of its own: worker "b" would read the replays of rank 0 at ipc:///a, where worker "a" reads the events of rank 0`}},
		{"TensorRT-LLM's paths", workersOf(sources{{Engine: feed.EngineTRTLLM, Connect: "ipc:///a", Replay: "ipc:///b", DPSize: 4}}), nil},
		{"a path is no port", workersOf(at("ipc://h", ""), at("tcp://h:1", "")), nil},

		{"a gRPC server has all ranks", workersOf(sources{{Connect: "smg://h:1", DPSize: 4}}), nil},
		{"listed ranks of a gRPC server", workersOf(sources{{Connect: "smg://h:1", DPSize: 2, Ranks: []config.RankEndpoints{
			{Rank: 0, Connect: "smg://h:1"}, {Rank: 1, Connect: "smg://h:1"}}}}), nil},
		{"one gRPC server", workersOf(sources{{Connect: "smg://h:1", DPSize: 4}}, sources{{Connect: "openengine://h:1"}}), []string{
			`Workers[1].Sources[0].Connect: a socket of its own: worker "b" would read the events of rank 0 at openengine://h:1, where worker "a" reads the events of rank 0`}},

		{"a proxy with a topic for each engine", workersOf(
			sources{{Connect: "tcp://h:1", Topic: "kv@a@"}}, sources{{Connect: "tcp://h:1", Topic: "kv@b@"}}), nil},
		{"a topic that includes the other", workersOf(
			sources{{Connect: "tcp://h:1", Topic: "kv@a@"}}, sources{{Connect: "tcp://h:1", Topic: "kv@b@"}}, sources{{Connect: "tcp://h:1", Topic: "kv@"}}), []string{
			`Workers[2].Sources[0].Connect: a socket of its own: worker "c" would read the events of rank 0 at tcp://h:1, where worker "a" reads the events of rank 0`}},
		{"all topics and one", workersOf(at("tcp://h:1", ""), sources{{Connect: "tcp://h:1", Topic: "kv@b@"}}), []string{
			`Workers[1].Sources[0].Connect: a socket of its own: worker "b" would read the events of rank 0 at tcp://h:1, where worker "a" reads the events of rank 0`}},

		{"listeners share nothing with workers", config.Config{
			Workers:   workersOf(at("tcp://127.0.0.1:1", "")).Workers,
			Listeners: []config.Listener{{Bind: "tcp://*:0"}, {Bind: "tcp://*:0"}, {Bind: "tcp://127.0.0.1:1"}}}, nil},
		{"engines that are asked have the ports that they tell", config.Config{Workers: []config.Worker{
			{Name: "a", HTTP: "http://h:8000", Sources: at("tcp://h:5557", "")},
			{Name: "b", HTTP: "http://h:8001", Sources: at("tcp://h:5557", "")}, {Name: "c", Sources: at("tcp://h:5557", "")}}}, nil},
		{"one engine is asked for two workers", config.Config{Workers: []config.Worker{
			{Name: "a", HTTP: "http://h:8000", Sources: at("tcp://h:5557", "")},
			{Name: "b", HTTP: "https://H:8000", Sources: at("tcp://h:5558", "")}}}, []string{
			`Workers[1].HTTP: that of another engine than worker "a" has`}},
		{"an asked engine whose ports overlap", config.Config{Workers: []config.Worker{
			{Name: "a", HTTP: "http://h:8000", Sources: at("tcp://h:5557", "tcp://h:5557")}}}, []string{
			`Workers[0].Sources[0].Replay: a socket of its own: worker "a" would read the replays of rank 0 at tcp://h:5557, where worker "a" reads the events of rank 0`}},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			var got []string
			for _, field := range config.FieldErrors(tt.config.Validate()) {
				got = append(got, fmt.Sprintf("%s: %s", field.Field, field.Allowed))
			}
			if d := cmp.Diff(tt.want, got); d != "" {
				t.Errorf("(-want +got):\n%s", d)
			}
		})
	}
}

func TestRemovedWorkersLeaveTheirSockets(t *testing.T) {
	all := new(config.SocketSet)
	worker := func(name, connect, replay string) config.Worker {
		return config.Worker{Name: name, Sources: []config.Source{{Connect: connect, Replay: replay, DPSize: 2}}}
	}
	add := func(w config.Worker, want bool) {
		t.Helper()
		if err := all.Add(w); (err == nil) != want {
			t.Errorf("add %s at %s: got %v, want success: %v", w.Name, w.Sources[0].Connect, err, want)
		}
	}
	add(worker("a", "tcp://h:1", "tcp://h:11"), true)
	add(worker("b", "tcp://h:2", "tcp://h:21"), false) // at the port of rank 1
	add(worker("c", "tcp://h:21", "tcp://h:31"), true) // a refused worker has no sockets
	all.Remove("b")
	add(worker("b", "tcp://h:2", "tcp://h:41"), false)
	all.Remove("a")
	add(worker("b", "tcp://h:2", "tcp://h:41"), true)
	add(worker("a", "tcp://h:1", "tcp://h:11"), false)
}
