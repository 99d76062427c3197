// Package config has the configuration of package ingest: workers, sources and listeners, with their
// defaults, limits and validation. It does not link libzmq.
package config

import (
	"cmp"
	"context"
	"log/slog"
	"slices"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/kvcast/kvcast/internal/feed"
	"github.com/kvcast/kvcast/internal/wire"
)

// Defaults of a Config.
const (
	DefaultMaxWorkers = 4096
	DefaultMaxSources = 4096
	// DefaultMaxSourcesPerAddress has room for the dp ranks of a host's engines.
	DefaultMaxSourcesPerAddress = 1024
	DefaultMaxRanks             = 8192
	DefaultMaxConnections       = 4096
	// DefaultMaxConnectionsPerAddress has room for the dp ranks of a host's engines.
	DefaultMaxConnectionsPerAddress = DefaultMaxConnections / 8
	DefaultWorkerBytes              = 64 << 20
	DefaultSaltBytes                = 128 << 20
	DefaultReceiveBufferBytes       = 256 << 20
	DefaultReorderBufferBytes       = 128 << 20
	DefaultPoolBytes                = 256 << 20
	DefaultReplayTimeout            = 5 * time.Second
	DefaultReplayPatience           = 30 * time.Second
	DefaultSilence                  = 30 * time.Second
	DefaultGrace                    = time.Minute
	DefaultReconnectMin             = time.Second
	DefaultReconnectMax             = 2 * time.Second
	// DefaultPort is the port of the PUB socket of vLLM and SGLang by default.
	DefaultPort = 5557
	// DefaultReplayPort is vLLM's default.
	DefaultReplayPort = 5558
	DefaultTopics     = "kv@*"
)

// Limits.
const (
	// MaxNameBytes is the length of the longest name of a worker.
	MaxNameBytes = 253
	// MaxModelBytes is the length of the longest name of a model.
	MaxModelBytes = 1024
	// MaxTopicBytes is the length of the longest topic. It has room for the longest names of a pod
	// and a model, an epoch and a snapshot. Topics are kept in memory, and logged.
	MaxTopicBytes = 2048
	// MaxSockets is the maximum number of libzmq sockets of sources and listeners. libzmq allows 65,535 sockets in a context.
	MaxSockets = 65_000
)

// Memory has limits in bytes.
type Memory struct {
	// WorkerBytes limits the memory for the names, endpoints and labels of the workers of AddWorker together.
	WorkerBytes int64
	// SaltBytes limits the memory for cache salts, blocks with a salt, and attention groups, of all
	// sources together. Blocks of a salt that does not fit have no tokens hashes.
	SaltBytes int64
	// ReceiveBufferBytes limits the received messages that are not processed yet.
	//
	// ZMQLib: of all sources and listeners together, beside 2 MiB for each of their sockets. A
	// message that does not fit is dropped, which is repaired like any other gap.
	//
	// ZMQNative: of all sources together, and of each listener, at most 16 MiB each, and 24 MiB for all messages of more than 32 KiB. While
	// the memory is in use, nothing more is read, and TCP stops the engines.
	ReceiveBufferBytes int64
	// ReorderBufferBytes limits the reorder buffers of all sources together. A batch that does not
	// fit is requested when the replay in progress is done.
	ReorderBufferBytes int64
	// PoolBytes limits the memory for the contents of the blocks in pools for which feed.Engine.HasContents,
	// of all of them together. A block that does not fit does not count as held.
	PoolBytes int64
}

