// Package config describes what package ingest reads: workers, sources and listeners, with
// their defaults, limits and validation. It uses no socket, so that importing it does not
// link libzmq.
package config

import (
	"cmp"
	"log/slog"
	"slices"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/kvcast/kvcast/feed"
)

// Defaults of a Config.
const (
	DefaultMaxWorkers         = 4096
	DefaultMaxSources         = 4096
	DefaultMaxRanks           = 8192
	DefaultWorkerBytes        = 64 << 20
	DefaultSaltBytes          = 128 << 20
	DefaultReceiveBufferBytes = 256 << 20
	DefaultReorderBufferBytes = 128 << 20
	DefaultReplayTimeout      = 5 * time.Second
	DefaultSilence            = 30 * time.Second
	DefaultGrace              = time.Minute
	DefaultReconnectMin       = time.Second
	DefaultReconnectMax       = 30 * time.Second
	// DefaultReplayPort is vLLM's.
	DefaultReplayPort = 5558
	DefaultTopics     = "kv@*"
)

// Limits.
const (
	// MaxNameBytes is the length of the longest name of a worker.
	MaxNameBytes = 253
	// MaxModelBytes is the length of the longest name of a model.
	MaxModelBytes = 1024
	// MaxTopicBytes is the length of the longest topic: that of the longest names of a pod
	// and a model with an epoch and a snapshot, and more. Topics are kept, and logged.
	MaxTopicBytes = 2048
	// MaxSockets is how many sockets of libzmq sources and listeners may use. libzmq allows
	// 65,535 in a context.
	MaxSockets = 65_000
)

// Config is what an Ingest reads. The zero Config reads nothing. The zero value of a field
// means its default.
type Config struct {
	// Workers are the workers whose engines are connected to.
	Workers []Worker
	// Listeners are bound, and engines connect to them.
	Listeners []Listener
	// MaxWorkers is the maximum number of workers, of whatever origin.
	MaxWorkers int
	// MaxSources is the maximum number of sources of all workers together: one that is
	// connected to counts once for each of its dp ranks, an engine that connects to a
	// listener once for each topic and rank. A source that is connected to uses some six
	// file descriptors and three sockets of libzmq.
	MaxSources int
	// MaxRanks is the maximum number of dp ranks of all workers together that only their
	// batches name.
	MaxRanks int
	// WorkerBytes bounds the names, endpoints and labels of the workers of AddWorker
	// together.
	WorkerBytes int64
	// SaltBytes bounds the cache salts, the blocks that carry them and the attention groups
	// that are remembered, of all sources together. A salt that does not fit is unknown,
	// and its blocks have no tokens hashes.
	SaltBytes int64
	// ReceiveBufferBytes bounds the messages that wait to be processed, of all sources
	// together, beside 2 MiB for each source. A message that does not fit is dropped, which
	// is repaired like any other gap.
	ReceiveBufferBytes int64
	// ReorderBufferBytes bounds the reorder buffers of all sources together. A batch that
	// does not fit is requested when the replay in progress is done.
	ReorderBufferBytes int64
	// ReplayTimeout is how long a reply of a replay socket may take: 10 ms to 1 h.
	ReplayTimeout time.Duration
	// Silence is how long a connection may be silent before it is verified: by requesting
	// the last batch from the replay socket or, if the engine has no replay socket, by
	// opening a second connection. At least 10 ms; a negative value disables the check.
	Silence time.Duration
	// Grace is how long a worker may have no connection, once it has had one, before it is
	// removed; negative means at once. Those of Workers and AddWorker are added again when
	// they are connected. A source or rank without a connection for so long, while its
	// worker has others, is reported by a GapPossibleRestart.
	Grace time.Duration
	// ReconnectMin and ReconnectMax bound the backoff of reconnecting, which doubles: 1 ms
	// to 1 h.
	ReconnectMin time.Duration
	ReconnectMax time.Duration
	// Metrics is where the metrics are registered until the Ingest ends; nil means nowhere.
	Metrics prometheus.Registerer
	// Logger is for the operator; nil discards.
	Logger *slog.Logger
}

// Worker is a worker whose engines are connected to.
type Worker struct {
	// Name is unique: 1 to MaxNameBytes bytes of UTF-8 without control characters.
	Name string
	// Model is at most MaxModelBytes bytes; empty means unknown.
	Model string
	// BlockSize is in tokens; 0 means that it is learned from the first store.
	BlockSize uint32
	// Endpoint and Labels are passed on to routers: at most MaxModelBytes bytes each, keys
	// MaxNameBytes, and 64 labels.
	Endpoint string
	Labels   map[string]string
	// Sources are the publishers of the worker's events: 1 to feed.MaxSources.
	Sources []Source
	// Consolidate applies to several sources: feed.ConsolidateDedup unless set.
	Consolidate feed.Consolidate
}

// Source is a publisher to connect to, or one for each dp rank.
type Source struct {
	// Engine is feed.EngineVLLM unless set.
	Engine feed.Engine
	// Connect is the endpoint of the PUB socket: tcp://HOST:PORT, where rank r is at
	// PORT + r, or ipc://PATH.
	Connect string
	// Replay is the endpoint of the replay socket, in the same form; empty means that there
	// is none, so that lost batches are reported as gaps.
	Replay string
	// DPSize is the number of dp ranks: 1 to feed.MaxRanks, 1 unless set. Over ipc only
	// feed.EngineTRTLLM has more than one.
	DPSize int
	// Topic is the prefix of the topics to read; empty means all.
	Topic string
	// Copies is how copies are counted: CopiesAuto unless set.
	Copies Copies
}

