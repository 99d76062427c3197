package main

import (
	"math"
	"net"
	"strconv"
	"strings"
	"time"

	ingestconfig "github.com/kvcast/kvcast/ingest/config"

	"github.com/kvcast/kvcast/feed"
	"github.com/kvcast/kvcast/ingest/discovery"
	"github.com/kvcast/kvcast/journal"
	"github.com/kvcast/kvcast/pipeline"
	"github.com/kvcast/kvcast/server"
)

// config is all that kvcast serve can be told. It is made by readConfig, which
// leaves nothing in it that is not allowed, and never changes afterwards.
//
// What each part makes of its section is in that part's own Config.
type config struct {
	Listen       string
	Admin        string // empty: no admin port
	LogLevel     string
	Journal      journalConfig
	Batch        batchConfig
	Ingest       ingestConfig
	Subscribers  subscribersConfig
	Auth         authConfig
	TLS          tlsConfig
	EmitTokenIDs bool
	Workers      []workerConfig
	Listeners    []listenerConfig
	Discovery    []discoveryConfig
}

type journalConfig struct {
	Kind     string
	MaxBytes byteSize
	MaxAge   time.Duration
}

type batchConfig struct {
	Timeout   time.Duration
	MaxBlocks int
}

type ingestConfig struct {
	OnGap              pipeline.OnGap
	MaxBlocksPerRank   int
	MaxBlocks          int // of all workers
	MaxAttributeBytes  byteSize
	Silence            time.Duration // 0: for ever
	Grace              time.Duration
	StartWait          time.Duration
	MaxWorkers         int
	MaxSources         int
	MaxRanks           int
	WorkerBytes        byteSize
	SaltBytes          byteSize
	ReceiveBufferBytes byteSize
	ReorderBufferBytes byteSize
	RegisterHosts      string // between commas; empty: any
}

type subscribersConfig struct {
	Max                      int
	MaxConnections           int
	MaxConnectionsPerAddress int
	Stall                    time.Duration
	Progress                 time.Duration
	MaxSnapshots             int
	SnapshotWait             time.Duration
	ResponseBytes            byteSize
	FilterBytes              byteSize
	PingInterval             time.Duration
	MaxConnectionAge         time.Duration // 0: any age
	MaxConnectionAgeGrace    time.Duration
}

// authConfig says who may call; nothing means that all may.
type authConfig struct {
	Tokens string // a file's name
}

// tlsConfig says what connections are secured with; nothing means that they are
// not.
type tlsConfig struct {
	Cert string // a file's name
	Key  string // a file's name
}

// workerConfig is a worker whose engines are connected to.
type workerConfig struct {
	Name        string
	Model       string
	BlockSize   uint32 // 0: the first store's
	Endpoint    string
	Consolidate feed.Consolidate  // of several sources
	Labels      map[string]string // nil: none
	Sources     []sourceConfig
}

type sourceConfig struct {
	Engine  feed.Engine
	Connect string
	Replay  string
	DPSize  int
	Topic   string
	Copies  ingestconfig.Copies
}

// listenerConfig is a port that engines connect to.
type listenerConfig struct {
	Bind       string
	Engine     feed.Engine
	Copies     ingestconfig.Copies
	ReplayPort int      // 0: none
	Topics     []string // none: the part's default
	// ReplayHosts are those that topics may name beside their peers' own.
	ReplayHosts []string
	Worker      string
}

// discoveryConfig is where workers are found: by a DNS name, or in a file.
type discoveryConfig struct {
	DNS        string
	Port       int
	ReplayPort int // 0: none
	Engine     feed.Engine
	Copies     ingestconfig.Copies
	Model      string
	BlockSize  uint32 // 0: the first store's
	File       string
	Interval   time.Duration
}

