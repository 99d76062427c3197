package main

import (
	"bytes"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/alecthomas/kong"
	"github.com/google/go-cmp/cmp"
	"pgregory.net/rapid"

	"github.com/kvcast/kvcast/feed"
	ingestconfig "github.com/kvcast/kvcast/ingest/config"
	"github.com/kvcast/kvcast/server"
)

// readText reads a configuration from a text as its file, called f.
func readText(text string) (config, origins, error) {
	r := &configReader{config: defaultConfig(), origins: make(origins)}
	r.file("f", []byte(text))
	r.validate()
	return r.config, r.origins, r.err()
}

func TestWholeConfigFile(t *testing.T) {
	got, _, err := readConfig(configSources{file: "testdata/config/whole.yaml"})
	if err != nil {
		t.Fatal(err)
	}
	want := defaultConfig()
	want.Workers = []workerConfig{{
		Name: "vllm-0", Model: "Qwen/Qwen3-0.6B", BlockSize: 16, Endpoint: "10.0.0.5:8000", Consolidate: "dedup",
		Labels:  map[string]string{"zone": "a", "app.kubernetes.io/part-of": "llm"},
		Sources: []sourceConfig{{Engine: feed.EngineVLLM, Connect: "tcp://10.0.0.5:5557", Replay: "tcp://10.0.0.5:5558", DPSize: 1, Copies: ingestconfig.CopiesAuto}, {Engine: feed.EngineKVBM, Connect: "tcp://10.0.0.5:5567", DPSize: 1, Copies: ingestconfig.CopiesAuto}},
	}}
	want.Listeners = []listenerConfig{{Bind: "tcp://*:5557", Engine: feed.EngineLLMDSim, Copies: ingestconfig.CopiesCounted, ReplayPort: 5558, Topics: []string{"kv@*"}, ReplayHosts: []string{"10.0.0.0/8", "*.vllm.svc"}}}
	want.Discovery = []discoveryConfig{
		{DNS: "vllm.default.svc", Port: 5557, ReplayPort: 5558, Engine: feed.EngineVLLM, Copies: ingestconfig.CopiesAuto, Model: "m", BlockSize: 16, Interval: 5 * time.Second},
		{File: "workers.yaml", Engine: feed.EngineVLLM, Copies: ingestconfig.CopiesAuto, Interval: 5 * time.Second},
	}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("(-want +got):\n%s", diff)
	}
}

func TestConfigFileWithNothingSaidIsTheDefault(t *testing.T) {
	for _, text := range []string{"", "# nothing\n", "---\n", "workers:\njournal:\ningest: {}\ndiscovery: []\n", "{}"} {
		got, _, err := readText(text)
		if err != nil {
			t.Errorf("%q: %v", text, err)
		}
		if diff := cmp.Diff(defaultConfig(), got); diff != "" {
			t.Errorf("%q (-want +got):\n%s", text, diff)
		}
	}
}

// TestEveryMistakeIsToldWithItsLine compares with a file of how each line is to
// begin. What ingest allows, which is in its own words, is left out there.
func TestEveryMistakeIsToldWithItsLine(t *testing.T) {
	file := "testdata/config/mistakes.yaml"
	want, err := os.ReadFile("testdata/config/mistakes.txt")
	if err != nil {
		t.Fatal(err)
	}
	_, _, err = readConfig(configSources{file: file})
	if err == nil {
		t.Fatal("no mistake is told")
	}
	got, begins := strings.Split(err.Error(), "\n"), strings.Split(strings.TrimSpace(string(want)), "\n")
	for i := range max(len(got), len(begins)) {
		switch {
		case i >= len(got):
			t.Errorf("missing: %s", begins[i])
		case i >= len(begins):
			t.Errorf("too much: %s", got[i])
		case !strings.HasPrefix(got[i], begins[i]):
			t.Errorf("got  %s\nwant %s", got[i], begins[i])
		}
	}
}

