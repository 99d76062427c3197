// Package config says what package ingest reads: workers, sources and listeners, with
// their defaults, limits and validation. It uses no socket, so that whoever adds
// workers need not link libzmq.
package config

import (
	"log/slog"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/kvcast/kvcast/feed"
)

// Defaults and limits of a Config.
const (
	// DefaultMaxWorkers is how many workers there may be at a time.
	DefaultMaxWorkers = 4096
	// DefaultReconnectMin and DefaultReconnectMax bound the wait before a
	// connection that broke is tried again. It doubles each time.
	DefaultReconnectMin = time.Second
	DefaultReconnectMax = 30 * time.Second
	// DefaultReplayPort is the port of rank 0's replay socket, of engines that connect
	// to a listener: vLLM's.
	DefaultReplayPort = 5558
	// DefaultSilence is how long an engine may say nothing before its connection is
	// tested.
	DefaultSilence = 30 * time.Second
	// DefaultGrace is how long a worker may be without a connection before it is
	// removed.
	DefaultGrace = time.Minute
	// DefaultReceiveBufferBytes and DefaultReorderBufferBytes are those of Config.
	DefaultReceiveBufferBytes = 256 << 20
	DefaultReorderBufferBytes = 128 << 20
	// DefaultTopics is the pattern of a listener's topics.
	DefaultTopics = "kv@*"
	// DefaultMaxSources, DefaultMaxRanks and DefaultWorkerBytes are those of Config.
	DefaultMaxSources  = 4096
	DefaultMaxRanks    = 8192
	DefaultWorkerBytes = 64 << 20
	// DefaultSaltBytes is that of Config.
	DefaultSaltBytes = 128 << 20
	// MaxNameBytes is the length of the longest name of a worker.
	MaxNameBytes = 253
	// MaxModelBytes is the length of the longest name of a model.
	MaxModelBytes = 1024
	// MaxTopicBytes is the length of the longest topic: that of the longest names of a pod
	// and a model with an epoch and a snapshot, and more. Topics are kept, and logged.
	MaxTopicBytes = 2048
)

// MaxSockets is how many sockets libzmq can have in one context, less some for
// what an Ingest needs beside its sources.
const MaxSockets = 65_000

// DefaultReplayTimeout is how long a replay socket may say nothing.
const DefaultReplayTimeout = 5 * time.Second

// Config is what an Ingest reads. The zero Config reads nothing; in each field
// the zero value stands for the default.
type Config struct {
	// Workers are read by connecting to their engines.
	Workers []Worker
	// Listeners are bound for engines to connect to.
	Listeners []Listener
	// MaxWorkers is how many workers there may be, configured ones included:
	// DefaultMaxWorkers unless set. A worker beyond it is refused.
	MaxWorkers int
	// MaxSources is how many publishers may be read, of all workers together: a source
	// that is connected to counts once for each of its dp ranks, an engine that connects
	// to a listener once for each topic and rank. A source that is connected to takes some
	// six file descriptors and three sockets of libzmq. DefaultMaxSources unless set.
	MaxSources int
	// MaxRanks is how many dp ranks there may be, of all workers together, beside those
	// of their sources: batches may name any. DefaultMaxRanks unless set.
	MaxRanks int
	// WorkerBytes bounds what is said of the workers of AddWorker, all together: their
	// names, endpoints and labels. DefaultWorkerBytes unless set.
	WorkerBytes int64
	// SaltBytes bounds the cache salts, the blocks that carry them and the attention
	// groups that are remembered, of all sources together: DefaultSaltBytes unless set. A
	// salt that is not remembered is unknown, and its blocks have no tokens hashes.
	SaltBytes int64
	// ReceiveBufferBytes bounds the messages that were received and wait to be
	// processed, of all sources together: DefaultReceiveBufferBytes unless set. Beside it
	// each source may have 2 MiB. A message that does not fit is dropped, which is
	// repaired like any other gap.
	ReceiveBufferBytes int64
	// ReorderBufferBytes bounds the live batches that wait for a replay, of all sources
	// together: DefaultReorderBufferBytes unless set. A batch that does not fit is
	// fetched once the replay is done.
	ReorderBufferBytes int64
	// ReplayTimeout is how long a replay socket may say nothing: 10 ms to 1 h,
	// DefaultReplayTimeout unless set.
	ReplayTimeout time.Duration
	// Silence is how long an engine may say nothing before its connection is tested:
	// by asking its replay socket for the last batch, or else by another connection
	// beside it. DefaultSilence unless set; negative means for ever.
	Silence time.Duration
	// Grace is how long a worker may be without a connection, once it has had one,
	// before it is removed: DefaultGrace unless set; negative means at once.
	// Those of Workers and AddWorker come back when they are connected again. A
	// source or dp rank that is gone for so long while the worker has other connections
	// is reported by a GapPossibleRestart.
	Grace time.Duration
	// ReconnectMin and ReconnectMax are in whole milliseconds; see their defaults.
	ReconnectMin time.Duration
	ReconnectMax time.Duration
	// Metrics is where the metrics are registered; nil means nowhere. They are
	// unregistered when the Ingest ends.
	Metrics prometheus.Registerer
	// Logger takes what an operator should know; nil means no one does.
	Logger *slog.Logger
}

