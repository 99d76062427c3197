package enginehttp_test

import (
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"go.uber.org/goleak"

	"github.com/kvcast/kvcast/ingest/config"
	"github.com/kvcast/kvcast/internal/discovery/enginehttp"
	"github.com/kvcast/kvcast/internal/feed"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// vllm returns what vLLM 0.33.0 has for a dp rank.
func vllm(endpoint, replay string) string {
	return `{"enable_kv_cache_events": true, "publisher": "zmq", "endpoint": "` + endpoint + `", "replay_endpoint": ` + replay +
		`, "buffer_steps": 10000, "hwm": 100000, "max_queue_size": 100000, "topic": ""}`
}

// sglang returns the keys of SGLang 0.5.23's server info that are used, among others.
func sglang(kvEvents string) string {
	return `{"model_path": "/models/m", "served_model_name": "Qwen/Qwen3-0.6B", "page_size": 64, "dp_size": 2, "internal_states": [{"memory_usage": {}}],
		"version": "0.5.23", "frontend": "python", "kv_events": ` + kvEvents + `}`
}

// SGLang does not tell the first of its ranks.
func TestRanksOfSGLangCountFromTheConfiguredFirst(t *testing.T) {
	t.Parallel()
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		_, _ = w.Write([]byte(`{"kv_events": {"publisher": "zmq", "endpoint_host": "*", "endpoint_port_base": 6000, "dp_size": 2}}`)) // the client may have closed the connection
	}))
	defer server.Close()
	w := config.Worker{Name: "w", HTTP: server.URL, Sources: []config.Source{{Engine: feed.EngineSGLang, FirstRank: 1022}}}
	got, _, err := enginehttp.Ask(t.Context(), w)
	if err != nil {
		t.Fatal(err)
	}
	want := config.Source{Engine: feed.EngineSGLang, Connect: "tcp://127.0.0.1:6000", FirstRank: 1022, DPSize: 2}
	if diff := cmp.Diff([]config.Source{want}, got.Sources); diff != "" {
		t.Errorf("(-want +got):\n%s", diff)
	}
	w.Sources[0].FirstRank = 1023
	if _, _, err := enginehttp.Ask(t.Context(), w); err == nil || !strings.HasSuffix(err.Error(), ": kv_events has the publisher \"zmq\" and the dp_size 2; want zmq and 1 to 1") {
		t.Errorf("ranks beyond the highest: got error %v", err)
	}
}