// TestWhatIngestRefusesIsToldWhereItWasSaid has what only ingest can judge.
func TestWhatIngestRefusesIsToldWhereItWasSaid(t *testing.T) {
	for _, tt := range []struct {
		name string
		text string
		want string // how it begins
	}{
		{"missing key", "workers:\n- name: a\n  sources:\n  - engine: vllm", `f:4: workers[0].sources[0].connect: "" is not allowed: want tcp://HOST:PORT`},
		{"name taken", "workers:\n- {name: a, sources: [{connect: \"tcp://h:1\"}]}\n- name: a\n  sources: [{connect: \"tcp://h:2\"}]", `f:3: workers[1].name: "a" is not allowed: want unique`},
		{"ports", "workers:\n- name: a\n  sources: [{connect: \"tcp://h:65535\", dp_size: 2}]", `f:3: workers[0].sources[0].connect: "tcp://h:65535" is not allowed: want `},
		{"pattern", "listeners:\n- bind: tcp://*:1\n  topics:\n  - kv@*\n  - \"[\"", `f:5: listeners[0].topics[1]: "[" is not allowed: want a pattern`},
		{"too many", "ingest: {max_workers: 1}\nworkers:\n- {name: a, sources: [{connect: \"tcp://h:1\"}]}\n- {name: b, sources: [{connect: \"tcp://h:2\"}]}", `f:2: workers: 2 is not allowed: want `},
	} {
		t.Run(tt.name, func(t *testing.T) {
			if _, _, err := readText(tt.text); err == nil || !strings.HasPrefix(err.Error(), tt.want) || goField.MatchString(err.Error()) {
				t.Errorf("got  %v\nwant %s, without the names of Go's fields", err, tt.want)
			}
		})
	}
}

