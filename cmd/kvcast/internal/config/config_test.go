package config

import (
	"bytes"
	"fmt"
	"log/slog"
	"math"
	"os"
	"path/filepath"
	"reflect"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/alecthomas/kong"
	"github.com/google/go-cmp/cmp"
	"pgregory.net/rapid"

	ingestconfig "github.com/kvcast/kvcast/ingest/config"
	"github.com/kvcast/kvcast/internal/discovery"
	"github.com/kvcast/kvcast/internal/feed"
	"github.com/kvcast/kvcast/internal/wire"
	"github.com/kvcast/kvcast/server"
)

// readText reads a configuration from a file named f with the given text.
func readText(text string) (*Config, Origins, error) {
	r := newReader()
	r.file("f", []byte(text))
	return r.finish()
}

// compare returns the differences of two configurations, unexported fields included.
func compare(want, got *Config) string {
	return cmp.Diff(want, got, cmp.Exporter(func(reflect.Type) bool { return true }))
}

func TestFileWithEveryKey(t *testing.T) {
	t.Parallel()
	watched, err := filepath.Abs("testdata/workers.yaml")
	if err != nil {
		t.Fatal(err)
	}
	got, _, err := Read(Sources{File: "testdata/whole.yaml"})
	if err != nil {
		t.Fatal(err)
	}
	want := newConfig()
	want.Ingest.Workers = []ingestconfig.Worker{{
		Name: "vllm-0", Model: "Qwen/Qwen3-0.6B", BlockSize: 16, Endpoint: "10.0.0.5:8000", Consolidate: "dedup",
		Labels: map[string]string{"zone": "a", "app.kubernetes.io/part-of": "llm"}, Pools: []string{"lmcache-0"},
		Attention: ingestconfig.Attention{
			ChunkSize: 8192, EAGLEGroups: 0b11, HashSeed: "0", LoRAPaths: map[string]string{"sql": "/adapters/sql", "code": "/adapters/code"},
		},
		Sources: []ingestconfig.Source{{Engine: feed.EngineVLLM, Connect: "tcp://10.0.0.5:5557", Replay: "tcp://10.0.0.5:5558", Snapshot: "tcp://10.0.0.5:5559", DPSize: 1, Copies: ingestconfig.CopiesAuto, Clears: ingestconfig.ClearsDevice}, {Engine: feed.EngineKVBM, Connect: "tcp://10.0.0.5:5567", FirstRank: 4, DPSize: 1, Copies: ingestconfig.CopiesAuto, Clears: ingestconfig.ClearsAuto}},
	}, {
		Name: "lmcache-0", Model: "Qwen/Qwen3-0.6B", Consolidate: "dedup",
		Sources: []ingestconfig.Source{{Engine: feed.EngineLMCache, Connect: "lmcache://10.0.0.9:5555", DPSize: 1, Copies: ingestconfig.CopiesAuto, Clears: ingestconfig.ClearsAuto}},
	}}
	want.Ingest.ConnectZMQ = ingestconfig.ZMQNative
	want.Ingest.Listeners = []ingestconfig.Listener{{Bind: "tcp://*:5557", Engine: feed.EngineLLMDSim, Copies: ingestconfig.CopiesCounted, Clears: ingestconfig.ClearsAll, ReplayPort: 5558, Topics: []string{"kv@*"}, ReplayHosts: []string{"10.0.0.0/8", "*.vllm.svc"}, Attention: ingestconfig.Attention{ChunkSize: 8192, EAGLEGroups: math.MaxUint64}}}
	want.Egress.SMG.Workers = []Authority{{Authority: "vllm-0.example:50051", Worker: "vllm-0"}}
	want.Egress.SGLang.Workers = []Address{{Worker: "vllm-0", Address: "http://10.0.0.7:30000"}}
	want.Egress.Dynamo.WorkerIDs = []WorkerID{{Worker: "vllm-0", ID: math.MaxUint64}}
	want.Discovery = []Discovery{
		{DNS: "vllm.default.svc", Engines: discovery.Engines{Port: 5557, ReplayPort: 5558, Engine: feed.EngineVLLM, Copies: ingestconfig.CopiesAuto, Clears: ingestconfig.ClearsAuto, Model: "m", BlockSize: 16, Pools: []string{"lmcache-0"}}, Interval: 5 * time.Second},
		{
			Kubernetes: Kubernetes{
				Selector: "llm-d.ai/inference-serving=true", Namespaces: []string{"llm-a", "llm-b"}, Kubeconfig: "kubeconfig.yaml", HTTPPort: 8000, DPSize: 1,
				Labels: []string{"llm-d.ai/role"},
			},
			Engines:  discovery.Engines{Port: 5557, ReplayPort: 5558, Engine: feed.EngineVLLM, Copies: ingestconfig.CopiesAuto, Clears: ingestconfig.ClearsAuto, Model: "m", BlockSize: 16, Pools: []string{"lmcache-0"}},
			Interval: 5 * time.Second,
		},
		{Engines: discovery.Engines{Copies: ingestconfig.CopiesAuto, Clears: ingestconfig.ClearsAuto}, File: watched, Interval: 5 * time.Second},
	}
	if diff := compare(want, got); diff != "" {
		t.Errorf("(-want +got):\n%s", diff)
	}
}

func TestEmptyFileIsTheDefault(t *testing.T) {
	t.Parallel()
	for _, text := range []string{"", "# nothing\n", "---\n", "workers:\njournal:\ningest: {}\ndiscovery: []\n", "{}"} {
		got, _, err := readText(text)
		if err != nil {
			t.Errorf("%q: %v", text, err)
		}
		if diff := compare(newConfig(), got); diff != "" {
			t.Errorf("%q (-want +got):\n%s", text, diff)
		}
	}
}

// TestEveryMistakeIsReportedWithItsLine compares the beginnings of the messages with a file. The end of a message may
// depend on package ingest.
func TestEveryMistakeIsReportedWithItsLine(t *testing.T) {
	t.Parallel()
	file := "testdata/mistakes.yaml"
	want, err := os.ReadFile("testdata/mistakes.txt")
	if err != nil {
		t.Fatal(err)
	}
	_, _, err = Read(Sources{File: file})
	if err == nil {
		t.Fatal("no error")
	}
	got, begins := strings.Split(err.Error(), "\n"), strings.Split(strings.TrimSpace(string(want)), "\n")
	for i := range max(len(got), len(begins)) {
		switch {
		case i >= len(got):
			t.Errorf("missing: %s", begins[i])
		case i >= len(begins):
			t.Errorf("unexpected: %s", got[i])
		case !strings.HasPrefix(got[i], begins[i]):
			t.Errorf("got  %s\nwant %s", got[i], begins[i])
		}
	}
}

