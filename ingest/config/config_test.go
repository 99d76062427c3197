package config_test

import (
	"errors"
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/kvcast/kvcast/ingest/config"
	"github.com/kvcast/kvcast/internal/feed"
)

func TestValidate(t *testing.T) {
	source := func(s config.Source) config.Config {
		return config.Config{Workers: []config.Worker{{Name: "w", Sources: []config.Source{s}}}}
	}
	connect := func(endpoint string) config.Config { return source(config.Source{Connect: endpoint}) }
	listener := func(l config.Listener) config.Config {
		return config.Config{Listeners: []config.Listener{l}}
	}
	bind := func(endpoint string) config.Config { return listener(config.Listener{Bind: endpoint}) }
	named := func(names ...string) (c config.Config) {
		for i, n := range names {
			c.Workers = append(c.Workers, config.Worker{
				Name: n, Sources: []config.Source{{Connect: fmt.Sprintf("tcp://h:%d", i+1)}},
			})
		}
		return c
	}
	tests := []struct {
		name   string
		config config.Config
		want   []string // the fields, or none
	}{
		{"zero", config.Config{}, nil},
		{"counts below 0", config.Config{MaxWorkers: -1, Silence: 1, ReplayTimeout: -1, PeerTTL: 1}, []string{"MaxWorkers", "ReplayTimeout", "PeerTTL", "Silence"}},
		{"reconnect too soon", config.Config{ReconnectMin: time.Microsecond}, []string{"ReconnectMin"}},
		{"reconnect max below min", config.Config{ReconnectMin: time.Second, ReconnectMax: time.Millisecond}, []string{"ReconnectMax"}},
		{"reconnect min above the default max", config.Config{ReconnectMin: time.Minute}, nil},

		{"host name", connect("tcp://vllm-0.vllm:5557"), nil},
		{"IPv4", connect("tcp://10.0.0.5:5557"), nil},
		{"IPv6", connect("tcp://[fd00::5]:5557"), nil},
		{"ipc", connect("ipc:///run/kv"), nil},
		{"no endpoint", connect(""), []string{"Workers[0].Sources[0].Connect"}},
		{"ranks", source(config.Source{Connect: "tcp://h:1", DPSize: 2, Ranks: []config.RankEndpoints{{Rank: 5, Connect: "tcp://h:1", Replay: "tcp://h:9"}, {Rank: 3, Connect: "tcp://h:65535"}}}), nil},
		{"bad ranks", source(config.Source{Connect: "tcp://h:1", DPSize: 3, Ranks: []config.RankEndpoints{{Rank: 5, Connect: "tcp://h:1", Replay: "h:9"}, {Rank: 5, Connect: "tcp://*:2"}, {Rank: 1024, Connect: "tcp://h:3"}}}), []string{
			"Workers[0].Sources[0].Ranks[0].Replay", "Workers[0].Sources[0].Ranks[1].Rank", "Workers[0].Sources[0].Ranks[1].Connect", "Workers[0].Sources[0].Ranks[2].Rank",
		}},
		{"other number of ranks", source(config.Source{Connect: "tcp://h:1", DPSize: 3, Ranks: []config.RankEndpoints{{Connect: "tcp://h:1"}}}), []string{"Workers[0].Sources[0].Ranks"}},
		{"LMCache", config.Config{Workers: []config.Worker{{Name: "p", Model: "m", Sources: []config.Source{{Connect: "lmcache://h:5555"}}}, {Name: "w", Pools: []string{"p", "q"}, Sources: []config.Source{{Connect: "tcp://h:1"}}}}}, nil},
		{"a pool by ZeroMQ", config.Config{Workers: []config.Worker{{Name: "p", Pool: true, Sources: []config.Source{{Connect: "tcp://h:1"}}}}}, nil},
		{"LMCache without a model, with others", config.Config{Workers: []config.Worker{{Name: "p", Pools: []string{"q"}, Sources: []config.Source{
			{Connect: "lmcache://h:5555", DPSize: 2, Topic: "t", Replay: "tcp://h:1"}, {Engine: feed.EngineLMCache, Connect: "tcp://h:1"}, {Engine: feed.EngineSGLang, Connect: "lmcache://h:5556"},
		}}}}, []string{
			"Workers[0].Pools", "Workers[0].Sources", "Workers[0].Model", "Workers[0].Sources[0].Replay", "Workers[0].Sources[0].Topic", "Workers[0].Sources[0].DPSize",
			"Workers[0].Sources[1].Connect", "Workers[0].Sources[2].Engine",
		}},
		{"Mooncake", config.Config{Workers: []config.Worker{
			{Name: "p", Model: "m", Sources: []config.Source{{Connect: "mooncake://h:9003", Topic: "a@"}}}, {Name: "q", Model: "m", Sources: []config.Source{{Engine: feed.EngineMooncake, Connect: "mooncake://h:9003", Topic: "b@"}}},
		}}, nil},
		{"Mooncake with others", config.Config{Workers: []config.Worker{
			{Name: "p", Pools: []string{"q"}, Sources: []config.Source{{Connect: "mooncake://h:9003", DPSize: 2, Replay: "tcp://h:1"}, {Engine: feed.EngineMooncake, Connect: "tcp://h:1"}, {Engine: feed.EngineLMCache, Connect: "mooncake://h:9004"}}},
			{Name: "r", Model: "m", Sources: []config.Source{{Connect: "mooncake://h"}}},
		}}, []string{
			"Workers[0].Pools", "Workers[0].Sources", "Workers[0].Model", "Workers[0].Sources[0].Replay", "Workers[0].Sources[0].DPSize", "Workers[0].Sources[1].Connect",
			"Workers[0].Sources[2].Connect", "Workers[0].Sources[2].Connect", "Workers[1].Sources[0].Connect",
		}},
		{"two pools of one Mooncake master", config.Config{Workers: []config.Worker{
			{Name: "p", Model: "m", Sources: []config.Source{{Connect: "mooncake://h:9003"}}}, {Name: "q", Model: "m", Sources: []config.Source{{Connect: "mooncake://h:9003", Topic: "b@"}}},
		}}, []string{"Workers[1].Sources[0].Connect"}},
		{"LMCache's coordinator", config.Config{Workers: []config.Worker{
			{Name: "p", Model: "m", Sources: []config.Source{{Connect: "lmcache-coordinator://h:9300"}}}, {Name: "q", Model: "m", Sources: []config.Source{{Connect: "lmcache-coordinator://h:9300", Topic: "instance"}}},
		}}, nil},
		{"LMCache's coordinator, with others", config.Config{Workers: []config.Worker{{Name: "p", Sources: []config.Source{
			{Connect: "lmcache-coordinator://h:1", DPSize: 2, Replay: "tcp://h:1"}, {Engine: feed.EngineLMCacheCoordinator, Connect: "lmcache://h:1"}, {Engine: feed.EngineLMCache, Connect: "lmcache-coordinator://h:2"},
		}}}}, []string{
			"Workers[0].Sources", "Workers[0].Model", "Workers[0].Sources[0].Replay", "Workers[0].Sources[0].DPSize", "Workers[0].Sources[1].Engine", "Workers[0].Sources[1].Connect",
			"Workers[0].Sources[2].Connect", "Workers[0].Sources[2].Connect",
		}},
		{"announced by workers", config.Config{Workers: []config.Worker{
			{Name: "p", Model: "m", Sources: []config.Source{{Connect: "workers://disk"}}}, {Name: "q", Model: "m", Sources: []config.Source{{Engine: feed.EngineWorkers, Connect: "workers://external?max_age=1h30m"}}},
			{Name: "r", Model: "m", Sources: []config.Source{{Connect: "workers://disk"}}},
		}}, nil},
		{"announced by workers, with others", config.Config{Workers: []config.Worker{{Name: "p", Sources: []config.Source{
			{Connect: "workers://disk", DPSize: 2, Replay: "tcp://h:1", Topic: "t"}, {Engine: feed.EngineWorkers, Connect: "tcp://h:1"}, {Engine: feed.EngineVLLM, Connect: "workers://disk"},
		}}}}, []string{
			"Workers[0].Sources", "Workers[0].Model", "Workers[0].Sources[0].Replay", "Workers[0].Sources[0].Topic", "Workers[0].Sources[0].DPSize", "Workers[0].Sources[1].Connect",
			"Workers[0].Sources[2].Connect",
		}},
		{"pools", config.Config{Workers: []config.Worker{{Name: "w", Pools: append(slices.Repeat([]string{"p"}, 17), ""), Sources: []config.Source{{Connect: "tcp://h:1"}}}}},
			append([]string{"Workers[0].Pools"}, func() (all []string) {
				for i := range 17 {
					all = append(all, fmt.Sprintf("Workers[0].Pools[%d]", i+1))
				}
				return all
			}()...)},
		{"no transport", connect("10.0.0.5:5557"), []string{"Workers[0].Sources[0].Connect"}},
		{"inproc", connect("inproc://kv"), []string{"Workers[0].Sources[0].Connect"}},
		{"udp", connect("udp://10.0.0.5:5557"), []string{"Workers[0].Sources[0].Connect"}},
		{"no port", connect("tcp://10.0.0.5"), []string{"Workers[0].Sources[0].Connect"}},
		{"no host", connect("tcp://:5557"), []string{"Workers[0].Sources[0].Connect"}},
		{"any host", connect("tcp://*:5557"), []string{"Workers[0].Sources[0].Connect"}},
		{"port 0", connect("tcp://h:0"), []string{"Workers[0].Sources[0].Connect"}},
		{"port any", connect("tcp://h:*"), []string{"Workers[0].Sources[0].Connect"}},
		{"port too large", connect("tcp://h:65536"), []string{"Workers[0].Sources[0].Connect"}},
		{"port that is not a number", connect("tcp://h:+1"), []string{"Workers[0].Sources[0].Connect"}},
		{"control character", connect("tcp://h\n:1"), []string{"Workers[0].Sources[0].Connect"}},
		{"source address", connect("tcp://10.0.0.1:0;h:1"), []string{"Workers[0].Sources[0].Connect"}},
		{"ipc without path", connect("ipc://"), []string{"Workers[0].Sources[0].Connect"}},
		{"ipc path too long", connect("ipc://" + strings.Repeat("p", 108)), []string{"Workers[0].Sources[0].Connect"}},
		{"snapshot", source(config.Source{Connect: "tcp://h:1", Snapshot: "tcp://h:5", DPSize: 2}), nil},
		{"snapshot of some ranks", snapshotOfRank5("tcp://h:65530"), nil},
		{"snapshot port of the highest rank does not fit", snapshotOfRank5("tcp://h:65531"), []string{"Workers[0].Sources[0].Snapshot"}},
		{"snapshot of some ranks over ipc", snapshotOfRank5("ipc://s"), []string{"Workers[0].Sources[0].Snapshot"}},
		{"bad snapshot", source(config.Source{Connect: "tcp://h:1", Snapshot: "tcp://h"}), []string{"Workers[0].Sources[0].Snapshot"}},
		{"snapshot of an engine without", source(config.Source{Engine: feed.EngineTRTLLM, Connect: "tcp://h:1", Snapshot: "tcp://h:5"}), []string{"Workers[0].Sources[0].Snapshot"}},
		{"SMG", connect("smg://h:1"), nil},
		{"OpenEngine", connect("openengine://[::1]:65535"), nil},
		{"gRPC without a port", connect("smg://h"), []string{"Workers[0].Sources[0].Connect"}},
		{"gRPC at any port", connect("openengine://h:0"), []string{"Workers[0].Sources[0].Connect"}},
		{"gRPC at any host", connect("smg://*:1"), []string{"Workers[0].Sources[0].Connect"}},
		{"gRPC with another scheme", connect("grpc://h:1"), []string{"Workers[0].Sources[0].Connect"}},
		{"gRPC with ranks", source(config.Source{Connect: "smg://h:65535", DPSize: 8}), nil},
		{"gRPC with a replay socket", source(config.Source{Connect: "smg://h:1", Replay: "tcp://h:2"}), []string{"Workers[0].Sources[0].Replay"}},
		{"gRPC with a snapshot socket", source(config.Source{Connect: "smg://h:1", Snapshot: "tcp://h:2"}), []string{"Workers[0].Sources[0].Snapshot"}},
		{"a replay by gRPC", source(config.Source{Connect: "tcp://h:1", Replay: "smg://h:2"}), []string{"Workers[0].Sources[0].Replay"}},
		{"gRPC with a topic", source(config.Source{Connect: "smg://h:1", Topic: "kv"}), []string{"Workers[0].Sources[0].Topic"}},
		{"ranks by gRPC", source(config.Source{Connect: "smg://h:1", DPSize: 2, Ranks: []config.RankEndpoints{
			{Rank: 0, Connect: "smg://h:1"}, {Rank: 1, Connect: "smg://h:2", Replay: "tcp://h:3"},
		}}), []string{"Workers[0].Sources[0].Ranks[1].Replay"}},
		{"replay", source(config.Source{Connect: "tcp://h:1", Replay: "tcp://h"}), []string{"Workers[0].Sources[0].Replay"}},
		{"topic", source(config.Source{Connect: "tcp://h:1", Topic: "kv@\n"}), []string{"Workers[0].Sources[0].Topic"}},
		{"endpoint and labels", config.Config{Workers: []config.Worker{{
			Name: "w", Endpoint: "a\tb", Labels: map[string]string{"": "x", "zone": "\xff"},
			Sources: []config.Source{{Connect: "tcp://h:1"}},
		}}}, []string{"Workers[0].Endpoint", `Workers[0].Labels[""]`, `Workers[0].Labels["zone"]`}},

		{"largest block size", config.Config{Workers: []config.Worker{{Name: "w", BlockSize: 65_536, Sources: []config.Source{{Connect: "tcp://h:1"}}}}}, nil},
		{"block size too large", config.Config{Workers: []config.Worker{{Name: "w", BlockSize: 65_537, Sources: []config.Source{{Connect: "tcp://h:1"}}}}}, []string{"Workers[0].BlockSize"}},
		{"engine", source(config.Source{Connect: "tcp://h:1", Engine: "vLLM"}), []string{"Workers[0].Sources[0].Engine"}},
		{"copies", source(config.Source{Connect: "tcp://h:1", Copies: "all"}), []string{"Workers[0].Sources[0].Copies"}},
		{"copies auto", source(config.Source{Connect: "tcp://h:1", Copies: config.CopiesAuto}), nil},
		{"copies counted", source(config.Source{Connect: "tcp://h:1", Copies: config.CopiesCounted}), nil},
		{"copies announced last", source(config.Source{Connect: "tcp://h:1", Copies: config.CopiesAnnouncedLast}), nil},
		{"ranks below 0", source(config.Source{Connect: "tcp://h:1", DPSize: -1}), []string{"Workers[0].Sources[0].DPSize"}},
		{"most ranks", source(config.Source{Connect: "tcp://h:1", DPSize: 1024}), nil},
		{"too many ranks", source(config.Source{Connect: "tcp://h:1", DPSize: 1025}), []string{"Workers[0].Sources[0].DPSize"}},
		{"the last ranks", source(config.Source{Connect: "tcp://h:1", FirstRank: 1020, DPSize: 4}), nil},
		{"the highest rank", source(config.Source{Connect: "ipc://kv", FirstRank: 1023}), nil},
		{"ranks beyond the highest", source(config.Source{Connect: "tcp://h:1", FirstRank: 1020, DPSize: 5}), []string{"Workers[0].Sources[0].FirstRank"}},
		{"a first rank below 0", source(config.Source{Connect: "tcp://h:1", FirstRank: -1}), []string{"Workers[0].Sources[0].FirstRank"}},
		{"ports count from the first rank", source(config.Source{Connect: "tcp://h:65534", FirstRank: 100, DPSize: 2}), nil},
		{"trtllm's later ranks over ipc", source(config.Source{Engine: feed.EngineTRTLLM, Connect: "ipc://kv", FirstRank: 2, DPSize: 2}), []string{"Workers[0].Sources[0].Connect"}},
		{"listed ranks below the first", source(config.Source{Connect: "tcp://h:1", FirstRank: 4, DPSize: 1, Ranks: []config.RankEndpoints{{Rank: 3, Connect: "tcp://h:1"}}}), []string{"Workers[0].Sources[0].Ranks[0].Rank"}},
		{"last rank's port fits", source(config.Source{Connect: "tcp://h:65534", DPSize: 2}), nil},
		{
			"last rank's port does not fit",
			source(config.Source{Connect: "tcp://h:65535", Replay: "tcp://h:65535", DPSize: 2}),
			[]string{"Workers[0].Sources[0].Connect", "Workers[0].Sources[0].Replay"},
		},
		{"ranks over ipc", source(config.Source{Connect: "ipc://kv", DPSize: 2}), []string{"Workers[0].Sources[0].Connect"}},
		{"trtllm's ranks over ipc", source(config.Source{Engine: feed.EngineTRTLLM, Connect: "ipc://kv", DPSize: 2}), nil},

		{"invalid name", named(""), []string{"Workers[0].Name"}},
		{"no names", named("", ""), []string{"Workers[0].Name", "Workers[1].Name"}},
		{"longest name", named(strings.Repeat("n", 253)), nil},
		{"name too long", named(strings.Repeat("n", 254)), []string{"Workers[0].Name"}},
		{"name that is not UTF-8", named("\xff"), []string{"Workers[0].Name"}},
		{"name with a control character", named("a\nb"), []string{"Workers[0].Name"}},
		{"name with a zero-width space", named("a\u200bb"), []string{"Workers[0].Name"}},
		{"name with a zero-width joiner", named("a\u200db"), []string{"Workers[0].Name"}},
		{"name with a byte order mark", named("\ufeffa"), []string{"Workers[0].Name"}},
		{"name with a change of direction", named("a\u202eb"), []string{"Workers[0].Name"}},
		{"name with a tag character", named("a\U000e0041"), []string{"Workers[0].Name"}},
		{"name with a line separator", named("a\u2028b"), []string{"Workers[0].Name"}},
		{"name with a paragraph separator", named("a\u2029b"), []string{"Workers[0].Name"}},
		{"name twice", named("a", "b", "a"), []string{"Workers[2].Name"}},
		{"no sources", config.Config{Workers: []config.Worker{{Name: "w"}}}, []string{"Workers[0].Sources"}},
		{
			"model too long",
			config.Config{Workers: []config.Worker{{
				Name: "w", Model: strings.Repeat("m", 1025), Sources: []config.Source{{Connect: "tcp://h:1"}},
			}}},
			[]string{"Workers[0].Model"},
		},
		{
			"too many workers",
			config.Config{
				MaxWorkers: 1,
				Workers:    named("a").Workers,
				Listeners:  []config.Listener{{Bind: "tcp://*:1", Worker: "b"}},
			},
			[]string{"Workers"},
		},
		{
			"too many ranks of several sources",
			func() (c config.Config) {
				c = named("a")
				c.Workers[0].Sources[0].DPSize = feed.MaxRanks
				c.Workers[0].Sources = append(c.Workers[0].Sources, config.Source{Connect: "tcp://h:1"})
				return c
			}(),
			[]string{"Workers[0].Sources"},
		},
		{
			"too many sources",
			func() (c config.Config) {
				c = named("a")
				c.MaxSources, c.Workers[0].Sources[0].DPSize = 7, 8
				return c
			}(),
			[]string{"Workers"},
		},
		{"no host", config.Config{Listeners: []config.Listener{{Bind: "tcp://*:1", ReplayHosts: []string{"10.0.0.0/8", "a b"}}}},
			[]string{"Listeners[0].ReplayHosts[1]"}},

		{"bind any", bind("tcp://*:5557"), nil},
		{"bind any port", bind("tcp://[::1]:*"), nil},
		{"bind port 0", bind("tcp://127.0.0.1:0"), nil},
		{"bind ipc", bind("ipc://kv"), nil},
		{"bind nothing", bind(""), []string{"Listeners[0].Bind"}},
		{"bind without port", bind("tcp://*"), []string{"Listeners[0].Bind"}},
		{"bind inproc", bind("inproc://kv"), []string{"Listeners[0].Bind"}},
		{"listener's engine", listener(config.Listener{Bind: "tcp://*:1", Engine: "x"}), []string{"Listeners[0].Engine"}},
		{"listener's copies", listener(config.Listener{Bind: "tcp://*:1", Copies: "x"}), []string{"Listeners[0].Copies"}},
		{"pattern", listener(config.Listener{Bind: "tcp://*:1", Topics: []string{"a*", "[", "", "\n"}}), []string{"Listeners[0].Topics[1]", "Listeners[0].Topics[2]", "Listeners[0].Topics[3]"}},
		{"listener's worker", listener(config.Listener{Bind: "tcp://*:1", Worker: "\x00"}), []string{"Listeners[0].Worker"}},
		{
			"listener's worker named before",
			config.Config{
				Workers:   named("a").Workers,
				Listeners: []config.Listener{{Bind: "tcp://*:1", Worker: "a"}},
			},
			[]string{"Listeners[0].Worker"},
		},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			var got []string
			if err := tt.config.Validate(); err != nil {
				for _, err := range err.(interface{ Unwrap() []error }).Unwrap() {
					var field *config.FieldError
					if !errors.As(err, &field) {
						t.Fatalf("%v is no FieldError", err)
					}
					if !strings.HasPrefix(err.Error(), field.Field+" is ") || field.Allowed == "" {
						t.Errorf("error %q", err)
					}
					got = append(got, field.Field)
				}
			}
			if d := cmp.Diff(tt.want, got); d != "" {
				t.Errorf("fields (-want +got):\n%s", d)
			}
		})
	}
}