func TestConfigFileMistakes(t *testing.T) {
	for _, tt := range []struct {
		text string
		want string
	}{
		{"listen: [a]", `f:1: listen: a list is not allowed: want HOST:PORT or :PORT, such as :50051`},
		{"listen: :50051\nlisten: :50052", `f:2: "listen" is not allowed twice: it is in line 1 already`},
		{"admin: localhost", `f:1: admin: "localhost" is not allowed: want HOST:PORT or :PORT, or nothing for no admin port`},
		{"log_level: loud", `f:1: log_level: "loud" is not allowed: want debug, info, warn or error`},
		{"journal: memory", `f:1: journal: "memory" is not allowed: want kind, max_bytes or max_age, each with its value`},
		{"journal:\n  max_bytes:\n", `f:2: journal.max_bytes: has no value: want 1MiB to 1024GiB, such as 64MiB`},
		{"journal:\n  max_bytes: 1023KiB", `f:2: journal.max_bytes: "1023KiB" is not allowed: want 1MiB to 1024GiB, such as 64MiB`},
		{"journal:\n  max_age: 1", `f:2: journal.max_age: "1" is not allowed: want 1s or more, such as 30s`},
		{"journal:\n  maxBytes: 1MiB", `f:2: journal: key "maxBytes" is not known, did you mean max_bytes? want kind, max_bytes or max_age`},
		{"journal:\n  color: 1", `f:2: journal: key "color" is not known: want kind, max_bytes or max_age`},
		{"lisen: \":1\"", `f:1: key "lisen" is not known, did you mean listen? want listen, admin, log_level, journal, batch, ingest, subscribers, auth, tls, emit_token_ids, workers, listeners or discovery`},
		{"batch: {max_blocks: 1e2}", `f:1: batch.max_blocks: "1e2" is not allowed: want 1 to 16384`},
		{"subscribers: {stall: 999ms}", `f:1: subscribers.stall: "999ms" is not allowed: want 1s to 1h`},
		{"subscribers: {max_connection_age: 999ms}", `f:1: subscribers.max_connection_age: "999ms" is not allowed: want 0s for no limit, or 1s to 8760h`},
		{"subscribers: {max_connection_age: 0}\nauth: off", `f:2: auth: "off" is not allowed: want tokens, each with its value`},
		{"tls:\n  cert: c.pem", `f:2: tls.cert: "c.pem" is not allowed: want tls.key beside it, or neither`},
		{"tls: {cert: \"\", key: k.pem}", `f:1: tls.key: "k.pem" is not allowed: want tls.cert beside it, or neither`},
		{"ingest: {on_gap: foo}", `f:1: ingest.on_gap: "foo" is not allowed: want report or clear`},
		{"emit_token_ids: 1", `f:1: emit_token_ids: "1" is not allowed: want true or false`},
		{"workers: {name: x}", `f:1: workers: a mapping is not allowed: want a list`},
		{"workers: [{name: x}]", `f:1: workers[0].sources: 0 is not allowed: want one source at least`},
		{"workers: [null]", `f:1: workers[0]: "null" is not allowed: want name, model, block_size, endpoint, consolidate, labels or sources, each with its value`},
		{labeled("zone"), `f:5: workers[0].labels: "zone" is not allowed: want labels, each with its value`},
		{labeled("[zone]"), `f:5: workers[0].labels: a list is not allowed: want labels, each with its value`},
		{labeled("{zone: [a]}"), `f:5: workers[0].labels["zone"]: a list is not allowed: want a text, which may be ""`},
		{labeled("\n    zone: a\n    rack:\n"), `f:7: workers[0].labels["rack"]: has no value: want a text, which may be ""`},
		{labeled("\n    zone: a\n    rack: b\n    zone: a\n"), `f:8: workers[0].labels: "zone" is not allowed twice: it is in line 6 already`},
		{labeled("\n    zone: a\n    [zone]: a\n"), `f:7: workers[0].labels: a list is not allowed for a label's name: want a text`},
		{labeled("\n    zone: a\n    ~: a\n"), `f:7: workers[0].labels: "~" is not allowed for a label's name: want a text`},
		{labeled("\n    zone: a\n    \"Model\\t\": a\n"), `f:7: workers[0].labels["Model\t"]: "Model\t" is not allowed: want keys of 1 to 253 bytes of UTF-8 without control characters`},
		{labeled("\n    \"\": a\n    zone: a\n"), `f:6: workers[0].labels[""]: "" is not allowed: want keys of 1 to 253 bytes of UTF-8 without control characters`},
		{labeled("\n    Model.x[0]: \"a\\tb\"\n"), `f:6: workers[0].labels["Model.x[0]"]: "a\tb" is not allowed: want at most 1024 bytes of UTF-8 without control characters`},
		{labeled("{" + manyLabels(65) + "}"), `f:5: workers[0].labels: 65 is not allowed: want at most 64`},
		{"listeners:\n- bind: tcp://*:1\n  topics: kv", `f:3: listeners[0].topics: "kv" is not allowed: want a list`},
		{"ingest: {silence: 9ms}", `f:1: ingest.silence: "9ms" is not allowed: want 0s for ever, or 10ms or more, such as 30s`},
		{"ingest: {start_wait: 61m}", `f:1: ingest.start_wait: "61m" is not allowed: want 0s to 1h`},
		{"discovery:\n- {}", `f:2: discovery[0]: names no place to find workers: want dns with port, or file`},
		{"workers: [{name: a, sources: [{connect: \"tcp://h:1\", copies: Auto}]}]", `f:1: workers[0].sources[0].copies: "Auto" is not allowed: want auto, counted or announced-last`},
		{"listeners: [{bind: \"tcp://*:1\", copies: set}]", `f:1: listeners[0].copies: "set" is not allowed: want auto, counted or announced-last`},
		{"discovery: [{dns: engines, port: 1, copies: set}]", `f:1: discovery[0].copies: "set" is not allowed: want auto, counted or announced-last`},
		{"discovery:\n- dns: engines", `f:2: discovery[0].port: is missing: want 1 to 65535, where each engine publishes, such as 5557`},
		{"discovery:\n- dns: tcp://h:5557\n  port: 1", `f:2: discovery[0].dns: "tcp://h:5557" is not allowed: want the name of a host, such as vllm.default.svc`},
		{"discovery:\n- dns: h\n  port: 0", `f:3: discovery[0].port: "0" is not allowed: want 1 to 65535`},
		{"discovery:\n- file: w.yaml\n  model: m", `f:3: discovery[0].model: is not allowed with file, where each worker has its own: want file and interval alone`},
		{"discovery:\n- file: w.yaml\n  interval: 99ms", `f:3: discovery[0].interval: "99ms" is not allowed: want 100ms to 1h`},
		{"discovery: [{fil: w.yaml}]", `f:1: discovery[0]: key "fil" is not known, did you mean file? want dns, port, replay_port, engine, copies, model, block_size, file or interval`},
		{"discovery: [w.yaml]", `f:1: discovery[0]: "w.yaml" is not allowed: want dns, port, replay_port, engine, copies, model, block_size, file or interval, each with its value`},
		{"- listen", `f:1: a list is not allowed: want listen, admin, log_level, journal, batch, ingest, subscribers, auth, tls, emit_token_ids, workers, listeners or discovery, each with its value`},
		{"listen: :1\n---\nadmin: :2", `f:2: a second document is not allowed: want one`},
		{"listen: :1\nadmin: \"", `f:2: not valid YAML: found unexpected end of stream`},
		{"listen: *a", `f: not valid YAML: unknown anchor 'a' referenced`},
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
		if diff := cmp.Diff(tt.want, c.Workers[0].Labels); diff != "" {
			t.Errorf("%s: labels (-want +got):\n%s", tt.labels, diff)
		}
		if diff := cmp.Diff(tt.want, c.ingestConfig().Workers[0].Labels); diff != "" {
			t.Errorf("%s: labels for ingest (-want +got):\n%s", tt.labels, diff)
		}
	}
}