// TestIngestMistakesAreReportedWithTheirLine covers mistakes that only ingest detects.
func TestIngestMistakesAreReportedWithTheirLine(t *testing.T) {
	t.Parallel()
	for _, tt := range []struct {
		name string
		text string
		want string // beginning of the message
	}{
		{"missing key", "workers:\n- name: a\n  sources:\n  - engine: vllm", `f:4: workers[0].sources[0].connect: "" is not allowed: want tcp://HOST:PORT`},
		{"name taken", "workers:\n- {name: a, sources: [{connect: \"tcp://h:1\"}]}\n- name: a\n  sources: [{connect: \"tcp://h:2\"}]", `f:3: workers[1].name: "a" is not allowed: want unique`},
		{"ports", "workers:\n- name: a\n  sources: [{connect: \"tcp://h:65535\", dp_size: 2}]", `f:3: workers[0].sources[0].connect: "tcp://h:65535" is not allowed: want `},
		{"pattern", "listeners:\n- bind: tcp://*:1\n  topics:\n  - kv@*\n  - \"[\"", `f:5: listeners[0].topics[1]: "[" is not allowed: want a pattern`},
		{"too many", "ingest: {max_workers: 1}\nworkers:\n- {name: a, sources: [{connect: \"tcp://h:1\"}]}\n- {name: b, sources: [{connect: \"tcp://h:2\"}]}", `f:2: workers: 2 is not allowed: want `},
	} {
		t.Run(tt.name, func(t *testing.T) {
			if _, _, err := readText(tt.text); err == nil || !strings.HasPrefix(err.Error(), tt.want) {
				t.Errorf("got  %v\nwant %s", err, tt.want)
			}
		})
	}
}

// withZMQ returns a file with token ids, and with a setting of egress.zmq in line 4.
func withZMQ(setting string) string {
	return "emit_token_ids: true\nretain_token_ids: true\negress: {zmq: {\n" + setting + "}}"
}