// Worker is a worker whose engines are connected to.
type Worker struct {
	// Name is unique, 1 to MaxNameBytes bytes.
	Name string
	// Model is at most MaxModelBytes bytes; empty means that it is not known.
	Model string
	// BlockSize is in tokens; 0 means that of the first store.
	BlockSize uint32
	// Endpoint and Labels are for routers, passed through: at most MaxModelBytes
	// each, keys MaxNameBytes, and 64 labels.
	Endpoint string
	Labels   map[string]string
	// Sources are what publishes the worker's events: one at least, and MaxSources at
	// most.
	Sources []Source
	// Consolidate is what to make of several: ConsolidateDedup unless set.
	Consolidate feed.Consolidate
}

// Source is a publisher to connect to, or one for each dp rank.
type Source struct {
	// Engine is what publishes: EngineVLLM unless set.
	Engine feed.Engine
	// Connect is the publisher's endpoint: tcp://HOST:PORT, where rank r is read
	// at PORT + r, or ipc://PATH.
	Connect string
	// Replay is the endpoint of its replay socket, in the same form; empty means
	// that there is none, so that lost batches are told as gaps.
	Replay string
	// DPSize is the number of dp ranks, at most MaxRanks: 1 unless set. Over ipc
	// only EngineTRTLLM has more than one.
	DPSize int
	// Topic is the prefix of the topics to read; empty means all.
	Topic string
	// Copies says how its copies are counted: CopiesAuto unless set.
	Copies Copies
}

// Listener is an endpoint to bind, for publishers to connect to.
type Listener struct {
	// Bind is the endpoint: tcp://ADDRESS:PORT, where the address may be * and
	// the port * or 0 for any, or ipc://PATH.
	Bind string
	// Engine is what publishes there: EngineVLLM unless set.
	//
	// It decides what the first seq of an engine's life is, and EngineLLMDSim is
	// the one that starts at 1. Left at the default, such a simulator's ranks are
	// reported incomplete, needlessly; the other way round the loss of an
	// engine's first batch, which is what ZeroMQ loses most readily, would go
	// unreported.
	Engine feed.Engine
	// Copies says how the copies of its publishers are counted: CopiesAuto unless set,
	// which with the default engine is right for publishers of EngineSGLang, too.
	Copies Copies
	// Topics are patterns of the topics to accept, in the syntax of path.Match
	// except that a slash is like any other character, as it is in models' names:
	// DefaultTopics unless set, or every topic where Worker is set.
	Topics []string
	// ReplayPort is the port of the replay socket of an engine's rank 0, at the host
	// that the topic names, see ReplayHosts: DefaultReplayPort unless set; negative means
	// that there are none.
	ReplayPort int
	// ReplayHosts are the hosts that topics may name for replays, as ParseHosts takes
	// them. Without them a replay is requested from the address that the engine connects
	// from, if the topic names that or no address, and else not at all.
	ReplayHosts []string
	// Worker names the one worker that everything here belongs to. Where it is
	// empty topics must be of the form kv@POD@MODEL, and POD names the worker.
	Worker string
}