func TestVariableAndFlagMistakes(t *testing.T) {
	for _, tt := range []struct {
		name string
		from configSources
		want string
	}{
		{"variable", configSources{environ: []string{"KVCAST_JOURNAL_MAX_BYTES=5k"}}, `KVCAST_JOURNAL_MAX_BYTES: "5k" is not allowed: want 1MiB to 1024GiB, such as 64MiB`},
		{"empty variable", configSources{environ: []string{"KVCAST_INGEST_MAX_WORKERS="}}, `KVCAST_INGEST_MAX_WORKERS: "" is not allowed: want 1 to 1000000`},
		{"variable of what is not built", configSources{environ: []string{"KVCAST_JOURNAL_KIND=file"}}, `KVCAST_JOURNAL_KIND: "file" is not built in this version: want memory`},
		{"misspelt variable", configSources{environ: []string{"KVCAST_JOURNAL_MAXBYTES=1GiB"}}, `KVCAST_JOURNAL_MAXBYTES: the variable is not known: did you mean KVCAST_JOURNAL_MAX_BYTES?`},
		{"misspelt variable of tokens", configSources{environ: []string{"KVCAST_TOKENS=t", "KVCAST_TOKEN=u"}}, `KVCAST_TOKENS: the variable is not known: did you mean KVCAST_AUTH_TOKENS, the file of those that are good, or KVCAST_TOKEN, the one that a client sends?`},
		{"certificate alone", configSources{environ: []string{"KVCAST_TLS_CERT=c.pem"}}, `KVCAST_TLS_CERT: "c.pem" is not allowed: want tls.key beside it, or neither`},
		{"key alone", configSources{flags: map[string]string{"tls-key": "k.pem"}}, `--tls-key: "k.pem" is not allowed: want tls.cert beside it, or neither`},
		{"port", configSources{environ: []string{"ZMQ_PORT=:5557"}}, `ZMQ_PORT: ":5557" is not allowed: want a port, 1 to 65535, such as 5557`},
		{"line of a variable", configSources{environ: []string{"KVCAST_WORKER=name=a,connect=tcp://h:1\n\nname=b,connect=h"}}, `KVCAST_WORKER, line 2: connect "h" is not allowed: want tcp://HOST:PORT with a port of 1 to 65535, or ipc://PATH`},
		{"flag", configSources{flags: map[string]string{"subscribers-progress": "1ms"}}, `--subscribers-progress: "1ms" is not allowed: want 100ms to 1h`},
		{"worker", configSources{workers: []string{"name=,connect=tcp://h:1"}}, `--worker name=,connect=tcp://h:1: name "" is not allowed: want 1 to 253 bytes of UTF-8 without control characters`},
		{"worker's number", configSources{workers: []string{"name=a,connect=tcp://h:1,dp_size=0"}}, `--worker name=a,connect=tcp://h:1,dp_size=0: dp_size "0" is not allowed: want 1 to 1024`},
		{"worker's copies", configSources{workers: []string{"name=a,connect=tcp://h:1,copies=all"}}, `--worker name=a,connect=tcp://h:1,copies=all: copies "all" is not allowed: want auto, counted or announced-last`},
		{"listener's copies", configSources{binds: []string{"tcp://*:1,copies="}}, `--bind tcp://*:1,copies=: copies "" is not allowed: want auto, counted or announced-last`},
		{"worker's engine", configSources{workers: []string{"name=a,connect=tcp://h:1,engine=Vllm"}}, `--worker name=a,connect=tcp://h:1,engine=Vllm: engine "Vllm" is not allowed: want vllm, sglang, trtllm, kvbm or llm-d-sim`},
		{"endpoint", configSources{binds: []string{"tcp://h"}}, `--bind tcp://h: endpoint "tcp://h" is not allowed: want tcp://ADDRESS:PORT with a port of 1 to 65535, or 0 or * for any, or ipc://PATH`},
		{"topic", configSources{binds: []string{"tcp://*:1,topic=["}}, `--bind tcp://*:1,topic=[: topic "[" is not allowed: want a pattern as of path.Match`},
		{"no file", configSources{file: "testdata/config/none.yaml"}, `read configuration: open testdata/config/none.yaml: no such file or directory`},
	} {
		t.Run(tt.name, func(t *testing.T) {
			if _, _, err := readConfig(tt.from); err == nil || err.Error() != tt.want {
				t.Errorf("got  %v\nwant %s", err, tt.want)
			}
		})
	}
}