func TestConfigFileMistakes(t *testing.T) {
	t.Parallel()
	for _, tt := range []struct {
		text string
		want string
	}{
		{"listen: [a]", `f:1: listen: a list is not allowed: want HOST:PORT or :PORT, such as :50051`},
		{"listen: :50051\nlisten: :50052", `f:2: key "listen" is given twice, first in line 1`},
		{"admin: localhost", `f:1: admin: "localhost" is not allowed: want HOST:PORT or :PORT, or nothing for no admin port`},
		{"log_level: loud", `f:1: log_level: "loud" is not allowed: want debug, info, warn or error`},
		{"journal: memory", `f:1: journal: "memory" is not allowed: want a mapping with store, sync, checkpoint_bytes, stream, replicas, credentials, tls_ca, tls_cert, tls_key, max_bytes or max_age`},
		{"journal:\n  max_bytes:\n", `f:2: journal.max_bytes: has no value: want 1MiB to 1024GiB, such as 64MiB`},
		{"journal:\n  max_bytes: 1023KiB", `f:2: journal.max_bytes: "1023KiB" is not allowed: want 1MiB to 1024GiB, such as 64MiB`},
		{"journal:\n  max_age: 1", `f:2: journal.max_age: "1" is not allowed: want 1s or more, such as 30s`},
		{"journal:\n  maxBytes: 1MiB", `f:2: journal: unknown key "maxBytes", did you mean max_bytes? want store, sync, checkpoint_bytes, stream, replicas, credentials, tls_ca, tls_cert, tls_key, max_bytes or max_age`},
		{"journal:\n  color: 1", `f:2: journal: unknown key "color": want store, sync, checkpoint_bytes, stream, replicas, credentials, tls_ca, tls_cert, tls_key, max_bytes or max_age`},
		{"lisen: \":1\"", `f:1: unknown key "lisen", did you mean listen? want listen, admin, admin_tls, console, log_level, log_format, tracing, journal, cluster, batch, ingest, subscribers, auth, tls, reflection, emit_token_ids, emit_session_ids, emit_reasons, retain_token_ids, retain_block_hashes, token_id_bytes, egress, workers, listeners or discovery`},
		{"batch: {max_blocks: 1e2}", `f:1: batch.max_blocks: "1e2" is not allowed: want 1 to 16384`},
		{"subscribers: {stall: 999ms}", `f:1: subscribers.stall: "999ms" is not allowed: want 1s to 1h`},
		{"subscribers: {max_connection_age: 999ms}", `f:1: subscribers.max_connection_age: "999ms" is not allowed: want 0s for no limit, or 1s to 8760h`},
		{"auth: {tokens: t, open_registration: true}", `f:1: auth.open_registration: "true" is not allowed: want it without auth.tokens and tls.client_ca, with which operators register workers`},
		{"subscribers: {max_connection_age: 0}\nauth: off", `f:2: auth: "off" is not allowed: want a mapping with tokens, certificates, check_interval or open_registration`},
		{"tls:\n  cert: c.pem", `f:2: tls.cert: "c.pem" is not allowed: want tls.key as well, or neither`},
		{"tls: {cert: \"\", key: k.pem}", `f:1: tls.key: "k.pem" is not allowed: want tls.cert as well, or neither`},
		{"ingest: {on_gap: foo}", `f:1: ingest.on_gap: "foo" is not allowed: want report or clear`},
		{"egress: {zmq: {bind: \"tcp://*:1\"}}", `f:1: egress.zmq.bind: is not allowed without token ids, which consumers hash: want retain_token_ids: true and emit_token_ids: true as well`},
		{withZMQ("connect: [\"tcp://*:1\"]"), `f:4: egress.zmq.connect[0]: "tcp://*:1" is not allowed: want tcp://HOST:PORT with a port of 1 to 65535, or ipc://PATH`},
		{withZMQ("publishers: [{worker: a}]"), `f:4: egress.zmq.publishers[0].bind: is missing: want worker and bind`},
		{withZMQ("publishers: [{worker: a, bind: \"tcp://*:65535\", dp_size: 2}]"), `f:4: egress.zmq.publishers[0].bind: "tcp://*:65535" is not allowed: want a port with 1 ports after it, one for each dp rank`},
		{withZMQ("publishers: [{worker: a, bind: \"tcp://*:1\", first_rank: 1023, dp_size: 2}]"), `f:4: egress.zmq.publishers[0].first_rank: "1023" is not allowed: want at most 1022 with 2 dp ranks`},
		{withZMQ("publishers: [{worker: a, bind: \"tcp://*:1\", first_rank: -1}]"), `f:4: egress.zmq.publishers[0].first_rank: "-1" is not allowed: want 0 to 1023`},
		{withZMQ("events: maps"), `f:4: egress.zmq.events: "maps" is not allowed: want map or array`},
		{"egress: {smg: {enabled: true}}", `f:1: egress.smg.enabled: "true" is not allowed: want retain_token_ids: true and emit_token_ids: true as well, since gateways hash token ids`},
		{"egress:\n  smg:\n    workers: [{worker: a}]", `f:3: egress.smg.workers[0].authority: is missing: want authority and worker`},
		{"egress:\n  smg:\n    workers:\n    - {worker: a, authority: x}\n    - {worker: b, authority: x}", `f:5: egress.smg.workers[1].authority: "x" is given twice: want each authority once`},
		{"egress: {sglang: {address: \"\"}}", `f:1: egress.sglang.address: "" is not allowed: want a URL of at most 1024 bytes, with no other {names} than {endpoint} and {worker}`},
		{"egress: {sglang: {address: nothing}}", `f:1: egress.sglang.address: "nothing" is not allowed: want a URL of at most 1024 bytes, with no other {names} than {endpoint} and {worker}`},
		{"egress: {sglang: {address: \"http://{host}\"}}", `f:1: egress.sglang.address: "http://{host}" is not allowed: want a URL of at most 1024 bytes, with no other {names} than {endpoint} and {worker}`},
		{"egress: {zmq: {topic: \"kv@{pod}\"}}", `f:1: egress.zmq.topic: "kv@{pod}" is not allowed: want at most 1024 bytes of UTF-8 without control or format characters, with no other {names} than {worker}, {endpoint}, {rank_endpoint}, {model} and {rank}`},
		{withZMQ("topic: \"\", bind: \"tcp://*:1\", publishers: [{worker: a, bind: \"tcp://*:2\"}]"), `f:4: egress.zmq.topic: "" is not allowed: want a topic with bind or connect, whose consumers tell workers apart by it, or only publishers`},
		{withZMQ("topic: \"\", connect: [\"tcp://h:1\"]"), `f:4: egress.zmq.topic: "" is not allowed: want a topic with bind or connect, whose consumers tell workers apart by it, or only publishers`},
		{"egress:\n  sglang:\n    workers: [{worker: a}]", `f:3: egress.sglang.workers[0].address: is missing: want worker and address`},
		{"egress:\n  sglang:\n    workers:\n    - {worker: a, address: x}\n    - {worker: a, address: y}", `f:5: egress.sglang.workers[1].worker: "a" is given twice: want each worker once`},
		{"egress: {dynamo: {listen: x}}", `f:1: egress.dynamo.listen: "x" is not allowed: want HOST:PORT or :PORT, or nothing for no such port`},
		{"egress:\n  dynamo:\n    worker_ids: [{worker: a, id: -1}]", `f:3: egress.dynamo.worker_ids[0].id: "-1" is not allowed: want 0 to 18446744073709551615`},
		{"egress:\n  dynamo:\n    worker_ids:\n    - worker: a", `f:4: egress.dynamo.worker_ids[0].id: is missing: want the id under which Dynamo's routers know the worker`},
		{"egress:\n  dynamo:\n    worker_ids:\n    - id: 1", `f:4: egress.dynamo.worker_ids[0].worker: is missing: want the name of a worker`},
		{"egress:\n  dynamo:\n    worker_ids:\n    - {worker: a, id: 1}\n    - {worker: a, id: 2}", `f:5: egress.dynamo.worker_ids[1].worker: "a" is given twice: want each worker once`},
		{"egress:\n  dynamo:\n    worker_ids:\n    - {worker: a, id: 1}\n    - {worker: b, id: 1}", `f:5: egress.dynamo.worker_ids[1].id: 1 is given twice: want each id once`},
		{"retain_token_ids: true", `f:1: retain_token_ids: "true" is not allowed: want emit_token_ids: true as well, since the index keeps the token ids that entries have`},
		{"emit_token_ids: 1", `f:1: emit_token_ids: "1" is not allowed: want true or false`},
		{"workers: {name: x}", `f:1: workers: a mapping is not allowed: want a list`},
		{"workers: [{name: x}]", `f:1: workers[0].sources: 0 is not allowed: want one source at least`},
		{"workers: [null]", `f:1: workers[0]: "null" is not allowed: want a mapping with name, model, block_size, endpoint, http, consolidate, labels, pool, pools, chunk_size, eagle_groups, hash_seed, lora_paths or sources`},
		{labeled("zone"), `f:5: workers[0].labels: "zone" is not allowed: want a mapping of labels`},
		{labeled("[zone]"), `f:5: workers[0].labels: a list is not allowed: want a mapping of labels`},
		{labeled("{zone: [a]}"), `f:5: workers[0].labels["zone"]: a list is not allowed: want a text, which may be ""`},
		{labeled("\n    zone: a\n    rack:\n"), `f:7: workers[0].labels["rack"]: has no value: want a text, which may be ""`},
		{labeled("\n    zone: a\n    rack: b\n    zone: a\n"), `f:8: workers[0].labels: key "zone" is given twice, first in line 6`},
		{labeled("\n    zone: a\n    [zone]: a\n"), `f:7: workers[0].labels: a list is not allowed as a label's key: want a text`},
		{labeled("\n    zone: a\n    ~: a\n"), `f:7: workers[0].labels: "~" is not allowed as a label's key: want a text`},
		{labeled("\n    zone: a\n    \"Model\\t\": a\n"), `f:7: workers[0].labels["Model\t"]: "Model\t" is not allowed: want a key of 1 to 253 bytes of UTF-8 without control or format characters`},
		{labeled("\n    \"\": a\n    zone: a\n"), `f:6: workers[0].labels[""]: "" is not allowed: want a key of 1 to 253 bytes of UTF-8 without control or format characters`},
		{labeled("\n    Model.x[0]: \"a\\tb\"\n"), `f:6: workers[0].labels["Model.x[0]"]: "a\tb" is not allowed: want at most 1024 bytes of UTF-8 without control or format characters`},
		{labeled("{" + manyLabels(65) + "}"), `f:5: workers[0].labels: 65 is not allowed: want at most 64`},
		{"listeners:\n- bind: tcp://*:1\n  topics: kv", `f:3: listeners[0].topics: "kv" is not allowed: want a list`},
		{"ingest: {silence: 9ms}", `f:1: ingest.silence: "9ms" is not allowed: want 0s for never, or 10ms or more, such as 30s`},
		{"ingest: {discovery_wait: -1s}", `f:1: ingest.discovery_wait: "-1s" is not allowed: want 0s to 1h`},
		{"ingest: {start_wait: 61m}", `f:1: ingest.start_wait: "61m" is not allowed: want 0s to 1h`},
		{"log_format: JSON", `f:1: log_format: "JSON" is not allowed: want text or json`},
		{"tracing: {endpoint: \"collector:4317\"}", `f:1: tracing.endpoint: "collector:4317" is not allowed: want http://HOST:PORT, or https://HOST:PORT for TLS; or nothing for no tracing`},
		{"tracing: {endpoint: \"http://:4317\"}", `f:1: tracing.endpoint: "http://:4317" is not allowed: want http://HOST:PORT, or https://HOST:PORT for TLS; or nothing for no tracing`},
		{"tracing: {endpoint: \"http://c:4317/v1/traces\"}", `f:1: tracing.endpoint: "http://c:4317/v1/traces" is not allowed: want http://HOST:PORT, or https://HOST:PORT for TLS; or nothing for no tracing`},
		{"tracing: {sample_ratio: NaN}", `f:1: tracing.sample_ratio: "NaN" is not allowed: want 0 to 1, such as 0.01`},
		{"discovery:\n- {}", `f:2: discovery[0]: has neither dns, kubernetes, inference_pool nor file: want dns with port, kubernetes, inference_pool, or file`},
		{"workers: [{name: a, sources: [{connect: \"tcp://h:1\", copies: Auto}]}]", `f:1: workers[0].sources[0].copies: "Auto" is not allowed: want auto, counted or announced-last`},
		{"workers: [{name: a, sources: [{connect: \"tcp://h:1\", clear: gpu}]}]", `f:1: workers[0].sources[0].clear: "gpu" is not allowed: want auto, device or all`},
		{"listeners: [{bind: \"tcp://*:1\", copies: set}]", `f:1: listeners[0].copies: "set" is not allowed: want auto, counted or announced-last`},
		{"discovery: [{dns: engines, port: 1, copies: set}]", `f:1: discovery[0].copies: "set" is not allowed: want auto, counted or announced-last`},
		{"discovery:\n- dns: engines", `f:2: discovery[0].port: is missing: want 1 to 65535, the port at which each engine publishes, such as 5557`},
		{"discovery:\n- dns: tcp://h:5557\n  port: 1", `f:2: discovery[0].dns: "tcp://h:5557" is not allowed: want the name of a host, such as vllm.default.svc`},
		{"discovery:\n- dns: h\n  port: 0", `f:3: discovery[0].port: "0" is not allowed: want 1 to 65535`},
		{"discovery:\n- file: w.yaml\n  model: m", `f:3: discovery[0].model: is not allowed with file: want file or interval`},
		{"discovery:\n- file: w.yaml\n  interval: 99ms", `f:3: discovery[0].interval: "99ms" is not allowed: want 100ms to 1h`},
		{"discovery: [{fil: w.yaml}]", `f:1: discovery[0]: unknown key "fil", did you mean file? want dns, port, replay_port, engine, copies, clear, model, block_size, pools, kubernetes, inference_pool, namespaces, kubeconfig, http_port, dp_size, labels, file or interval`},
		{"discovery:\n- kubernetes: app=vllm\n  interval: 1s", `f:3: discovery[0].interval: is not allowed with kubernetes: want kubernetes, namespaces, kubeconfig, http_port, dp_size, labels, port, replay_port, engine, copies, clear, model, block_size or pools`},
		{"discovery:\n- kubernetes: app in vllm", `f:2: discovery[0].kubernetes: "app in vllm" is not allowed: want a label selector, such as llm-d.ai/inference-serving=true`},
		{"discovery:\n- kubernetes: \"\"", `f:2: discovery[0].kubernetes: "" is not allowed: want a label selector, such as llm-d.ai/inference-serving=true`},
		{"discovery:\n- kubernetes: app=vllm\n  dns: h", `f:2: discovery[0].kubernetes: is not allowed with dns: want one of the two`},
		{"discovery: [{inference_pool: Pool}]", `f:1: discovery[0].inference_pool: "Pool" is not allowed: want the name of an InferencePool, such as vllm-qwen3`},
		{"discovery: [{inference_pool: p, kubernetes: app=vllm}]", `f:1: discovery[0].inference_pool: is not allowed with kubernetes: want one of the two`},
		{"discovery: [{inference_pool: p, namespaces: [a, \"*\"]}]", `f:1: discovery[0].namespaces: "*" is not allowed with inference_pool: want the namespaces that have a pool of the name`},
		{"discovery: [{inference_pool: p, interval: 1s}]", `f:1: discovery[0].interval: is not allowed with inference_pool: want inference_pool, namespaces, kubeconfig, http_port, dp_size, labels, port, replay_port, engine, copies, clear, model, block_size or pools`},
		{"discovery: [{kubernetes: app=vllm, namespaces: [LLM]}]", `f:1: discovery[0].namespaces[0]: "LLM" is not allowed: want the name of a namespace, or * for all`},
		{"discovery: [{kubernetes: app=vllm, labels: [a b]}]", `f:1: discovery[0].labels[0]: "a b" is not allowed: want the key of a label, such as llm-d.ai/role`},
		{"workers: [{name: a, http: \"http://h:1/v1\"}]", `f:1: workers[0].http: "http://h:1/v1" is not allowed: want http://HOST:PORT or https://HOST:PORT`},
		{"workers: [{name: a, http: \"http://h:1\", sources: [{engine: kvbm}]}]", `f:1: workers[0].http: "http://h:1" is not allowed: want none unless the worker has one source, of the engine vllm or sglang`},
		{"discovery: [w.yaml]", `f:1: discovery[0]: "w.yaml" is not allowed: want a mapping with dns, port, replay_port, engine, copies, clear, model, block_size, pools, kubernetes, inference_pool, namespaces, kubeconfig, http_port, dp_size, labels, file or interval`},
		{"- listen", `f:1: a list is not allowed: want a mapping with listen, admin, admin_tls, console, log_level, log_format, tracing, journal, cluster, batch, ingest, subscribers, auth, tls, reflection, emit_token_ids, emit_session_ids, emit_reasons, retain_token_ids, retain_block_hashes, token_id_bytes, egress, workers, listeners or discovery`},
		{"listen: :1\n---\nadmin: :2", `f:2: a second document is not allowed: want one`},
		{"listen: :1\nadmin: \"", `f: yaml: line 2: found unexpected end of stream`},
		{"listen: *a", `f: yaml: unknown anchor 'a' referenced`},
	} {
		t.Run(tt.text, func(t *testing.T) {
			if _, _, err := readText(tt.text); err == nil || err.Error() != tt.want {
				t.Errorf("got  %v\nwant %s", err, tt.want)
			}
		})
	}
}