// AllowedEngines says in errors which engines may be named.
const AllowedEngines = "vllm, sglang, trtllm, kvbm or llm-d-sim"

// engineNames are the names that engines go by elsewhere, and how they are spelled
// here.
var engineNames = map[string]feed.Engine{
	"vllm": feed.EngineVLLM, "VLLM": feed.EngineVLLM, "GPU": feed.EngineVLLM,
	"trtllm": feed.EngineTRTLLM, "TRTLLM": feed.EngineTRTLLM, "TensorRT-LLM": feed.EngineTRTLLM,
	"kvbm": feed.EngineKVBM, "KVBM": feed.EngineKVBM,
	"sglang":    feed.EngineSGLang,
	"llm-d-sim": feed.EngineLLMDSim,
}

// ParseEngine returns the engine of a name; ok is false where there is none.
func ParseEngine(name string) (e feed.Engine, ok bool) {
	e, ok = engineNames[name]
	return e, ok
}

// WithDefaults returns the Config with its zero fields filled in. It shares no
// slices that are written with the caller's.
func (c Config) WithDefaults() Config {
	if c.MaxWorkers == 0 {
		c.MaxWorkers = DefaultMaxWorkers
	}
	if c.MaxSources == 0 {
		c.MaxSources = DefaultMaxSources
	}
	if c.MaxRanks == 0 {
		c.MaxRanks = DefaultMaxRanks
	}
	if c.WorkerBytes == 0 {
		c.WorkerBytes = DefaultWorkerBytes
	}
	if c.SaltBytes == 0 {
		c.SaltBytes = DefaultSaltBytes
	}
	if c.ReceiveBufferBytes == 0 {
		c.ReceiveBufferBytes = DefaultReceiveBufferBytes
	}
	if c.ReorderBufferBytes == 0 {
		c.ReorderBufferBytes = DefaultReorderBufferBytes
	}
	if c.ReplayTimeout == 0 {
		c.ReplayTimeout = DefaultReplayTimeout
	}
	if c.Silence == 0 {
		c.Silence = DefaultSilence
	}
	if c.Grace == 0 {
		c.Grace = DefaultGrace
	}
	if c.ReconnectMin == 0 {
		c.ReconnectMin = DefaultReconnectMin
	}
	if c.ReconnectMax == 0 {
		c.ReconnectMax = max(DefaultReconnectMax, c.ReconnectMin)
	}
	if c.Logger == nil {
		c.Logger = slog.New(slog.DiscardHandler)
	}
	workers := make([]Worker, len(c.Workers))
	for i, w := range c.Workers {
		sources := make([]Source, len(w.Sources))
		for j, s := range w.Sources {
			if s.Engine == "" {
				s.Engine = feed.EngineVLLM
			}
			if s.DPSize == 0 {
				s.DPSize = 1
			}
			if s.Copies == "" {
				s.Copies = CopiesAuto
			}
			sources[j] = s
		}
		w.Sources = sources
		if w.Consolidate == "" {
			w.Consolidate = feed.ConsolidateDedup
		}
		workers[i] = w
	}
	c.Workers = workers
	listeners := make([]Listener, len(c.Listeners))
	for i, l := range c.Listeners {
		if l.Engine == "" {
			l.Engine = feed.EngineVLLM
		}
		if l.Copies == "" {
			l.Copies = CopiesAuto
		}
		if l.ReplayPort == 0 {
			l.ReplayPort = DefaultReplayPort
		}
		if len(l.Topics) == 0 {
			l.Topics = []string{DefaultTopics}
			if l.Worker != "" {
				l.Topics = []string{"*"}
			}
		}
		listeners[i] = l
	}
	c.Listeners = listeners
	return c
}