func defaultConfig() config {
	return config{
		Listen:   ":50051",
		Admin:    "127.0.0.1:9464",
		LogLevel: "info",
		Journal:  journalConfig{Kind: "memory", MaxBytes: journal.DefaultMaxBytes, MaxAge: journal.DefaultMaxAge},
		Batch:    batchConfig{MaxBlocks: pipeline.DefaultMaxBlocks},
		Ingest: ingestConfig{
			OnGap: pipeline.OnGapReport, MaxBlocksPerRank: pipeline.DefaultMaxBlocksPerRank, MaxBlocks: pipeline.DefaultBlocks, MaxAttributeBytes: pipeline.DefaultAttributeBytes,
			Silence: ingestconfig.DefaultSilence, Grace: ingestconfig.DefaultGrace,
			StartWait: 5 * time.Second, MaxWorkers: ingestconfig.DefaultMaxWorkers,
			MaxSources: ingestconfig.DefaultMaxSources, MaxRanks: ingestconfig.DefaultMaxRanks, WorkerBytes: ingestconfig.DefaultWorkerBytes, SaltBytes: ingestconfig.DefaultSaltBytes,
			ReceiveBufferBytes: ingestconfig.DefaultReceiveBufferBytes, ReorderBufferBytes: ingestconfig.DefaultReorderBufferBytes,
		},
		Subscribers: subscribersConfig{
			Max: server.DefaultMaxSubscribers, MaxConnections: server.DefaultMaxConnections, MaxConnectionsPerAddress: server.DefaultMaxConnectionsPerAddress,
			Stall: 30 * time.Second, Progress: server.DefaultProgressInterval, MaxSnapshots: server.DefaultMaxSnapshots,
			SnapshotWait: server.DefaultMaxSnapshotWait, ResponseBytes: server.DefaultResponseBytes, FilterBytes: server.DefaultMaxFilterBytes, PingInterval: server.DefaultPingInterval,
			MaxConnectionAgeGrace: server.DefaultMaxConnectionAgeGrace,
		},
	}
}

func defaultWorker() workerConfig { return workerConfig{Consolidate: feed.ConsolidateDedup} }

func defaultSource() sourceConfig {
	return sourceConfig{Engine: feed.EngineVLLM, DPSize: 1, Copies: ingestconfig.CopiesAuto}
}

func defaultListener() listenerConfig {
	return listenerConfig{Engine: feed.EngineVLLM, Copies: ingestconfig.CopiesAuto, ReplayPort: ingestconfig.DefaultReplayPort}
}

func defaultDiscovery() discoveryConfig {
	return discoveryConfig{Engine: feed.EngineVLLM, Copies: ingestconfig.CopiesAuto, Interval: discovery.DefaultInterval}
}

// defaultBind is where engines may connect if nothing to read from is configured. Its
// port is that of engines, and of services that engines connect to.
const defaultBind = "tcp://*:5557"

// fromDefault is the origin of the listener at defaultBind.
var fromDefault = origin{place: "the default, as nothing to read from is configured"}

// readsNothing tells whether there is nothing to read from but what is registered.
func (c *config) readsNothing() bool {
	return len(c.Workers)+len(c.Listeners)+len(c.Discovery) == 0
}

// atMost is how many workers or subscribers one may ask for: more than fit.
const atMost = 1_000_000

const year = 365 * 24 * time.Hour

const wantFile = "a file's name in UTF-8 without control characters"

