package main

import (
	"math"
	"net"
	"strconv"
	"time"

	"github.com/kvcast/kvcast/ingest"
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
	OnGap            string
	MaxBlocksPerRank int
	Silence          time.Duration
	Grace            time.Duration
	MaxWorkers       int
}

type subscribersConfig struct {
	Max                   int
	Stall                 time.Duration
	Progress              time.Duration
	MaxSnapshots          int
	MaxConnectionAge      time.Duration // 0: any age
	MaxConnectionAgeGrace time.Duration
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
	Consolidate string
	Sources     []sourceConfig
}

type sourceConfig struct {
	Engine  ingest.Engine
	Connect string
	Replay  string
	DPSize  int
	Topic   string
}

// listenerConfig is a port that engines connect to.
type listenerConfig struct {
	Bind       string
	Engine     ingest.Engine
	ReplayPort int
	Topics     []string // none: the part's default
	Worker     string
}

func defaultConfig() config {
	return config{
		Listen:   ":50051",
		Admin:    "127.0.0.1:9464",
		LogLevel: "info",
		Journal:  journalConfig{Kind: "memory", MaxBytes: journal.DefaultMaxBytes, MaxAge: journal.DefaultMaxAge},
		Batch:    batchConfig{MaxBlocks: pipeline.DefaultMaxBlocks},
		Ingest: ingestConfig{
			OnGap: "report", MaxBlocksPerRank: 4_000_000, Silence: 30 * time.Second, Grace: time.Minute,
			MaxWorkers: ingest.DefaultMaxWorkers,
		},
		Subscribers: subscribersConfig{
			Max: server.DefaultMaxSubscribers, Stall: 30 * time.Second, Progress: server.DefaultProgress, MaxSnapshots: 4,
			MaxConnectionAgeGrace: server.DefaultMaxConnectionAgeGrace,
		},
	}
}

func defaultWorker() workerConfig { return workerConfig{Consolidate: "dedup"} }

func defaultSource() sourceConfig { return sourceConfig{Engine: ingest.EngineVLLM, DPSize: 1} }

func defaultListener() listenerConfig {
	return listenerConfig{Engine: ingest.EngineVLLM, ReplayPort: 5558}
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
		size("journal.max_bytes", &c.Journal.MaxBytes),
		duration("journal.max_age", &c.Journal.MaxAge, time.Second, math.MaxInt64),
		duration("batch.timeout", &c.Batch.Timeout, 0, pipeline.MaxBatchTimeout),
		count("batch.max_blocks", &c.Batch.MaxBlocks, 1, pipeline.MaxMaxBlocks),
		notBuilt(oneOf("ingest.on_gap", &c.Ingest.OnGap, "report", "clear")),
		notBuilt(count("ingest.max_blocks_per_rank", &c.Ingest.MaxBlocksPerRank, 1, math.MaxInt32)),
		notBuilt(duration("ingest.silence", &c.Ingest.Silence, 0, math.MaxInt64)),
		notBuilt(duration("ingest.grace", &c.Ingest.Grace, 0, math.MaxInt64)),
		count("ingest.max_workers", &c.Ingest.MaxWorkers, 1, atMost),
		count("subscribers.max", &c.Subscribers.Max, 1, atMost),
		duration("subscribers.stall", &c.Subscribers.Stall, time.Second, time.Hour),
		duration("subscribers.progress", &c.Subscribers.Progress, 100*time.Millisecond, time.Hour),
		count("subscribers.max_snapshots", &c.Subscribers.MaxSnapshots, 1, 1024),
		limit("subscribers.max_connection_age", &c.Subscribers.MaxConnectionAge, time.Second, year),
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
		notBuilt(oneOf("consolidate", &w.Consolidate, "dedup", "passthrough")),
	}
}

func (s *sourceConfig) settings() []setting {
	return []setting{
		engine(&s.Engine),
		text("connect", &s.Connect, printable, wantEndpoint),
		text("replay", &s.Replay, printable, wantEndpoint),
		count("dp_size", &s.DPSize, 1, ingest.MaxRanks),
		text("topic", &s.Topic, printable, "UTF-8 without control characters, such as kv@"),
	}
}

func (l *listenerConfig) settings() []setting {
	return []setting{
		text("bind", &l.Bind, printable, wantEndpoint),
		engine(&l.Engine),
		count("replay_port", &l.ReplayPort, 1, math.MaxUint16),
		text("worker", &l.Worker, anything, ""),
	}
}

const wantEndpoint = "tcp://HOST:PORT or ipc://PATH, in UTF-8 without control characters"

func engine(to *ingest.Engine) setting {
	return oneOf("engine", to, ingest.EngineVLLM, ingest.EngineSGLang, ingest.EngineTRTLLM, ingest.EngineKVBM, ingest.EngineLLMDSim)
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