// Listener is an endpoint to bind, which publishers connect to.
type Listener struct {
	// Bind is tcp://ADDRESS:PORT, where the address may be * and the port * or 0 for any,
	// or ipc://PATH.
	Bind string
	// Engine is feed.EngineVLLM unless set. It decides the first seq of an incarnation,
	// which is 1 for feed.EngineLLMDSim. With the wrong engine the ranks of such a simulator
	// are reported as incomplete, or the loss of an engine's first batch is not reported.
	Engine feed.Engine
	// Copies is how copies are counted: CopiesAuto unless set, which with the default engine
	// is right for publishers of feed.EngineSGLang, too.
	Copies Copies
	// Topics are patterns of the topics to accept, in the syntax of path.Match where a slash
	// is an ordinary character: DefaultTopics unless set, or every topic where Worker is
	// set.
	Topics []string
	// ReplayPort is the port of the replay socket of an engine's rank 0, at the host that
	// the topic names: DefaultReplayPort unless set; negative means that there is none. See
	// ReplayHosts.
	ReplayPort int
	// ReplayHosts are the hosts that topics may name for replays, as ParseHosts reads them.
	// Beside them a replay is requested only from the address of the peer itself.
	ReplayHosts []string
	// Worker names the only worker of the listener. Where it is empty topics must have the
	// form kv@POD@MODEL, and POD names the worker.
	Worker string
}

// AllowedEngines describes valid engines in errors.
const AllowedEngines = "vllm, sglang, trtllm, kvbm or llm-d-sim"

// engineNames are the names of engines, with those that other programs use.
var engineNames = map[string]feed.Engine{
	"vllm": feed.EngineVLLM, "VLLM": feed.EngineVLLM, "GPU": feed.EngineVLLM,
	"trtllm": feed.EngineTRTLLM, "TRTLLM": feed.EngineTRTLLM, "TensorRT-LLM": feed.EngineTRTLLM,
	"kvbm": feed.EngineKVBM, "KVBM": feed.EngineKVBM,
	"sglang":    feed.EngineSGLang,
	"llm-d-sim": feed.EngineLLMDSim,
}

// ParseEngine returns the engine of a name.
func ParseEngine(name string) (e feed.Engine, ok bool) {
	e, ok = engineNames[name]
	return e, ok
}

// WithDefaults returns a copy in which zero fields have their defaults.
func (c Config) WithDefaults() Config {
	c.MaxWorkers = cmp.Or(c.MaxWorkers, DefaultMaxWorkers)
	c.MaxSources = cmp.Or(c.MaxSources, DefaultMaxSources)
	c.MaxRanks = cmp.Or(c.MaxRanks, DefaultMaxRanks)
	c.WorkerBytes = cmp.Or(c.WorkerBytes, DefaultWorkerBytes)
	c.SaltBytes = cmp.Or(c.SaltBytes, DefaultSaltBytes)
	c.ReceiveBufferBytes = cmp.Or(c.ReceiveBufferBytes, DefaultReceiveBufferBytes)
	c.ReorderBufferBytes = cmp.Or(c.ReorderBufferBytes, DefaultReorderBufferBytes)
	c.ReplayTimeout = cmp.Or(c.ReplayTimeout, DefaultReplayTimeout)
	c.Silence = cmp.Or(c.Silence, DefaultSilence)
	c.Grace = cmp.Or(c.Grace, DefaultGrace)
	c.ReconnectMin = cmp.Or(c.ReconnectMin, DefaultReconnectMin)
	c.ReconnectMax = cmp.Or(c.ReconnectMax, max(DefaultReconnectMax, c.ReconnectMin))
	if c.Logger == nil {
		c.Logger = slog.New(slog.DiscardHandler)
	}
	c.Workers = slices.Clone(c.Workers)
	for i := range c.Workers {
		c.Workers[i] = c.Workers[i].withDefaults()
	}
	c.Listeners = slices.Clone(c.Listeners)
	for i := range c.Listeners {
		c.Listeners[i] = c.Listeners[i].withDefaults()
	}
	return c
}

func (w Worker) withDefaults() Worker {
	w.Consolidate = cmp.Or(w.Consolidate, feed.ConsolidateDedup)
	w.Sources = slices.Clone(w.Sources)
	for i := range w.Sources {
		s := &w.Sources[i]
		s.Engine = cmp.Or(s.Engine, feed.EngineVLLM)
		s.DPSize = cmp.Or(s.DPSize, 1)
		s.Copies = cmp.Or(s.Copies, CopiesAuto)
	}
	return w
}

func (l Listener) withDefaults() Listener {
	l.Engine = cmp.Or(l.Engine, feed.EngineVLLM)
	l.Copies = cmp.Or(l.Copies, CopiesAuto)
	l.ReplayPort = cmp.Or(l.ReplayPort, DefaultReplayPort)
	if len(l.Topics) == 0 {
		l.Topics = []string{DefaultTopics}
		if l.Worker != "" {
			l.Topics = []string{"*"}
		}
	}
	return l
}