// settings are the scalars of c outside its lists, in the order of the file.
// Each is a key of the file, a flag and a variable.
func (c *config) settings() []setting {
	return []setting{
		text("listen", &c.Listen, isAddress, "HOST:PORT or :PORT, such as :50051"),
		text("admin", &c.Admin, func(s string) bool { return s == "" || isAddress(s) }, "HOST:PORT or :PORT, or nothing for no admin port"),
		oneOf("log_level", &c.LogLevel, "debug", "info", "warn", "error"),
		notBuilt(text("journal.kind", &c.Journal.Kind, notEmpty, "")),
		size("journal.max_bytes", &c.Journal.MaxBytes, leastBytes, mostBytes),
		duration("journal.max_age", &c.Journal.MaxAge, time.Second, math.MaxInt64),
		duration("batch.timeout", &c.Batch.Timeout, 0, pipeline.MaxBatchTimeout),
		count("batch.max_blocks", &c.Batch.MaxBlocks, 1, pipeline.MaxMaxBlocks),
		oneOf("ingest.on_gap", &c.Ingest.OnGap, pipeline.OnGapReport, pipeline.OnGapClear),
		count("ingest.max_blocks_per_rank", &c.Ingest.MaxBlocksPerRank, 1, pipeline.MaxMaxBlocksPerRank),
		count("ingest.max_blocks", &c.Ingest.MaxBlocks, 1, pipeline.MaxMaxBlocksPerRank),
		size("ingest.max_attribute_bytes", &c.Ingest.MaxAttributeBytes, leastBytes, mostBytes),
		limit("ingest.silence", &c.Ingest.Silence, 10*time.Millisecond, math.MaxInt64, "for ever"),
		duration("ingest.grace", &c.Ingest.Grace, 0, math.MaxInt64),
		duration("ingest.start_wait", &c.Ingest.StartWait, 0, time.Hour),
		count("ingest.max_workers", &c.Ingest.MaxWorkers, 1, atMost),
		count("ingest.max_sources", &c.Ingest.MaxSources, 1, atMost),
		count("ingest.max_ranks", &c.Ingest.MaxRanks, 1, atMost),
		size("ingest.worker_bytes", &c.Ingest.WorkerBytes, leastBytes, mostBytes),
		size("ingest.salt_bytes", &c.Ingest.SaltBytes, leastBytes, mostBytes),
		size("ingest.receive_buffer_bytes", &c.Ingest.ReceiveBufferBytes, leastBytes, mostBytes),
		size("ingest.reorder_buffer_bytes", &c.Ingest.ReorderBufferBytes, leastBytes, mostBytes),
		text("ingest.register_hosts", &c.Ingest.RegisterHosts, isHosts, "hosts between commas, each an IP address, a CIDR such as 10.0.0.0/8, a name, or *.DOMAIN; empty for any"),
		count("subscribers.max", &c.Subscribers.Max, 1, atMost),
		count("subscribers.max_connections", &c.Subscribers.MaxConnections, 1, atMost),
		count("subscribers.max_connections_per_address", &c.Subscribers.MaxConnectionsPerAddress, 1, atMost),
		duration("subscribers.stall", &c.Subscribers.Stall, time.Second, time.Hour),
		duration("subscribers.progress", &c.Subscribers.Progress, 100*time.Millisecond, time.Hour),
		count("subscribers.max_snapshots", &c.Subscribers.MaxSnapshots, 1, 1024),
		duration("subscribers.snapshot_wait", &c.Subscribers.SnapshotWait, 100*time.Millisecond, time.Hour),
		size("subscribers.response_bytes", &c.Subscribers.ResponseBytes, server.MinResponseBytes, server.MaxResponseBytes),
		size("subscribers.filter_bytes", &c.Subscribers.FilterBytes, server.MinFilterBytes, mostBytes),
		duration("subscribers.ping_interval", &c.Subscribers.PingInterval, time.Second, time.Hour),
		limit("subscribers.max_connection_age", &c.Subscribers.MaxConnectionAge, time.Second, year, "for no limit"),
		duration("subscribers.max_connection_age_grace", &c.Subscribers.MaxConnectionAgeGrace, time.Second, time.Hour),
		text("auth.tokens", &c.Auth.Tokens, printable, wantFile),
		text("tls.cert", &c.TLS.Cert, printable, wantFile),
		text("tls.key", &c.TLS.Key, printable, wantFile),
		yesNo("emit_token_ids", &c.EmitTokenIDs),
	}
}