// TestEnginesGoByTheNamesThatOthersHave reads each from a file and from a flag.
func TestEnginesGoByTheNamesThatOthersHave(t *testing.T) {
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
		byFlag, _, err := readConfig(configSources{workers: []string{"name=a,connect=tcp://h:1,engine=" + name}})
		if err != nil {
			t.Error(err)
			continue
		}
		for by, c := range map[string]config{"file": inFile, "flag": byFlag} {
			if got := c.Workers[0].Sources[0].Engine; got != want {
				t.Errorf("%s of a %s: got %s, want %s", name, by, got, want)
			}
		}
	}
	for _, name := range []string{"", "gpu", "Vllm", "Kvbm", "SGLang", "SGLANG", "tensorrt-llm", "LLM-D-SIM"} {
		_, _, err := readText(fmt.Sprintf("workers: [{name: a, sources: [{engine: %q, connect: \"tcp://h:1\"}]}]", name))
		if want := fmt.Sprintf("f:1: workers[0].sources[0].engine: %q is not allowed: want vllm, sglang, trtllm, kvbm or llm-d-sim", name); err == nil || err.Error() != want {
			t.Errorf("got  %v\nwant %s", err, want)
		}
	}
}

// TestOthersVariablesAreLeftAlone has those that Kubernetes sets for a service
// named kvcast.
func TestOthersVariablesAreLeftAlone(t *testing.T) {
	_, _, err := readConfig(configSources{environ: []string{
		"KVCAST_PORT=tcp://10.0.0.1:50051", "KVCAST_SERVICE_HOST=10.0.0.1", "KVCAST_SERVICE_PORT=50051",
		"KVCAST_PORT_50051_TCP_ADDR=10.0.0.1", "KVCAST_ADMIN_SERVICE_HOST=10.0.0.2", "KVCAST_ADMIN_PORT=tcp://10.0.0.2:9464",
	}})
	if err != nil {
		t.Error(err)
	}
}