// Config configures an Ingest. The zero Config reads nothing. The zero value of a field means its default.
type Config struct {
	// Workers are the workers whose engines are connected to.
	Workers []Worker
	// Listeners are bound, and engines connect to them.
	Listeners []Listener
	// MaxWorkers is the maximum number of workers, of Workers, Listeners and AddWorker together.
	MaxWorkers int
	// MaxSources is the maximum number of sources of all workers together. A source in Workers or AddWorker counts once for each of its dp
	// ranks, and uses about six file descriptors and three sockets with libzmq, and one descriptor with the native transport. An engine that
	// connects to a listener counts once for each topic and rank.
	MaxSources int
	// MaxSourcesPerAddress is the maximum number of sources that engines at one IP address make known to Listeners: the dp ranks of all topics
	// together. All peers over ipc count as 127.0.0.1, and an IPv6 /64 counts as one address.
	MaxSourcesPerAddress int
	// ConnectZMQ is the implementation of ZeroMQ for Workers and AddWorker, and for replays; the
	// default is DefaultConnectZMQ. ListenZMQ is the one for Listeners; the default is ZMQNative.
	ConnectZMQ, ListenZMQ ZMQ
	// MaxConnections and MaxConnectionsPerAddress limit the connections to all listeners together, and from one IP address, if ListenZMQ is
	// ZMQNative. An IPv6 /64 counts as one address, and connections over ipc count for MaxConnections alone.
	MaxConnections, MaxConnectionsPerAddress int
	// PeerTTL, if not 0, is how long this process may stand still before engines that have connected to a listener close the connection,
	// and connect again. It works if ListenZMQ is ZMQNative, and with engines of ZMTP 3.1 that honour the TTL of a PING, as libzmq does.
	PeerTTL time.Duration
	// MaxRanks is the maximum number of dp ranks of all workers together that are known only from batches.
	MaxRanks int
	Memory
	// ReplayTimeout is the maximum time until a reply of a replay socket arrives: 10 ms to 1 h. The first reply of a socket
	// that did not answer the last request is waited for 1 s at first. Both are extended on a busy machine.
	ReplayTimeout time.Duration
	// ReplayPatience is how long a replay socket that does not answer is asked before lost batches are given up, while live
	// batches wait: up to 1 h; negative means a few requests. It does not apply where nothing was read of an engine yet, and
	// the socket has never answered: its live batches are read at once, and everything is read again when the socket answers.
	ReplayPatience time.Duration
	// Silence is how long a connection may be silent before it is verified: by requesting the last batch from the replay socket or, if the
	// engine has no replay socket, by opening a second connection. At least 10 ms; a negative value disables the check.
	Silence time.Duration
	// Grace is how long a worker that was connected may have no connection before it is removed; negative means that it is removed at once. A
	// worker of Workers or AddWorker is added again when it is connected. If only some of a worker's sources or ranks have no connection for
	// this time, GapPossibleRestart is reported for them. At its end an attempt to connect is made, unless one is in progress, and it must
	// have failed first.
	Grace time.Duration
	// ReconnectMin and ReconnectMax are the minimum and maximum backoff between the beginnings of two attempts to
	// connect, which doubles: 1 ms to 1 h. An attempt that takes longer is followed by the next at once.
	ReconnectMin time.Duration
	ReconnectMax time.Duration
	// Durable makes each call of a lane carry the state after it, in feed.Progress, so that a later Ingest continues there with Recovered.
	Durable bool
	// Recovered are the workers of an earlier Ingest, with what their lanes stored. A worker of Workers or AddWorker
	// continues the recovered worker of the same name, if feed.Worker.Continues and the dp ranks of its sources are the
	// same. Workers of Listeners are added when Run starts, as if their engines had just disconnected. Any other
	// worker starts anew: Sink.RemoveWorker is called for the recovered worker before it is added.
	Recovered []feed.Recovered
	// Claim, if not nil, is called before the worker of a listener enters the stream: before Sink.AddWorker. It returns the
	// recovered state with which the worker continues, or nil if there is none; either replaces what Restore was given. The
	// worker does not enter if it returns an error, until the next message of its engine. Meanwhile the messages of the
	// listener wait. ctx ends when Run ends, or Release is called for the worker.
	Claim func(ctx context.Context, worker string) (*feed.Recovered, error)
	// Contents has the contents of the blocks in pools for which feed.Engine.HasContents; nil: none is known.
	Contents feed.Contents
	// Observer is optional.
	Observer feed.Observer
	// Metrics has the metrics registered until the Ingest ends; nil means that they are not registered.
	Metrics prometheus.Registerer
	// Logger is optional.
	Logger *slog.Logger
}

// Worker is a worker whose engines are connected to.
type Worker struct {
	// Name is unique: 1 to MaxNameBytes bytes of UTF-8 without control or format characters.
	Name string
	// Model is at most MaxModelBytes bytes; empty means unknown.
	Model string
	// BlockSize is in tokens, at most wire.MaxBlockSize; 0 means the block size of the first store.
	BlockSize uint32
	// Endpoint and Labels are passed to routers. The endpoint and each label's value have at most
	// MaxModelBytes bytes, and each key at most MaxNameBytes. There are at most 64 labels.
	Endpoint string
	Labels   map[string]string
	// Pool reports whether the worker is a pool: a store from which workers of the same model load blocks. It is one if a source's engine is
	// one for which feed.Engine.IsPool. Pools are the names of at most MaxPools pools from which a worker can load; a pool has none.
	Pool  bool
	Pools []string
	// HTTP is the URL of the engine's HTTP server, http://HOST:PORT; empty means unknown. Package
	// discovery/enginehttp asks it for the endpoints of the source. An Ingest does not.
	HTTP string
	// Sources are the publishers of the worker's events: 1 to feed.MaxSources.
	Sources []Source
	// Consolidate applies if there are several sources. The default is feed.ConsolidateDedup.
	Consolidate feed.Consolidate
	// Attention is what the engines do not tell of their attention groups.
	Attention Attention
}