// labeled is a file with a worker that has labels, in line 5.
func labeled(labels string) string {
	return "workers:\n- name: a\n  sources:\n  - connect: tcp://h:1\n  labels: " + labels
}

func manyLabels(n int) string {
	var labels []string
	for i := range n {
		labels = append(labels, fmt.Sprintf("l%d: a", i))
	}
	return strings.Join(labels, ", ")
}

func TestLabels(t *testing.T) {
	t.Parallel()
	for _, tt := range []struct {
		labels string
		want   map[string]string
	}{
		{"", nil},
		{"{}", nil},
		{"~", nil},
		{"{zone: a, rack: \"\"}", map[string]string{"zone": "a", "rack": ""}},
		{"{1: 2, true: null-ish, \"null\": \"null\", 2001-01-01: 1e3}", map[string]string{"1": "2", "true": "null-ish", "null": "null", "2001-01-01": "1e3"}},
		{"{\"a.b/c[d]\": \"{x}, y: z\"}", map[string]string{"a.b/c[d]": "{x}, y: z"}},
		{"&l {zone: &z a, rack: *z}", map[string]string{"zone": "a", "rack": "a"}},
		{"{<<: merge}", map[string]string{"<<": "merge"}},
		{"{" + manyLabels(64) + "}", func() map[string]string {
			all := make(map[string]string)
			for i := range 64 {
				all[fmt.Sprintf("l%d", i)] = "a"
			}
			return all
		}()},
	} {
		c, _, err := readText(labeled(tt.labels))
		if err != nil {
			t.Errorf("%s: %v", tt.labels, err)
			continue
		}
		if diff := cmp.Diff(tt.want, c.Ingest.Workers[0].Labels); diff != "" {
			t.Errorf("%s: labels (-want +got):\n%s", tt.labels, diff)
		}
		if diff := cmp.Diff(tt.want, c.Ingest.Workers[0].Labels); diff != "" {
			t.Errorf("%s: labels for ingest (-want +got):\n%s", tt.labels, diff)
		}
	}
}