func TestFlagsGoOverVariablesAndThoseOverTheFile(t *testing.T) {
	file := filepath.Join(t.TempDir(), "kvcast.yaml")
	if err := os.WriteFile(file, []byte("listen: \":1\"\nbatch: {max_blocks: 1}\nsubscribers: {max: 1}\nlisteners: [{bind: \"tcp://*:1\"}]\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	got, from, err := readConfig(configSources{
		file:    file,
		environ: []string{"KVCAST_BATCH_MAX_BLOCKS=2", "KVCAST_SUBSCRIBERS_MAX=2", "ZMQ_PORT=2", "KVCAST_BIND=tcp://*:3"},
		flags:   map[string]string{"subscribers-max": "3"},
		binds:   []string{"tcp://*:4"},
	})
	if err != nil {
		t.Fatal(err)
	}
	want := defaultConfig()
	want.Listen, want.Batch.MaxBlocks, want.Subscribers.Max = ":1", 2, 3
	for _, bind := range []string{"tcp://*:1", "tcp://*:3", "tcp://*:2", "tcp://*:4"} {
		l := defaultListener()
		l.Bind = bind
		want.Listeners = append(want.Listeners, l)
	}
	if diff := cmp.Diff(want, got); diff != "" {
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

// TestTheDefaultListener checks when there is one: where nothing else is to be read,
// and no file says so on purpose.
func TestTheDefaultListener(t *testing.T) {
	bound := defaultListener()
	bound.Bind = "tcp://*:5557"
	empty := filepath.Join(t.TempDir(), "kvcast.yaml")
	if err := os.WriteFile(empty, []byte("listen: \":1\"\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	for _, tt := range []struct {
		name string
		from configSources
		want []listenerConfig
	}{
		{"nothing", configSources{}, []listenerConfig{bound}},
		{"other things", configSources{environ: []string{"KVCAST_BATCH_MAX_BLOCKS=2", "ZMQ_PORT=tcp://10.0.0.1:5557"}, flags: map[string]string{"listen": ":1"}}, []listenerConfig{bound}},
		{"an empty file", configSources{file: empty}, nil},
		{"a worker", configSources{workers: []string{"name=a,connect=tcp://h:1"}}, nil},
	} {
		t.Run(tt.name, func(t *testing.T) {
			got, from, err := readConfig(tt.from)
			if err != nil {
				t.Fatal(err)
			}
			if diff := cmp.Diff(tt.want, got.Listeners); diff != "" {
				t.Errorf("listeners (-want +got):\n%s", diff)
			}
			if byDefault := from["listeners[0]"] == fromDefault; byDefault != (tt.want != nil) {
				t.Errorf("the listener is from %q", from["listeners[0]"])
			}
		})
	}
}

// TestEverySettingIsAFlag keeps the flags' names and defaults what the settings
// say they are.
func TestEverySettingIsAFlag(t *testing.T) {
	parser, err := kong.New(&serveCmd{})
	if err != nil {
		t.Fatal(err)
	}
	flags := make(map[string]*kong.Flag)
	for _, f := range parser.Model.Flags {
		flags[f.Name] = f
	}
	for _, name := range []string{"help", "config", "check", "worker", "bind"} {
		delete(flags, name)
	}
	c := defaultConfig()
	for _, s := range c.settings() {
		f := flags[s.flag()]
		delete(flags, s.flag())
		if f == nil {
			t.Errorf("%s has no flag --%s", s.key, s.flag())
			continue
		}
		if f.Hidden != s.fixed {
			t.Errorf("--%s is hidden: %v, want %v", s.flag(), f.Hidden, s.fixed)
		}
		if err := s.set(f.Default); f.HasDefault && err != nil {
			t.Errorf("--%s has the default %q: %v", s.flag(), f.Default, err)
		}
		if !s.read(s.text()) {
			t.Errorf("%s does not take its own default, %q", s.key, s.text())
		}
	}
	if diff := cmp.Diff(defaultConfig(), c); diff != "" {
		t.Errorf("the flags have other defaults (-want +got):\n%s", diff)
	}
	for name := range flags {
		t.Errorf("--%s is no setting", name)
	}
}

// TestNothingIsNotTheDefault has the zeros that ingest takes for its defaults.
func TestNothingIsNotTheDefault(t *testing.T) {
	c, _, err := readText("ingest: {silence: 0s, grace: 0s}\nlisteners: [{bind: \"tcp://*:1\", replay_port: 0}]")
	if err != nil {
		t.Fatal(err)
	}
	if got := c.ingestConfig(); got.Silence >= 0 || got.Grace >= 0 || got.Listeners[0].ReplayPort >= 0 {
		t.Errorf("got silence %v, grace %v and replay port %d, want all negative", got.Silence, got.Grace, got.Listeners[0].ReplayPort)
	}
}

func TestSettingNames(t *testing.T) {
	s := setting{key: "ingest.max_blocks_per_rank"}
	if s.flag() != "ingest-max-blocks-per-rank" || s.variable() != "KVCAST_INGEST_MAX_BLOCKS_PER_RANK" {
		t.Errorf("got %s and %s", s.flag(), s.variable())
	}
}

// TestWrittenConfigReadsAsTheSame is what lets one save what is in force.
func TestWrittenConfigReadsAsTheSame(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		want := drawConfig(t)
		var written bytes.Buffer
		if err := want.write(&written, origins{
			"listen": {"f", 1}, "journal.max_age": {"KVCAST_JOURNAL_MAX_AGE", 0}, "workers[0]": {"--worker a\nb: c", 0}, "listeners[0]": {"f", 7},
		}); err != nil {
			t.Fatal(err)
		}
		got, _, err := readText(written.String())
		if err != nil {
			t.Fatalf("%v in:\n%s", err, written.String())
		}
		if diff := cmp.Diff(want, got); diff != "" {
			t.Fatalf("(-want +got):\n%s\nof:\n%s", diff, written.String())
		}
	})
}

// drawConfig draws a configuration that is allowed.
func drawConfig(t *rapid.T) config {
	c := defaultConfig()
	ports := rapid.IntRange(1, 60_000)
	c.Listen = rapid.SampledFrom([]string{":0", "[::1]:1", "localhost:65535"}).Draw(t, "listen")
	c.Admin = rapid.SampledFrom([]string{"", ":1"}).Draw(t, "admin")
	c.LogLevel = rapid.SampledFrom([]string{"debug", "info", "warn", "error"}).Draw(t, "log level")
	c.Journal.MaxBytes = byteSize(rapid.Int64Range(int64(leastBytes), int64(mostBytes)).Draw(t, "bytes"))
	c.Journal.MaxAge = time.Duration(rapid.Int64Range(int64(time.Second), 1<<62).Draw(t, "age"))
	c.Batch.Timeout = time.Duration(rapid.Int64Range(0, int64(15*time.Second)).Draw(t, "timeout"))
	c.Batch.MaxBlocks = rapid.IntRange(1, 16_384).Draw(t, "blocks")
	c.Ingest.MaxBlocks = rapid.IntRange(1, 1<<31-1).Draw(t, "blocks of all workers")
	c.Ingest.MaxAttributeBytes = byteSize(rapid.Int64Range(int64(leastBytes), int64(mostBytes)).Draw(t, "attributes"))
	c.Ingest.Silence = rapid.SampledFrom([]time.Duration{0, 10 * time.Millisecond, time.Hour}).Draw(t, "silence")
	c.Ingest.Grace = time.Duration(rapid.Int64Range(0, 1<<62).Draw(t, "grace"))
	c.Ingest.StartWait = rapid.SampledFrom([]time.Duration{0, 1, time.Hour}).Draw(t, "start wait")
	c.Ingest.MaxWorkers = rapid.IntRange(100, atMost).Draw(t, "workers")
	c.Ingest.MaxSources = rapid.IntRange(1000, atMost).Draw(t, "sources")
	c.Ingest.MaxRanks = rapid.IntRange(1, atMost).Draw(t, "ranks")
	for _, bytes := range []*byteSize{&c.Ingest.WorkerBytes, &c.Ingest.SaltBytes, &c.Ingest.ReceiveBufferBytes, &c.Ingest.ReorderBufferBytes} {
		*bytes = byteSize(rapid.Int64Range(int64(leastBytes), int64(mostBytes)).Draw(t, "bytes"))
	}
	c.Ingest.RegisterHosts = rapid.SampledFrom([]string{"", "10.0.0.0/8,::1,*.pods"}).Draw(t, "hosts")
	c.Subscribers.Max = rapid.IntRange(1, atMost).Draw(t, "subscribers")
	c.Subscribers.MaxConnections = rapid.IntRange(1, atMost).Draw(t, "connections")
	c.Subscribers.MaxConnectionsPerAddress = rapid.IntRange(1, atMost).Draw(t, "connections of an address")
	c.Subscribers.MaxSnapshots = rapid.IntRange(1, 1024).Draw(t, "snapshots")
	c.Subscribers.SnapshotWait = rapid.SampledFrom([]time.Duration{100 * time.Millisecond, time.Hour}).Draw(t, "snapshot wait")
	c.Subscribers.ResponseBytes = byteSize(rapid.IntRange(server.MinResponseBytes, server.MaxResponseBytes).Draw(t, "response"))
	c.Subscribers.FilterBytes = byteSize(rapid.Int64Range(server.MinFilterBytes, int64(mostBytes)).Draw(t, "filters"))
	c.Subscribers.PingInterval = rapid.SampledFrom([]time.Duration{time.Second, time.Hour}).Draw(t, "ping")
	c.Subscribers.MaxConnectionAge = rapid.SampledFrom([]time.Duration{0, time.Second, time.Hour, year}).Draw(t, "age")
	c.Subscribers.MaxConnectionAgeGrace = rapid.SampledFrom([]time.Duration{time.Second, time.Hour}).Draw(t, "grace")
	if rapid.Bool().Draw(t, "secured") {
		c.Auth.Tokens, c.TLS = "tokens", tlsConfig{Cert: "/etc/a b/tls.crt", Key: "1"}
	}
	c.EmitTokenIDs = rapid.Bool().Draw(t, "token ids")
	words := rapid.OneOf(rapid.String(), rapid.SampledFrom([]string{
		"1", "0x1", "1e3", "true", "yes", "null", "~", "# a", "a: b", "'", "\"", "- a", "{a", "*a", "&a", "!a", "%", "@", " a ", "2001-01-01", "\u2028", "\ufeff", "\u0085",
	})).Filter(printable)
	names := rapid.SliceOfNDistinct(words.Filter(func(s string) bool { return s != "" && len(s) <= ingestconfig.MaxNameBytes }), 0, 4, rapid.ID).Draw(t, "names")
	engines := rapid.SampledFrom([]feed.Engine{feed.EngineVLLM, feed.EngineSGLang, feed.EngineTRTLLM, feed.EngineKVBM, feed.EngineLLMDSim})
	copies := rapid.SampledFrom([]ingestconfig.Copies{ingestconfig.CopiesAuto, ingestconfig.CopiesCounted, ingestconfig.CopiesAnnouncedLast})
	for _, name := range names {
		w := defaultWorker()
		w.Name, w.Model, w.Endpoint = name, words.Draw(t, "model"), words.Draw(t, "endpoint")
		w.BlockSize = rapid.Uint32().Draw(t, "block size")
		if labels := rapid.MapOfN(words.Filter(func(s string) bool { return s != "" && len(s) <= ingestconfig.MaxNameBytes }), words, 0, 4).Draw(t, "labels"); len(labels) > 0 {
			w.Labels = labels
		}
		s := sourceConfig{Engine: engines.Draw(t, "engine"), DPSize: rapid.IntRange(1, 20).Draw(t, "dp size"), Topic: words.Draw(t, "topic"), Copies: copies.Draw(t, "copies")}
		s.Connect = fmt.Sprintf("tcp://[::1]:%d", ports.Draw(t, "port"))
		w.Sources = []sourceConfig{s}
		if rapid.Bool().Draw(t, "a second source") {
			s.Engine, s.Topic = engines.Draw(t, "second engine"), ""
			w.Sources = append(w.Sources, s)
			w.Consolidate = rapid.SampledFrom([]feed.Consolidate{feed.ConsolidateDedup, feed.ConsolidatePassthrough}).Draw(t, "consolidate")
		}
		c.Workers = append(c.Workers, w)
	}
	for range rapid.IntRange(0, 3).Draw(t, "listeners") {
		l := listenerConfig{Bind: "tcp://*:*", Engine: engines.Draw(t, "engine"), Copies: copies.Draw(t, "copies"), ReplayPort: rapid.OneOf(rapid.Just(0), ports).Draw(t, "replay port")}
		l.Topics = rapid.SampledFrom([][]string{nil, {"kv@*"}, {"*", "1", "a: b"}}).Draw(t, "topics")
		c.Listeners = append(c.Listeners, l)
	}
	for range rapid.IntRange(0, 3).Draw(t, "discovery") {
		d := defaultDiscovery()
		d.Interval = time.Duration(rapid.Int64Range(int64(100*time.Millisecond), int64(time.Hour)).Draw(t, "interval"))
		if rapid.Bool().Draw(t, "by file") {
			d.File = words.Filter(func(s string) bool { return s != "" }).Draw(t, "file")
		} else {
			d.DNS = rapid.SampledFrom([]string{"1", "engines", "vllm.default.svc", "null", "::1"}).Filter(isHost).Draw(t, "host")
			d.Port, d.ReplayPort = ports.Draw(t, "port"), rapid.OneOf(rapid.Just(0), ports).Draw(t, "replay port")
			d.Copies = copies.Draw(t, "copies")
			d.Engine, d.Model, d.BlockSize = engines.Draw(t, "engine"), words.Draw(t, "model"), rapid.Uint32().Draw(t, "block size")
		}
		c.Discovery = append(c.Discovery, d)
	}
	return c
}

// TestAnyFileIsReadOrRefused breaks good and bad files at any place: what is
// still read is allowed, and reads as the same when it is written.
func TestAnyFileIsReadOrRefused(t *testing.T) {
	var files []string
	for _, name := range []string{"whole.yaml", "mistakes.yaml"} {
		text, err := os.ReadFile(filepath.Join("testdata/config", name))
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
		if err := c.write(&written, nil); err != nil {
			t.Fatal(err)
		}
		again, _, err := readText(written.String())
		if err != nil {
			t.Fatalf("%v in:\n%s", err, written.String())
		}
		if diff := cmp.Diff(c, again); diff != "" {
			t.Errorf("(-want +got):\n%s", diff)
		}
	})
}