// Attention is what engines of feed.EngineVLLM with several attention groups do not tell of them. Of several sources, other groups than
// the main group are not followed.
type Attention = wire.GroupSettings

// Source is a publisher to connect to, or a publisher for each dp rank.
type Source struct {
	// Engine defaults to feed.EngineVLLM, or to what Connect says.
	Engine feed.Engine
	// Connect is the endpoint of the PUB socket: tcp://HOST:PORT, with rank FirstRank + i on PORT + i, or ipc://PATH; or of a gRPC server that
	// has SubscribeKvEvents, for all ranks: smg://HOST:PORT, openengine://HOST:PORT or lmcache://HOST:PORT; or of the HTTP server of LMCache's coordinator or a Mooncake master:
	// lmcache-coordinator://HOST:PORT or mooncake://HOST:PORT;
	// or of no server, for a pool of what workers announce: workers://TIER?max_age=DURATION, see Endpoint.Announced.
	Connect string
	// Replay is the endpoint of the replay socket, in the form of a PUB socket's. If it is empty, lost
	// batches are reported as gaps. By gRPC there is none.
	Replay string
	// Snapshot is the endpoint of the socket for snapshots of the engine's cache, in the same form, also with Ranks; empty for none.
	// They are used where the replay socket does not reach back far enough: see SnapshotEngine.
	Snapshot string
	// FirstRank is the first dp rank, for a node of a larger deployment that has ranks FirstRank to FirstRank + DPSize - 1; at
	// most feed.MaxRanks - DPSize. Connect, Replay and Snapshot are the endpoints of this rank.
	FirstRank int
	// DPSize is the number of dp ranks: 1 to feed.MaxRanks, default 1. Over ipc only
	// feed.EngineTRTLLM may have more than one. By gRPC, batches of other ranks are refused.
	DPSize int
	// Ranks has the endpoints of the DPSize dp ranks if they are not at consecutive ports from FirstRank
	// on, which none is below. Connect and Replay are then those of the first in the list.
	Ranks []RankEndpoints
	// Topic is the prefix of the topics to read; empty means all topics. By gRPC there are none. Of a Mooncake master it is the prefix of the
	// keys of the objects to read, and of LMCache's coordinator the instance whose objects to read; empty: those that all instances share.
	Topic string
	// Copies is how copies are counted. The default is CopiesAuto.
	Copies Copies
	// Clears is what the engine's clears are of. The default is ClearsAuto.
	Clears Clears
}

// RankEndpoints are the endpoints of a dp rank, in the form of Source.Connect and Source.Replay.
type RankEndpoints struct {
	Rank    uint32 // below feed.MaxRanks
	Connect string
	Replay  string
	// Snapshot is set by Source.Endpoints.
	Snapshot string
}

// Listener is an endpoint to bind, which publishers connect to.
type Listener struct {
	// Bind is tcp://ADDRESS:PORT or ipc://PATH. The address may be *, and the port * or 0, for any.
	Bind string
	// Engine defaults to feed.EngineVLLM. The first seq of an incarnation is 1 for feed.EngineLLMDSim and 0 for the others. With the wrong
	// engine, ranks of an llm-d simulator are reported as incomplete, or the loss of another engine's first batch is not reported.
	Engine feed.Engine
	// Copies is how copies are counted. The default is CopiesAuto, which together with the default
	// engine also suits publishers of feed.EngineSGLang.
	Copies Copies
	// Clears is what the engines' clears are of. The default is ClearsAuto.
	Clears Clears
	// Topics are patterns of the topics to accept, in the syntax of path.Match, except that a slash
	// is an ordinary character. The default is DefaultTopics, or every topic if Worker is set.
	Topics []string
	// ReplayPort is the port of the replay socket of an engine's rank 0, on the host in the topic.
	// The default is DefaultReplayPort; negative means that there is none. See ReplayHosts.
	ReplayPort int
	// ReplayHosts are the hosts in topics that may be asked for replays, in the form of ParseHosts.
	// A host that is not among them is asked only if it is the peer's own address.
	ReplayHosts []string
	// Worker names the only worker of the listener. If it is empty, topics must have the form kv@POD@MODEL, and POD names the worker.
	Worker string
	// Attention is what the engines do not tell of their attention groups.
	Attention Attention
}

// AllowedEngines describes valid engines in errors.
const AllowedEngines = "vllm, sglang, trtllm, kvbm, llm-d-sim, lmcache, lmcache-coordinator, mooncake or workers"

// SnapshotEngine reports whether snapshots of an engine can be used. None is released that has them: the forms are those
// of proposals, and may change.
func SnapshotEngine(e feed.Engine) bool { return e == feed.EngineVLLM || e == feed.EngineSGLang }