func TestVariableAndFlagMistakes(t *testing.T) {
	t.Parallel()
	for _, tt := range []struct {
		name string
		from Sources
		want string
	}{
		{"variable", Sources{Environ: []string{"KVCAST_JOURNAL_MAX_BYTES=5k"}}, `KVCAST_JOURNAL_MAX_BYTES: "5k" is not allowed: want 1MiB to 1024GiB, such as 64MiB`},
		{"empty variable", Sources{Environ: []string{"KVCAST_INGEST_MAX_WORKERS="}}, `KVCAST_INGEST_MAX_WORKERS: "" is not allowed: want 1 to 1000000`},
		{"unknown journal", Sources{Environ: []string{"KVCAST_JOURNAL=file"}},
			`KVCAST_JOURNAL: "file" is not allowed: want memory, file:DIR, or nats://HOST:PORT (or tls://HOST:PORT), several separated by commas`},
		{"sync without a journal in files", Sources{Flags: map[string]string{"journal-sync": "always"}},
			`--journal-sync: "always" is not allowed with the journal in memory: want a journal in file:DIR, set with --journal`},
		{"replicas of a journal in files", Sources{Flags: map[string]string{"journal": "file:d", "journal-replicas": "3"}},
			`--journal-replicas: "3" is not allowed with the journal in file:d: want a journal in NATS servers, set with --journal`},
		{"no routers with a journal in files", Sources{Flags: map[string]string{"cluster-serve": "false", "journal": "file:/x"}},
			`--cluster-serve: "false" is not allowed with the journal in file:/x: want a journal in NATS servers, set with --journal`},
		{"neither engines nor routers", Sources{Flags: map[string]string{"cluster-serve": "false", "cluster-ingest": "false", "journal": "nats://h"}},
			`--cluster-serve: "false" is not allowed: want true where cluster.ingest is false`},
		{"a server's name with a space", Sources{Flags: map[string]string{"cluster-name": "a b"}},
			`--cluster-name: "a b" is not allowed: want at most 64 letters, digits, '-', '_' and '.', or nothing for the host's name`},
		{"no engines with a journal in memory", Sources{Flags: map[string]string{"cluster-ingest": "false"}},
			`--cluster-ingest: "false" is not allowed with the journal in memory: want a journal in NATS servers, set with --journal`},
		{"certificate for NATS without its key", Sources{Flags: map[string]string{"journal": "nats://a:1,nats://b", "journal-tls-cert": "c"}},
			`--journal-tls-cert: "c" is not allowed: want journal.tls_key as well, or neither`},
		{"misspelt variable", Sources{Environ: []string{"KVCAST_JOURNAL_MAXBYTES=1GiB"}}, `KVCAST_JOURNAL_MAXBYTES: unknown variable, did you mean KVCAST_JOURNAL_MAX_BYTES?`},
		{"misspelt variable of tokens", Sources{Environ: []string{"KVCAST_TOKENS=t", "KVCAST_TOKEN=u"}}, `KVCAST_TOKENS: unknown variable, did you mean KVCAST_AUTH_TOKENS, the file of the tokens that a server accepts, or KVCAST_TOKEN, the token that a client sends?`},
		{"certificate alone", Sources{Environ: []string{"KVCAST_TLS_CERT=c.pem"}}, `KVCAST_TLS_CERT: "c.pem" is not allowed: want tls.key as well, or neither`},
		{"TLS of the admin port without a certificate", Sources{Flags: map[string]string{"admin-tls": "true"}}, `--admin-tls: "true" is not allowed: want tls.cert as well`},
		{"key alone", Sources{Flags: map[string]string{"tls-key": "k.pem"}}, `--tls-key: "k.pem" is not allowed: want tls.cert as well, or neither`},
		{"port", Sources{Environ: []string{"ZMQ_PORT=:5557"}}, `ZMQ_PORT: ":5557" is not allowed: want a port, 1 to 65535, such as 5557`},
		{"line of a variable", Sources{Environ: []string{"KVCAST_WORKER=name=a,connect=tcp://h:1\n\nname=b,connect=h"}}, `KVCAST_WORKER, line 2: connect: "h" is not allowed: want tcp://HOST:PORT, smg://HOST:PORT, openengine://HOST:PORT, lmcache://HOST:PORT, lmcache-coordinator://HOST:PORT or mooncake://HOST:PORT with a port of 1 to 65535, ipc://PATH, or workers://disk or workers://external, with ?max_age=DURATION of 1s to 8760h or without`},
		{"flag", Sources{Flags: map[string]string{"subscribers-progress": "1ms"}}, `--subscribers-progress: "1ms" is not allowed: want 100ms to 1h`},
		{"worker", Sources{Workers: []string{"name=,connect=tcp://h:1"}}, `--worker name=,connect=tcp://h:1: name: "" is not allowed: want 1 to 253 bytes of UTF-8 without control or format characters`},
		{"worker's rank", Sources{Workers: []string{"name=a,connect=tcp://h:1,first_rank=1024"}}, `--worker name=a,connect=tcp://h:1,first_rank=1024: first_rank: "1024" is not allowed: want 0 to 1023`},
		{"worker's ranks", Sources{Workers: []string{"name=a,connect=tcp://h:1,first_rank=1023,dp_size=2"}}, `--worker name=a,connect=tcp://h:1,first_rank=1023,dp_size=2: first_rank: 1023 is not allowed: want 0 to 1022 with 2 ranks`},
		{"worker's number", Sources{Workers: []string{"name=a,connect=tcp://h:1,dp_size=0"}}, `--worker name=a,connect=tcp://h:1,dp_size=0: dp_size: "0" is not allowed: want 1 to 1024`},
		{"worker's copies", Sources{Workers: []string{"name=a,connect=tcp://h:1,copies=all"}}, `--worker name=a,connect=tcp://h:1,copies=all: copies: "all" is not allowed: want auto, counted or announced-last`},
		{"listener's copies", Sources{Binds: []string{"tcp://*:1,copies="}}, `--bind tcp://*:1,copies=: copies: "" is not allowed: want auto, counted or announced-last`},
		{"worker's engine", Sources{Workers: []string{"name=a,connect=tcp://h:1,engine=Vllm"}}, `--worker name=a,connect=tcp://h:1,engine=Vllm: engine: "Vllm" is not allowed: want vllm, sglang, trtllm, kvbm, llm-d-sim, lmcache, lmcache-coordinator, mooncake or workers`},
		{"endpoint", Sources{Binds: []string{"tcp://h"}}, `--bind tcp://h: bind: "tcp://h" is not allowed: want tcp://ADDRESS:PORT with a port of 1 to 65535, or 0 or * for any, or ipc://PATH`},
		{"topic", Sources{Binds: []string{"tcp://*:1,topic=["}}, `--bind tcp://*:1,topic=[: topics[0]: "[" is not allowed: want a pattern as of path.Match`},
		{"no file", Sources{File: "testdata/none.yaml"}, `read configuration: open testdata/none.yaml: no such file or directory`},
	} {
		t.Run(tt.name, func(t *testing.T) {
			if _, _, err := Read(tt.from); err == nil || err.Error() != tt.want {
				t.Errorf("got  %v\nwant %s", err, tt.want)
			}
		})
	}
}

// TestEngineAliases reads each alias from a file and from a flag.
func TestEngineAliases(t *testing.T) {
	t.Parallel()
	for name, want := range map[string]feed.Engine{
		"vllm": feed.EngineVLLM, "VLLM": feed.EngineVLLM, "GPU": feed.EngineVLLM,
		"trtllm": feed.EngineTRTLLM, "TRTLLM": feed.EngineTRTLLM, "TensorRT-LLM": feed.EngineTRTLLM,
		"kvbm": feed.EngineKVBM, "KVBM": feed.EngineKVBM,
		"sglang": feed.EngineSGLang, "llm-d-sim": feed.EngineLLMDSim,
	} {
		inFile, _, err := readText(fmt.Sprintf("workers: [{name: a, sources: [{engine: %s, connect: \"tcp://h:1\"}]}]", name))
		if err != nil {
			t.Error(err)
			continue
		}
		byFlag, _, err := Read(Sources{Workers: []string{"name=a,connect=tcp://h:1,engine=" + name}})
		if err != nil {
			t.Error(err)
			continue
		}
		for by, c := range map[string]*Config{"file": inFile, "flag": byFlag} {
			if got := c.Ingest.Workers[0].Sources[0].Engine; got != want {
				t.Errorf("%s of a %s: got %s, want %s", name, by, got, want)
			}
		}
	}
	for _, name := range []string{"", "gpu", "Vllm", "Kvbm", "SGLang", "SGLANG", "tensorrt-llm", "LLM-D-SIM"} {
		_, _, err := readText(fmt.Sprintf("workers: [{name: a, sources: [{engine: %q, connect: \"tcp://h:1\"}]}]", name))
		if want := fmt.Sprintf("f:1: workers[0].sources[0].engine: %q is not allowed: want vllm, sglang, trtllm, kvbm, llm-d-sim, lmcache, lmcache-coordinator, mooncake or workers", name); err == nil || err.Error() != want {
			t.Errorf("got  %v\nwant %s", err, want)
		}
	}
}