func TestAsk(t *testing.T) {
	t.Parallel()
	const descriptor = `{"publisher": "zmq", "endpoint_host": "*", "endpoint_port_base": 6000, "topic": "", "block_size": 64, "dp_size": 2, "replay_endpoint_port_base": 6100}`
	source := func(e feed.Engine, connect, replay string, dpSize int) config.Worker {
		return config.Worker{Name: "w", Sources: []config.Source{{Engine: e, Connect: connect, Replay: replay, DPSize: dpSize}}}
	}
	ranks := func(all ...config.RankEndpoints) config.Worker {
		w := source(feed.EngineVLLM, all[0].Connect, all[0].Replay, len(all))
		w.Sources[0].Ranks = all
		return w
	}
	first := func(rank int, w config.Worker) config.Worker {
		w.Sources[0].FirstRank = rank
		return w
	}
	asked := func(w config.Worker, blockSize uint32, model string) config.Worker {
		w.BlockSize, w.Model = blockSize, model
		return w
	}
	tests := []struct {
		name   string
		engine feed.Engine
		path   string
		answer string
		want   config.Worker
		err    string // after the URL
	}{
		{"vLLM", feed.EngineVLLM, "/kv_event_sources", `{"0": ` + vllm("tcp://*:6000", `"tcp://*:6100"`) + `}`,
			source(feed.EngineVLLM, "tcp://127.0.0.1:6000", "tcp://127.0.0.1:6100", 1), ""},
		{"vLLM with ranks and no replay", feed.EngineVLLM, "/kv_event_sources", `{"1": ` + vllm("tcp://[::]:6001", "null") + `, "0": ` + vllm("tcp://[::]:6000", "null") + `}`,
			source(feed.EngineVLLM, "tcp://127.0.0.1:6000", "", 2), ""},
		{"vLLM at a port of the system's choice", feed.EngineVLLM, "/kv_event_sources", `{"0": ` + vllm("tcp://127.0.0.1:41001", `"tcp://127.0.0.1:41002"`) + `}`,
			source(feed.EngineVLLM, "tcp://127.0.0.1:41001", "tcp://127.0.0.1:41002", 1), ""},
		{"a rank of a larger deployment", feed.EngineVLLM, "/kv_event_sources", `{"3": ` + vllm("tcp://*:6003", "null") + `}`,
			first(3, source(feed.EngineVLLM, "tcp://127.0.0.1:6003", "", 1)), ""},
		{"ranks of a node of a larger deployment", feed.EngineVLLM, "/kv_event_sources",
			`{"5": ` + vllm("tcp://*:6001", `"tcp://*:6101"`) + `, "4": ` + vllm("tcp://*:6000", `"tcp://*:6100"`) + `}`,
			first(4, source(feed.EngineVLLM, "tcp://127.0.0.1:6000", "tcp://127.0.0.1:6100", 2)), ""},
		{"ranks at ports of the system's choice", feed.EngineVLLM, "/kv_event_sources", `{"4": ` + vllm("tcp://127.0.0.1:41007", `"tcp://127.0.0.1:41008"`) + `, "5": ` + vllm("tcp://127.0.0.1:41001", `"tcp://127.0.0.1:41002"`) + `}`,
			first(4, ranks(config.RankEndpoints{Rank: 4, Connect: "tcp://127.0.0.1:41007", Replay: "tcp://127.0.0.1:41008"},
				config.RankEndpoints{Rank: 5, Connect: "tcp://127.0.0.1:41001", Replay: "tcp://127.0.0.1:41002"})), ""},
		{"a rank that is too large", feed.EngineVLLM, "/kv_event_sources", `{"1024": ` + vllm("tcp://*:6000", "null") + `}`, config.Worker{}, ": it has the dp rank 1024; want 0 to 1023"},
		{"SGLang", feed.EngineSGLang, "/server_info", sglang(descriptor),
			asked(source(feed.EngineSGLang, "tcp://127.0.0.1:6000", "tcp://127.0.0.1:6100", 2), 64, "Qwen/Qwen3-0.6B"), ""},
		{"SGLang's former path", feed.EngineSGLang, "/get_server_info", sglang(descriptor),
			asked(source(feed.EngineSGLang, "tcp://127.0.0.1:6000", "tcp://127.0.0.1:6100", 2), 64, "Qwen/Qwen3-0.6B"), ""},
		{"vLLM that does not tell", feed.EngineVLLM, "/version", `{"version": "0.11.0"}`, source(feed.EngineVLLM, "tcp://127.0.0.1:5557", "tcp://127.0.0.1:5657", 3), ""},
		{"SGLang that does not tell", feed.EngineSGLang, "/get_server_info", `{"served_model_name": "m"}`, source(feed.EngineSGLang, "tcp://127.0.0.1:5557", "tcp://127.0.0.1:5657", 3), ""},

		{"vLLM without events", feed.EngineVLLM, "/kv_event_sources", `{}`, config.Worker{}, ": it publishes no KV-cache events: want --kv-events-config with the publisher zmq at the engine"},
		{"SGLang without events", feed.EngineSGLang, "/server_info", sglang("null"), config.Worker{}, ": it publishes no KV-cache events: want --kv-events-config with the publisher zmq at the engine"},
		{"no JSON", feed.EngineVLLM, "/kv_event_sources", `<html>`, config.Worker{}, ": GET /kv_event_sources: decode the answer: invalid character '<' looking for beginning of value"},
		{"another form", feed.EngineVLLM, "/kv_event_sources", `{"0": {"publisher": "null"}}`, config.Worker{}, `: rank 0 has the publisher "null"; want zmq`},
		{"an engine that connects", feed.EngineVLLM, "/kv_event_sources", `{"0": ` + vllm("tcp://kvcast:5557", "null") + `}`, config.Worker{},
			` has endpoints that kvcast cannot connect to: "tcp://kvcast:5557": this is not an address of 127.0.0.1; an engine that connects to kvcast needs a listener instead of http`},
		{"another host", feed.EngineSGLang, "/server_info", sglang(strings.Replace(descriptor, "*", "169.254.169.254", 1)), config.Worker{},
			` has endpoints that kvcast cannot connect to: "tcp://169.254.169.254:6000": this is not an address of 127.0.0.1; an engine that connects to kvcast needs a listener instead of http`},
		{"no port", feed.EngineSGLang, "/server_info", sglang(strings.Replace(descriptor, "6100", "-1", 1)), config.Worker{},
			` has endpoints that kvcast cannot connect to: "tcp://*:-1"; want tcp://*:PORT`},
		{"too many ranks", feed.EngineSGLang, "/server_info", sglang(strings.Replace(descriptor, `"dp_size": 2`, `"dp_size": 2000000000`, 1)), config.Worker{},
			`: kv_events has the publisher "zmq" and the dp_size 2000000000; want zmq and 1 to 1024`},
		{"a block size that is too large", feed.EngineSGLang, "/server_info", sglang(strings.Replace(descriptor, `"block_size": 64`, `"block_size": 65537`, 1)), config.Worker{},
			`: kv_events has the block_size 65537; want at most 65536`},
		{"too large", feed.EngineVLLM, "/kv_event_sources", `{"` + strings.Repeat("a", 5<<20), config.Worker{}, ": GET /kv_event_sources: the answer has more than 4 MiB"},
		{"redirect", feed.EngineVLLM, "/kv_event_sources", "redirect", config.Worker{}, ": GET /kv_event_sources: status 302 Found; want 200"},
		{"API key", feed.EngineVLLM, "/kv_event_sources", "unauthorized", config.Worker{}, ": GET /kv_event_sources: status 401 Unauthorized; want 200"},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
				switch {
				case r.URL.Path != tt.path:
					http.NotFound(w, r)
				case tt.answer == "redirect":
					http.Redirect(w, r, "/elsewhere", http.StatusFound)
				case tt.answer == "unauthorized":
					w.WriteHeader(http.StatusUnauthorized)
				default:
					_, _ = w.Write([]byte(tt.answer)) // the client may have closed the connection
				}
			}))
			defer server.Close()
			w := source(tt.engine, "tcp://127.0.0.1:5557", "tcp://127.0.0.1:5657", 3)
			w.HTTP = server.URL
			got, told, err := enginehttp.Ask(t.Context(), w)
			if tt.err != "" {
				if err == nil || !strings.HasSuffix(err.Error(), server.URL+tt.err) {
					t.Fatalf("got error %v, want %s", err, tt.err)
				}
				return
			}
			if err != nil {
				t.Fatal(err)
			}
			if err := (config.Config{Workers: []config.Worker{got}}).Validate(); err != nil {
				t.Error(err)
			}
			tt.want.HTTP = server.URL
			if unchanged := cmp.Equal(got, w); told == unchanged {
				t.Errorf("told %t, and the worker is unchanged: %t", told, unchanged)
			}
			if diff := cmp.Diff(tt.want, got); diff != "" {
				t.Errorf("(-want +got):\n%s", diff)
			}
		})
	}
}