// engineNames has kvcast's names of engines, and the names that other programs use.
var engineNames = map[string]feed.Engine{
	"vllm": feed.EngineVLLM, "VLLM": feed.EngineVLLM, "GPU": feed.EngineVLLM,
	"trtllm": feed.EngineTRTLLM, "TRTLLM": feed.EngineTRTLLM, "TensorRT-LLM": feed.EngineTRTLLM,
	"kvbm": feed.EngineKVBM, "KVBM": feed.EngineKVBM,
	"sglang":    feed.EngineSGLang,
	"llm-d-sim": feed.EngineLLMDSim,
	"lmcache":   feed.EngineLMCache,
	"mooncake":  feed.EngineMooncake,
	"workers":   feed.EngineWorkers,

	"lmcache-coordinator": feed.EngineLMCacheCoordinator,
}

// ParseEngine returns the engine with a name.
func ParseEngine(name string) (e feed.Engine, ok bool) {
	e, ok = engineNames[name]
	return e, ok
}

// WithDefaults returns a copy in which zero fields have their defaults.
func (c Config) WithDefaults() Config {
	c.MaxWorkers = cmp.Or(c.MaxWorkers, DefaultMaxWorkers)
	c.MaxSources = cmp.Or(c.MaxSources, DefaultMaxSources)
	c.MaxSourcesPerAddress = cmp.Or(c.MaxSourcesPerAddress, DefaultMaxSourcesPerAddress)
	c.MaxRanks = cmp.Or(c.MaxRanks, DefaultMaxRanks)
	c.ConnectZMQ = cmp.Or(c.ConnectZMQ, DefaultConnectZMQ)
	c.ListenZMQ = cmp.Or(c.ListenZMQ, ZMQNative)
	c.MaxConnections = cmp.Or(c.MaxConnections, DefaultMaxConnections)
	c.MaxConnectionsPerAddress = cmp.Or(c.MaxConnectionsPerAddress, DefaultMaxConnectionsPerAddress)
	c.WorkerBytes = cmp.Or(c.WorkerBytes, DefaultWorkerBytes)
	c.SaltBytes = cmp.Or(c.SaltBytes, DefaultSaltBytes)
	c.ReceiveBufferBytes = cmp.Or(c.ReceiveBufferBytes, DefaultReceiveBufferBytes)
	c.ReorderBufferBytes = cmp.Or(c.ReorderBufferBytes, DefaultReorderBufferBytes)
	c.PoolBytes = cmp.Or(c.PoolBytes, DefaultPoolBytes)
	if c.Contents == nil {
		c.Contents = feed.NoContents
	}
	c.ReplayTimeout = cmp.Or(c.ReplayTimeout, DefaultReplayTimeout)
	c.ReplayPatience = cmp.Or(c.ReplayPatience, DefaultReplayPatience)
	c.Silence = cmp.Or(c.Silence, DefaultSilence)
	c.Grace = cmp.Or(c.Grace, DefaultGrace)
	c.ReconnectMin = cmp.Or(c.ReconnectMin, min(DefaultReconnectMin, cmp.Or(c.ReconnectMax, DefaultReconnectMax)))
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
		s.Engine = s.EngineOrDefault()
		w.Pool = w.Pool || s.Engine.IsPool()
		s.DPSize = cmp.Or(s.DPSize, 1)
		s.Copies = cmp.Or(s.Copies, CopiesAuto)
		s.Clears = cmp.Or(s.Clears, ClearsAuto)
	}
	return w
}

// EngineOrDefault returns the source's engine.
func (s Source) EngineOrDefault() feed.Engine {
	switch e, _ := ParseSource(s.Connect); e.Transport {
	case TransportLMCache:
		return cmp.Or(s.Engine, feed.EngineLMCache)
	case TransportLMCacheCoordinator:
		return cmp.Or(s.Engine, feed.EngineLMCacheCoordinator)
	case TransportMooncake:
		return cmp.Or(s.Engine, feed.EngineMooncake)
	case TransportWorkers:
		return cmp.Or(s.Engine, feed.EngineWorkers)
	default:
		return cmp.Or(s.Engine, feed.EngineVLLM)
	}
}

func (l Listener) withDefaults() Listener {
	l.Engine = cmp.Or(l.Engine, feed.EngineVLLM)
	l.Copies = cmp.Or(l.Copies, CopiesAuto)
	l.Clears = cmp.Or(l.Clears, ClearsAuto)
	l.ReplayPort = cmp.Or(l.ReplayPort, DefaultReplayPort)
	if len(l.Topics) == 0 {
		l.Topics = []string{DefaultTopics}
		if l.Worker != "" {
			l.Topics = []string{"*"}
		}
	}
	return l
}