// TestVariablesOfKubernetesServicesAreIgnored sets the variables that Kubernetes sets for a
// service named kvcast.
func TestVariablesOfKubernetesServicesAreIgnored(t *testing.T) {
	t.Parallel()
	_, _, err := Read(Sources{Environ: []string{
		"KVCAST_PORT=tcp://10.0.0.1:50051", "KVCAST_SERVICE_HOST=10.0.0.1", "KVCAST_SERVICE_PORT=50051",
		"KVCAST_PORT_50051_TCP_ADDR=10.0.0.1", "KVCAST_ADMIN_SERVICE_HOST=10.0.0.2", "KVCAST_ADMIN_PORT=tcp://10.0.0.2:9464",
	}})
	if err != nil {
		t.Error(err)
	}
}

// listenerAt is a listener with the defaults.
func listenerAt(bind string) ingestconfig.Listener {
	var l ingestconfig.Listener
	setDefaults(listenerFields(&l))
	l.Bind = bind
	return l
}

func TestFlagsOverrideVariablesOverrideFile(t *testing.T) {
	t.Parallel()
	file := filepath.Join(t.TempDir(), "kvcast.yaml")
	if err := os.WriteFile(file, []byte("listen: \":1\"\nbatch: {max_blocks: 1}\nsubscribers: {max: 1}\nlisteners: [{bind: \"tcp://*:1\"}]\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	got, from, err := Read(Sources{
		File:    file,
		Environ: []string{"KVCAST_BATCH_MAX_BLOCKS=2", "KVCAST_SUBSCRIBERS_MAX=2", "ZMQ_PORT=2", "KVCAST_BIND=tcp://*:3"},
		Flags:   map[string]string{"subscribers-max": "3"},
		Binds:   []string{"tcp://*:4"},
	})
	if err != nil {
		t.Fatal(err)
	}
	want := newConfig()
	want.Listen, want.Pipeline.MaxBlocks, want.Server.MaxSubscribers = ":1", 2, 3
	for _, bind := range []string{"tcp://*:1", "tcp://*:3", "tcp://*:2", "tcp://*:4"} {
		want.Ingest.Listeners = append(want.Ingest.Listeners, listenerAt(bind))
	}
	if diff := compare(want, got); diff != "" {
		t.Errorf("(-want +got):\n%s", diff)
	}
	for path, want := range map[string]string{
		"listen": file + ":1", "batch.max_blocks": "KVCAST_BATCH_MAX_BLOCKS", "subscribers.max": "--subscribers-max",
		"listeners[0]": file + ":4", "listeners[2]": "ZMQ_PORT", "listeners[3]": "--bind tcp://*:4",
	} {
		if got := from[path].String(); got != want {
			t.Errorf("%s is from %q, want %q", path, got, want)
		}
	}
}