// libzmq has a limit of sockets, and the native transport has none.
func TestSocketsOfLibzmqAreLimited(t *testing.T) {
	c := config.Config{MaxSources: 1_000_000}
	for i := range 22 {
		c.Workers = append(c.Workers, config.Worker{
			Name: fmt.Sprint(i), Sources: []config.Source{{Connect: fmt.Sprintf("tcp://h%d:1", i), DPSize: feed.MaxRanks}},
		})
	}
	for _, tt := range []struct {
		connect, listen config.ZMQ
		limited         bool
	}{
		{config.ZMQNative, config.ZMQNative, false},
		{config.ZMQNative, config.ZMQLib, false},
		{config.ZMQLib, config.ZMQNative, true},
		{config.ZMQLib, config.ZMQLib, true},
	} {
		if !tt.connect.Available() || !tt.listen.Available() {
			continue
		}
		c.ConnectZMQ, c.ListenZMQ = tt.connect, tt.listen
		all := config.FieldErrors(c.Validate())
		if limited := len(all) == 1 && all[0].Field == "Workers"; limited != tt.limited || !limited && all != nil {
			t.Errorf("%s to connect, %s to listen: got %v", tt.connect, tt.listen, all)
		}
	}
}

func TestFieldErrorSaysWhatIsAllowed(t *testing.T) {
	sources := []config.Source{{Connect: "tcp://h:1"}}
	for _, tt := range []struct {
		config config.Config
		want   string
	}{
		{
			config.Config{Listeners: []config.Listener{{Bind: "*:5557"}}},
			`Listeners[0].Bind is "*:5557": must be tcp://ADDRESS:PORT with a port of 1 to 65535, or 0 or * for any, or ipc://PATH`,
		},
		{
			config.Config{Workers: []config.Worker{{Name: "a", Sources: sources}, {Name: "a", Sources: sources}}},
			`Workers[1].Name is "a": must be unique: another worker has it`,
		},
		{
			config.Config{Workers: []config.Worker{{Name: "a", Sources: []config.Source{{Connect: "tcp://h:65535", DPSize: 2}}}}},
			`Workers[0].Sources[0].Connect is "tcp://h:65535": must be tcp://HOST:PORT with room for 2 ranks' ports below 65536`,
		},
		{
			config.Config{Workers: []config.Worker{{Sources: sources}}},
			`Workers[0].Name is "": must be 1 to 253 bytes of UTF-8 without control or format characters`,
		},
	} {
		if err := tt.config.Validate(); err == nil || err.Error() != tt.want {
			t.Errorf("got %v, want %s", err, tt.want)
		}
	}
}