// The scalars of the lists' items. Names, patterns and endpoints are judged by
// ingest, with all others in view.

func (w *workerConfig) settings() []setting {
	return []setting{
		text("name", &w.Name, anything, ""),
		text("model", &w.Model, anything, ""),
		count("block_size", &w.BlockSize, 1, math.MaxUint32),
		text("endpoint", &w.Endpoint, printable, "UTF-8 without control characters, such as 10.0.0.5:8000"),
		oneOf("consolidate", &w.Consolidate, feed.ConsolidateDedup, feed.ConsolidatePassthrough),
	}
}

func (s *sourceConfig) settings() []setting {
	return []setting{
		engine(&s.Engine),
		text("connect", &s.Connect, printable, wantEndpoint),
		text("replay", &s.Replay, printable, wantEndpoint),
		count("dp_size", &s.DPSize, 1, feed.MaxRanks),
		text("topic", &s.Topic, printable, "UTF-8 without control characters, such as kv@"),
		copies(&s.Copies),
	}
}

func (l *listenerConfig) settings() []setting {
	return []setting{
		text("bind", &l.Bind, printable, wantEndpoint),
		engine(&l.Engine),
		copies(&l.Copies),
		replayPort(&l.ReplayPort),
		text("worker", &l.Worker, anything, ""),
	}
}

func (d *discoveryConfig) settings() []setting {
	return []setting{
		text("dns", &d.DNS, isHost, "the name of a host, such as vllm.default.svc"),
		count("port", &d.Port, 1, math.MaxUint16),
		replayPort(&d.ReplayPort),
		engine(&d.Engine),
		copies(&d.Copies),
		text("model", &d.Model, func(s string) bool { return printable(s) && len(s) <= ingestconfig.MaxModelBytes }, "at most 1024 bytes of UTF-8 without control characters"),
		count("block_size", &d.BlockSize, 1, math.MaxUint32),
		text("file", &d.File, func(s string) bool { return s != "" && printable(s) }, wantFile),
		duration("interval", &d.Interval, 100*time.Millisecond, time.Hour),
	}
}

// takes tells whether a setting goes with what workers are found by.
func (d *discoveryConfig) takes(key string) bool {
	return key == "interval" || (key == "file") == (d.File != "")
}

const wantEndpoint = "tcp://HOST:PORT or ipc://PATH, in UTF-8 without control characters"

func engine(to *feed.Engine) setting {
	s := oneOf("engine", to, feed.EngineVLLM, feed.EngineSGLang, feed.EngineTRTLLM, feed.EngineKVBM, feed.EngineLLMDSim)
	s.read = func(text string) bool {
		e, ok := ingestconfig.ParseEngine(text)
		if ok {
			*to = e
		}
		return ok
	}
	return s
}

func copies(to *ingestconfig.Copies) setting {
	return oneOf("copies", to, ingestconfig.CopiesAuto, ingestconfig.CopiesCounted, ingestconfig.CopiesAnnouncedLast)
}

func replayPort(to *int) setting {
	s := count("replay_port", to, 0, math.MaxUint16)
	s.want = "1 to 65535, or 0 for none"
	return s
}

// hostsOf are the hosts between commas.
func hostsOf(s string) []string {
	if s == "" {
		return nil
	}
	return strings.Split(s, ",")
}

func isHosts(s string) bool {
	_, err := ingestconfig.ParseHosts(hostsOf(s))
	return err == nil
}

// isHost tells whether it may be the name of a host.
func isHost(s string) bool {
	return s != "" && len(s) <= 253 && printable(s) && !strings.ContainsAny(s, " /:,[]*")
}

// isAddress tells whether one can listen there, as far as its text tells.
func isAddress(s string) bool {
	_, port, err := net.SplitHostPort(s)
	if err != nil || !printable(s) {
		return false
	}
	_, err = strconv.ParseUint(port, 10, 16)
	return err == nil
}