// TestDefaultListener checks that only a configuration without a file, workers, listeners and discovery has a listener.
func TestDefaultListener(t *testing.T) {
	t.Parallel()
	bound := listenerAt("tcp://*:5557")
	empty := filepath.Join(t.TempDir(), "kvcast.yaml")
	if err := os.WriteFile(empty, []byte("listen: \":1\"\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	for _, tt := range []struct {
		name string
		from Sources
		want []ingestconfig.Listener
	}{
		{"nothing", Sources{}, []ingestconfig.Listener{bound}},
		{"other things", Sources{Environ: []string{"KVCAST_BATCH_MAX_BLOCKS=2", "ZMQ_PORT=tcp://10.0.0.1:5557"}, Flags: map[string]string{"listen": ":1"}}, []ingestconfig.Listener{bound}},
		{"an empty file", Sources{File: empty}, nil},
		{"a worker", Sources{Workers: []string{"name=a,connect=tcp://h:1"}}, nil},
	} {
		t.Run(tt.name, func(t *testing.T) {
			got, from, err := Read(tt.from)
			if err != nil {
				t.Fatal(err)
			}
			if diff := cmp.Diff(tt.want, got.Ingest.Listeners); diff != "" {
				t.Errorf("listeners (-want +got):\n%s", diff)
			}
			if byDefault := from.ListensByDefault(); byDefault != (tt.want != nil) {
				t.Errorf("origin of the listener: got %q", from["listeners[0]"])
			}
		})
	}
}

// TestEverySettingIsAFlag builds the flags with kong, and reads the default of each.
func TestEverySettingIsAFlag(t *testing.T) {
	t.Parallel()
	var cmd struct {
		Settings kong.Plugins `embed:""`
	}
	cmd.Settings = kong.Plugins{Flags()}
	parser, err := kong.New(&cmd)
	if err != nil {
		t.Fatal(err)
	}
	flags := make(map[string]*kong.Flag)
	for _, f := range parser.Model.Flags {
		flags[f.Name] = f
	}
	c := newConfig()
	for _, s := range c.fields().settings("") {
		f := flags[s.flag()]
		if f == nil {
			t.Errorf("%s has no flag --%s", s.path, s.flag())
			continue
		}
		if f.Help == "" {
			t.Errorf("--%s has no help", s.flag())
		}
		if f.HasDefault && !s.set(f.Default) {
			t.Errorf("--%s has the default %q, which is not allowed", s.flag(), f.Default)
		}
		if !s.set(s.text()) {
			t.Errorf("%s does not accept its own default, %q", s.path, s.text())
		}
	}
	if diff := compare(newConfig(), c); diff != "" {
		t.Errorf("the flags have other defaults (-want +got):\n%s", diff)
	}
}

// TestZeroDisables covers settings for which package ingest treats 0 as its default.
func TestZeroDisables(t *testing.T) {
	t.Parallel()
	c, _, err := readText("ingest: {silence: 0s, grace: 0s}\nlisteners: [{bind: \"tcp://*:1\", replay_port: 0}]")
	if err != nil {
		t.Fatal(err)
	}
	if got := c.Ingest; got.Silence >= 0 || got.Grace >= 0 || got.Listeners[0].ReplayPort >= 0 {
		t.Errorf("got silence %v, grace %v and replay port %d, want all negative", got.Silence, got.Grace, got.Listeners[0].ReplayPort)
	}
}

func TestSettingNames(t *testing.T) {
	t.Parallel()
	s := setting{path: "ingest.max_blocks_per_rank", value: new(value)}
	if s.flag() != "ingest-max-blocks-per-rank" || s.variable() != "KVCAST_INGEST_MAX_BLOCKS_PER_RANK" {
		t.Errorf("got %s and %s", s.flag(), s.variable())
	}
	s = setting{path: "journal.store", value: &value{namesSection: true}}
	if s.flag() != "journal" || s.variable() != "KVCAST_JOURNAL" {
		t.Errorf("got %s and %s", s.flag(), s.variable())
	}
}

// TestWriteRoundTrips checks that written configurations can be saved and read back.
func TestWriteRoundTrips(t *testing.T) {
	t.Parallel()
	rapid.Check(t, func(t *rapid.T) {
		want := drawConfig(t)
		var written bytes.Buffer
		if err := want.Write(&written, Origins{
			"listen": {"f", 1}, "journal.max_age": {"KVCAST_JOURNAL_MAX_AGE", 0}, "workers[0]": {"--worker a\nb: c", 0}, "listeners[0]": {"f", 7},
		}); err != nil {
			t.Fatal(err)
		}
		got, _, err := readText(written.String())
		if err != nil {
			t.Fatalf("%v in:\n%s", err, written.String())
		}
		if diff := compare(want, got); diff != "" {
			t.Fatalf("(-want +got):\n%s\nof:\n%s", diff, written.String())
		}
	})
}

// drawConfig draws a valid configuration.
func drawConfig(t *rapid.T) *Config {
	c := newConfig()
	ports := rapid.IntRange(1, 60_000)
	c.Listen = rapid.SampledFrom([]string{":0", "[::1]:1", "localhost:65535"}).Draw(t, "listen")
	c.Admin = rapid.SampledFrom([]string{"", ":1"}).Draw(t, "admin")
	c.LogLevel = rapid.SampledFrom([]slog.Level{slog.LevelDebug, slog.LevelInfo, slog.LevelWarn, slog.LevelError}).Draw(t, "log level")
	switch rapid.IntRange(0, 2).Draw(t, "store") {
	case 1:
		c.Journal.Store = "file:/var/lib/kv cast"
		c.Journal.Sync = rapid.SampledFrom([]time.Duration{0, 100 * time.Millisecond, time.Hour}).Draw(t, "sync")
	case 2:
		c.Journal.Store = "nats://a:4222,tls://b"
		c.Journal.Stream, c.Journal.Replicas = "s", rapid.SampledFrom([]int{1, 3, 5}).Draw(t, "replicas")
		c.Journal.Credentials, c.Journal.CA, c.Journal.Cert, c.Journal.Key = "c", "ca.pem", "cert.pem", "key.pem"
	}
	c.Journal.Retention.MaxBytes = int(rapid.Int64Range(minBytes, maxBytes).Draw(t, "bytes"))
	c.Journal.Retention.MaxAge = time.Duration(rapid.Int64Range(int64(time.Second), 1<<62).Draw(t, "age"))
	c.Pipeline.Timeout = time.Duration(rapid.Int64Range(0, int64(15*time.Second)).Draw(t, "timeout"))
	c.Pipeline.MaxBlocks = rapid.IntRange(1, 16_384).Draw(t, "blocks")
	c.MaxBlocks = rapid.IntRange(1, 1<<31-1).Draw(t, "blocks of all workers")
	c.MaxAttributeBytes = (rapid.Int64Range(minBytes, maxBytes).Draw(t, "attributes"))
	c.Ingest.Silence = rapid.SampledFrom([]time.Duration{-1, 10 * time.Millisecond, time.Hour}).Draw(t, "silence")
	c.Ingest.Grace = rapid.SampledFrom([]time.Duration{-1, 1, 1 << 62}).Draw(t, "grace")
	c.DiscoveryWait = rapid.SampledFrom([]time.Duration{0, 1, time.Hour}).Draw(t, "discovery wait")
	c.StartWait = rapid.SampledFrom([]time.Duration{0, 1, time.Hour}).Draw(t, "start wait")
	c.Ingest.MaxWorkers = rapid.IntRange(100, maxCount).Draw(t, "workers")
	c.Ingest.MaxSources = rapid.IntRange(1000, maxCount).Draw(t, "sources")
	c.Ingest.MaxRanks = rapid.IntRange(1, maxCount).Draw(t, "ranks")
	for _, bytes := range []*int64{&c.Ingest.WorkerBytes, &c.Ingest.SaltBytes, &c.Ingest.ReceiveBufferBytes, &c.Ingest.ReorderBufferBytes, &c.Ingest.PoolBytes} {
		*bytes = (rapid.Int64Range(minBytes, maxBytes).Draw(t, "bytes"))
	}
	c.RegisterHostsText = rapid.SampledFrom([]string{"", "10.0.0.0/8,::1,*.pods"}).Draw(t, "hosts")
	var err error
	if c.RegisterHosts, err = ingestconfig.ParseHosts(slices.DeleteFunc(strings.Split(c.RegisterHostsText, ","), func(s string) bool { return s == "" })); err != nil {
		t.Fatal(err)
	}
	c.Server.MaxSubscribers = rapid.IntRange(1, maxCount).Draw(t, "subscribers")
	c.Server.MaxConnections = rapid.IntRange(1, maxCount).Draw(t, "connections")
	c.Server.MaxConnectionsPerAddress = rapid.IntRange(1, maxCount).Draw(t, "connections of an address")
	c.Server.MaxSnapshots = rapid.IntRange(1, 1024).Draw(t, "snapshots")
	c.Server.MaxSnapshotWait = rapid.SampledFrom([]time.Duration{100 * time.Millisecond, time.Hour}).Draw(t, "snapshot wait")
	c.Server.ResponseBytes = (rapid.IntRange(server.MinResponseBytes, server.MaxResponseBytes).Draw(t, "response"))
	c.Server.MaxFilterBytes = (rapid.Int64Range(server.MinFilterBytes, maxBytes).Draw(t, "filters"))
	c.Server.PingInterval = rapid.SampledFrom([]time.Duration{time.Second, time.Hour}).Draw(t, "ping")
	c.Server.MaxConnectionAge = rapid.SampledFrom([]time.Duration{0, time.Second, time.Hour, year}).Draw(t, "age")
	c.Server.MaxConnectionAgeGrace = rapid.SampledFrom([]time.Duration{time.Second, time.Hour}).Draw(t, "grace")
	if rapid.Bool().Draw(t, "secured") {
		c.TokensFile, c.CertFile, c.KeyFile = "tokens", "/etc/a b/tls.crt", "1"
		c.ClientCAFile, c.CertificatesFile = "ca.crt", "names"
		c.AdminTLS = rapid.Bool().Draw(t, "admin with TLS")
	}
	c.Console = rapid.Bool().Draw(t, "console")
	c.Reflection, c.Server.OpenRegistration = rapid.Bool().Draw(t, "reflection"), c.TokensFile == "" && rapid.Bool().Draw(t, "open registration")
	c.Pipeline.EmitTokenIDs = rapid.Bool().Draw(t, "token ids")
	words := rapid.OneOf(rapid.String(), rapid.SampledFrom([]string{
		"1", "0x1", "1e3", "true", "yes", "null", "~", "# a", "a: b", "'", "\"", "- a", "{a", "*a", "&a", "!a", "%", "@", " a ", "2001-01-01", "\u2028", "\ufeff", "\u0085",
	})).Filter(ingestconfig.Printable)
	names := rapid.SliceOfNDistinct(words.Filter(func(s string) bool { return s != "" && len(s) <= ingestconfig.MaxNameBytes }), 0, 4, rapid.ID).Draw(t, "names")
	engines := rapid.SampledFrom([]feed.Engine{feed.EngineVLLM, feed.EngineSGLang, feed.EngineTRTLLM, feed.EngineKVBM, feed.EngineLLMDSim})
	copies := rapid.SampledFrom([]ingestconfig.Copies{ingestconfig.CopiesAuto, ingestconfig.CopiesCounted, ingestconfig.CopiesAnnouncedLast})
	clears := rapid.SampledFrom([]ingestconfig.Clears{ingestconfig.ClearsAuto, ingestconfig.ClearsDevice, ingestconfig.ClearsAll})
	for i, name := range names {
		w := ingestconfig.Worker{Consolidate: feed.ConsolidateDedup}
		w.Name, w.Model, w.Endpoint = name, words.Draw(t, "model"), words.Draw(t, "endpoint")
		w.BlockSize = rapid.Uint32Max(wire.MaxBlockSize).Draw(t, "block size")
		if labels := rapid.MapOfN(words.Filter(func(s string) bool { return s != "" && len(s) <= ingestconfig.MaxNameBytes }), words, 0, 4).Draw(t, "labels"); len(labels) > 0 {
			w.Labels = labels
		}
		s := ingestconfig.Source{Engine: engines.Draw(t, "engine"), FirstRank: rapid.IntRange(0, 1000).Draw(t, "first rank"), DPSize: rapid.IntRange(1, 20).Draw(t, "dp size"), Topic: words.Draw(t, "topic"), Copies: copies.Draw(t, "copies"), Clears: clears.Draw(t, "clears")}
		s.Connect = fmt.Sprintf("tcp://[fd00::%d]:%d", i+1, ports.Draw(t, "port"))
		w.Sources = []ingestconfig.Source{s}
		if rapid.Bool().Draw(t, "a second source") {
			s.Engine, s.Topic, s.Connect = engines.Draw(t, "second engine"), "", strings.Replace(s.Connect, "fd00", "fd01", 1)
			w.Sources = append(w.Sources, s)
			w.Consolidate = rapid.SampledFrom([]feed.Consolidate{feed.ConsolidateDedup, feed.ConsolidatePassthrough}).Draw(t, "consolidate")
		}
		c.Ingest.Workers = append(c.Ingest.Workers, w)
	}
	for range rapid.IntRange(0, 3).Draw(t, "listeners") {
		l := ingestconfig.Listener{Bind: "tcp://*:*", Engine: engines.Draw(t, "engine"), Copies: copies.Draw(t, "copies"), Clears: clears.Draw(t, "clears"), ReplayPort: rapid.OneOf(rapid.Just(-1), ports).Draw(t, "replay port")}
		l.Topics = rapid.SampledFrom([][]string{nil, {"kv@*"}, {"*", "1", "a: b"}}).Draw(t, "topics")
		c.Ingest.Listeners = append(c.Ingest.Listeners, l)
	}
	for range rapid.IntRange(0, 3).Draw(t, "discovery") {
		var d Discovery
		setDefaults(discoveryFields(&d))
		d.Interval = time.Duration(rapid.Int64Range(int64(100*time.Millisecond), int64(time.Hour)).Draw(t, "interval"))
		if rapid.Bool().Draw(t, "by file") {
			d.File = words.Filter(func(s string) bool { return s != "" }).Draw(t, "file")
		} else {
			d.DNS = rapid.SampledFrom([]string{"1", "engines", "vllm.default.svc", "null", "::1"}).Filter(ingestconfig.ValidHost).Draw(t, "host")
			if rapid.Bool().Draw(t, "among pods") {
				d.DNS, d.Interval = "", discovery.DefaultInterval
				d.Kubernetes.Selector = rapid.SampledFrom([]string{"app=vllm", "a in (b, c),!d", "true"}).Draw(t, "selector")
				d.Kubernetes.Namespaces = rapid.SampledFrom([][]string{nil, {"*"}, {"1", "null"}}).Draw(t, "namespaces")
				if !slices.Contains(d.Kubernetes.Namespaces, "*") && rapid.Bool().Draw(t, "of a pool") {
					d.Kubernetes.Selector, d.Kubernetes.Pool = "", "pool.a"
				}
				d.Kubernetes.Kubeconfig = words.Draw(t, "kubeconfig")
				d.Kubernetes.HTTPPort, d.Kubernetes.DPSize = ports.Draw(t, "http port"), rapid.IntRange(0, feed.MaxRanks).Draw(t, "dp size")
				d.Kubernetes.Labels = rapid.SampledFrom([][]string{nil, {"llm-d.ai/role", "1"}}).Draw(t, "labels")
			}
			d.Engines.Port, d.Engines.ReplayPort = ports.Draw(t, "port"), rapid.OneOf(rapid.Just(0), ports).Draw(t, "replay port")
			d.Engines.Copies, d.Engines.Clears = copies.Draw(t, "copies"), clears.Draw(t, "clears")
			d.Engines.Engine, d.Engines.Model, d.Engines.BlockSize = engines.Draw(t, "engine"), words.Draw(t, "model"), rapid.Uint32Max(wire.MaxBlockSize).Draw(t, "block size")
		}
		c.Discovery = append(c.Discovery, d)
	}
	return c
}

// TestCorruptFilesAreReadOrRejected corrupts files at random positions. A file that is accepted must round-trip.
func TestCorruptFilesAreReadOrRejected(t *testing.T) {
	t.Parallel()
	var files []string
	for _, name := range []string{"whole.yaml", "mistakes.yaml"} {
		text, err := os.ReadFile(filepath.Join("testdata", name))
		if err != nil {
			t.Fatal(err)
		}
		files = append(files, string(text))
	}
	pieces := rapid.SampledFrom([]string{
		"", "*a", "&a ", "[", "]", "{", "}", ": ", "- ", "\n", "\n\n", "|", "~", "!!binary ", "? ", "#", "'", "\"", "\n---\n", "\n...\n", "<<: *a", "\t", "  ", "\xff", "\x00",
	})
	rapid.Check(t, func(t *rapid.T) {
		text := rapid.SampledFrom(append(files, "workers: &a [*a]\nlisteners: *a\n<<: *a")).Draw(t, "file")
		for range rapid.IntRange(1, 4).Draw(t, "breaks") {
			from := rapid.IntRange(0, len(text)).Draw(t, "from")
			to := rapid.IntRange(from, min(from+10, len(text))).Draw(t, "to")
			text = text[:from] + pieces.Draw(t, "piece") + text[to:]
		}
		c, _, err := readText(text)
		if err != nil {
			return
		}
		var written bytes.Buffer
		if err := c.Write(&written, nil); err != nil {
			t.Fatal(err)
		}
		again, _, err := readText(written.String())
		if err != nil {
			t.Fatalf("%v in:\n%s", err, written.String())
		}
		if diff := compare(c, again); diff != "" {
			t.Errorf("(-want +got):\n%s", diff)
		}
	})
}

// TestWorkerWithHTTPNeedsNoEndpoints checks what a worker has whose engine tells its endpoints.
func TestWorkerWithHTTPNeedsNoEndpoints(t *testing.T) {
	t.Parallel()
	for _, text := range []string{
		"workers: [{name: a, http: \"http://vllm-0:8000\"}]",
		"workers: [{name: a, http: \"http://vllm-0:8000\", endpoint: \"vllm-0:8000\", sources: [{engine: vllm, connect: \"tcp://vllm-0:5557\"}]}]",
	} {
		c, _, err := readText(text)
		if err != nil {
			t.Fatal(err)
		}
		want := []ingestconfig.Worker{{
			Name: "a", HTTP: "http://vllm-0:8000", Endpoint: "vllm-0:8000", Consolidate: feed.ConsolidateDedup,
			Sources: []ingestconfig.Source{{Engine: feed.EngineVLLM, Connect: "tcp://vllm-0:5557", DPSize: 1, Copies: ingestconfig.CopiesAuto, Clears: ingestconfig.ClearsAuto}},
		}}
		if diff := cmp.Diff(want, c.Ingest.Workers); diff != "" {
			t.Errorf("%s (-want +got):\n%s", text, diff)
		}
	}
}