func TestWarnings(t *testing.T) {
	const replay = "no replay socket: lost batches are reported and cannot be repaired; want replay, and replay_endpoint of the engine"
	const model = "no model: no request that names a model matches the worker; want model"
	const relay = "a relay of the engine's events leaves some out without telling, so that the worker is degraded (relayed); want the engine's own publisher, tcp://HOST:PORT"
	source := func(connect, replay string) config.Source { return config.Source{Connect: connect, Replay: replay} }
	for _, tt := range []struct {
		name   string
		worker config.Worker
		want   []string
	}{
		{"none", config.Worker{Model: "m", Sources: []config.Source{source("tcp://h:1", "tcp://h:2")}}, nil},
		{"no replay", config.Worker{Model: "m", Sources: []config.Source{source("tcp://h:1", "")}}, []string{replay}},
		{"no model", config.Worker{Sources: []config.Source{source("tcp://h:1", "tcp://h:2")}}, []string{model}},
		{"a second source without replay", config.Worker{Sources: []config.Source{source("tcp://h:1", "tcp://h:2"), source("tcp://h:3", "")}}, []string{model, "source 1: " + replay}},
		{"SMG", config.Worker{Model: "m", Sources: []config.Source{source("smg://h:1", "")}}, []string{relay}},
		{"OpenEngine", config.Worker{Model: "m", Sources: []config.Source{source("openengine://h:1", "")}}, nil},
		{"another engine", config.Worker{Model: "m", Sources: []config.Source{{Engine: feed.EngineKVBM, Connect: "tcp://h:1"}}}, nil},
		{"listed ranks", config.Worker{Model: "m", Sources: []config.Source{{Connect: "tcp://h:1", Ranks: []config.RankEndpoints{{Connect: "tcp://h:1", Replay: "tcp://h:2"}}}}}, nil},
		{"a listed rank without", config.Worker{Model: "m", Sources: []config.Source{{Connect: "tcp://h:1", Replay: "tcp://h:2", Ranks: []config.RankEndpoints{
			{Connect: "tcp://h:1", Replay: "tcp://h:2"}, {Rank: 1, Connect: "tcp://h:3"}}}}}, []string{replay}},
	} {
		var got []string
		for _, w := range tt.worker.Warnings() {
			got = append(got, w.String())
		}
		if d := cmp.Diff(tt.want, got); d != "" {
			t.Errorf("%s (-want +got):\n%s", tt.name, d)
		}
	}
}

func TestFieldErrorPath(t *testing.T) {
	for field, want := range map[string]string{
		"MaxWorkers":                   "max_workers",
		"Workers[0].Sources[1].DPSize": "workers[0].sources[1].dp_size",
		"Listeners[12].ReplayPort":     "listeners[12].replay_port",
		`Workers[0].Labels["A.bC[0]"]`: `workers[0].labels["A.bC[0]"]`,
	} {
		if got := (&config.FieldError{Field: field}).Path(); got != want {
			t.Errorf("%s: got %s, want %s", field, got, want)
		}
	}
}

// snapshotOfRank5 is the config of a source of ranks 0 and 5, with an endpoint of snapshots.
func snapshotOfRank5(snapshot string) config.Config {
	return config.Config{Workers: []config.Worker{{Name: "w", Sources: []config.Source{{
		Connect: "tcp://h:1", Snapshot: snapshot, DPSize: 2, Ranks: []config.RankEndpoints{{Rank: 0, Connect: "tcp://h:1"}, {Rank: 5, Connect: "tcp://h:2"}},
	}}}}}
}
