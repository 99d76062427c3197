package config

import (
	"math"
	"slices"
	"time"

	ingestconfig "github.com/kvcast/kvcast/ingest/config"
	"github.com/kvcast/kvcast/internal/core/index/hybrid"
	"github.com/kvcast/kvcast/internal/discovery"
	"github.com/kvcast/kvcast/internal/discovery/kubernetes"
	"github.com/kvcast/kvcast/internal/feed"
	"github.com/kvcast/kvcast/internal/wire"
	"github.com/kvcast/kvcast/pipeline"
	"github.com/kvcast/kvcast/server"
)

const (
	// maxCount is the highest limit of workers, sources, subscribers and the like.
	maxCount  = 1_000_000
	minBytes  = 1 << 20
	maxBytes  = 1 << 40
	unlimited = time.Duration(math.MaxInt64)
	year      = 365 * 24 * time.Hour
)

// mapping is the keys of a YAML mapping, in the order in which they are written.
type mapping []field

// field is a key of a mapping. A value outside lists is also a variable, and a flag with the given help.
type field struct {
	key  string
	node node
	help string
}

// fields declares all settings.
func (c *Config) fields() mapping {
	return mapping{
		{"listen", text(&c.Listen, ":50051", isAddress, "HOST:PORT or :PORT, such as :50051"),
			"gRPC listen address."},
		{"admin", text(&c.Admin, "127.0.0.1:9464", func(s string) bool { return s == "" || isAddress(s) }, "HOST:PORT or :PORT, or nothing for no admin port"),
			"Admin listen address: the console at /, /metrics, /healthz, /readyz, pprof. Empty disables it."},
		{"admin_tls", boolean(&c.AdminTLS, false),
			"Whether the admin port uses TLS, with tls.cert. Client certificates are asked for and not required there."},
		{"console", boolean(&c.Console, true),
			"Whether to serve the console, a web page about the fleet, at the admin port. Unless that is on loopback, it needs what calls of the gRPC port need."},
		{"log_level", logLevel(&c.LogLevel),
			"Log level: debug, info, warn or error."},
		{"log_format", oneOf(&c.LogFormat, LogText, LogJSON),
			"Form of log lines on standard error: text (key=value pairs) or json (an object a line)."},
		{"tracing", mapping{
			{"endpoint", text(&c.Tracing.Endpoint, "", isCollector, "http://HOST:PORT, or https://HOST:PORT for TLS; or nothing for no tracing"),
				"OpenTelemetry collector to which spans of calls are sent with OTLP over gRPC: http://HOST:PORT, or https:// for TLS. Empty disables tracing."},
			{"sample_ratio", ratio(&c.Tracing.SampleRatio, 1),
				"Part of the calls that are traced, 0 to 1, of those whose caller has not decided it."},
		}, ""},
		{"journal", c.journalFields(), ""},
		{"cluster", mapping{
			{"ingest", boolean(&c.Cluster.Ingest, true),
				"Whether to read engines. Servers with the same stream of NATS servers share the engines among them. With false, the server only serves what the others read."},
			{"serve", boolean(&c.Cluster.Serve, true),
				"Whether to serve routers. With false, the server only reads engines, and routers call the other servers with the same stream."},
			{"name", text(&c.Cluster.Name, "", isInstanceName, "at most 64 letters, digits, '-', '_' and '.', or nothing for the host's name"),
				"Name of the server in the status of all servers. Empty: the host's name."},
			{"ttl", duration(&c.Cluster.TTL, 3*time.Second, 500*time.Millisecond, time.Minute),
				"How long a server with a journal in NATS servers may give no sign of life before others read its engines, 500ms to 1m; the same for all of them."},
		}, ""},
		{"batch", mapping{
			{"timeout", duration(&c.Pipeline.Timeout, 0, 0, pipeline.MaxBatchTimeout),
				"How long events may wait to be merged with events of the next engine batch, 0s to 15s. Matches count as older by that, and if it is not below cluster.ttl, as stale."},
			{"max_blocks", number(&c.Pipeline.MaxBlocks, pipeline.DefaultMaxBlocks, pipeline.MaxMaxBlocks),
				"Maximum number of blocks in an event, 1 to 16384."},
		}, ""},
		{"ingest", c.ingestFields(), ""},
		{"subscribers", c.subscriberFields(), ""},
		{"auth", mapping{
			{"tokens", fileName(&c.TokensFile, ingestconfig.Printable),
				"File of the tokens that calls must carry: ROLE TOKEN per line, where ROLE is router or operator; # starts a comment. Read again when it changes."},
			{"certificates", fileName(&c.CertificatesFile, ingestconfig.Printable),
				"File of the roles of client certificates: ROLE NAME per line, where NAME is a URI or a DNS name in the certificate, or the common name of one that has neither. Without it, each certificate that tls.client_ca verifies has the role router. Read again when it changes."},
			{"check_interval", duration(&c.Server.AccessInterval, server.DefaultAccessInterval, time.Second, 24*time.Hour),
				"How often open streams are checked, 1s to 24h: one whose token was removed, or whose client certificate has no role any more, ends at the next check, and the connection of one whose certificate has expired."},
			{"open_registration", boolean(&c.Server.OpenRegistration, false),
				"Without tokens and client certificates, let everyone who reaches the gRPC port register and deregister workers. Otherwise that needs the role operator."},
		}, ""},
		{"tls", mapping{
			{"cert", fileName(&c.CertFile, ingestconfig.Printable),
				"File of the server's certificate in PEM, followed by intermediate certificates. Read again when it changes."},
			{"key", fileName(&c.KeyFile, ingestconfig.Printable),
				"File of the certificate's key in PEM."},
			{"client_ca", fileName(&c.ClientCAFile, ingestconfig.Printable),
				"File of the CAs of client certificates in PEM. Clients must then have a certificate, or a token if auth.tokens is set. Read again when it changes."},
		}, ""},
		{"reflection", boolean(&c.Reflection, true),
			"Whether to serve gRPC reflection, which grpcurl uses."},
		{"emit_token_ids", boolean(&c.Pipeline.EmitTokenIDs, false),
			"Include token ids in stored events. They are users' prompts."},
		{"emit_session_ids", boolean(&c.Pipeline.EmitSessionIDs, false),
			"Include in stored events the session ids that engines send. They may identify users."},
		{"emit_reasons", boolean(&c.Pipeline.EmitReasons, false),
			"Include in removed events why blocks were removed, if engines say it."},
		{"retain_token_ids", boolean(&c.RetainTokenIDs, false),
			"Keep the token ids of stored events in the index, and in checkpoints. They are users' prompts. Needs emit_token_ids."},
		{"retain_block_hashes", boolean(&c.RetainBlockHashes, false),
			"Keep the engines' block hashes by prompt, so that matches can have them (max_block_hashes): some 10 bytes a block."},
		{"token_id_bytes", size(&c.TokenIDBytes, 1<<30, minBytes, maxBytes),
			"Memory for token ids that are kept. Blocks beyond it are kept without."},
		{"egress", c.egressFields(), ""},
		{"workers", listOf(&c.Ingest.Workers, workerFields), ""},
		{"listeners", listOf(&c.Ingest.Listeners, listenerFields), ""},
		{"discovery", listOf(&c.Discovery, discoveryFields), ""},
	}
}

func (c *Config) ingestFields() mapping {
	in := &c.Ingest
	return mapping{
		{"on_gap", oneOf(&c.Pipeline.OnGap, pipeline.OnGapReport, pipeline.OnGapClear),
			"What to do with a dp rank's blocks when batches cannot be recovered: report keeps them and emits a Gap, clear removes them."},
		{"max_blocks_per_rank", number(&c.Pipeline.MaxBlocksPerRank, pipeline.DefaultMaxBlocksPerRank, pipeline.MaxMaxBlocksPerRank),
			"Maximum number of blocks of a dp rank. Beyond it, blocks from before the last gap are evicted, and then blocks of lower tiers; if there are none, new blocks are rejected. Both are reported."},
		{"max_blocks", number(&c.MaxBlocks, pipeline.DefaultBlocks, pipeline.MaxMaxBlocksPerRank),
			"Maximum number of blocks of all workers, some 90 bytes each. A block of a worker with several sources and consolidate: dedup counts twice, plus once for each name that a source has for it. Beyond the limit, blocks of lower tiers of the worker with most of them are evicted; if there are none, new blocks are rejected. Both are reported."},
		{"max_attribute_bytes", size(&c.MaxAttributeBytes, pipeline.DefaultAttributeBytes, minBytes, maxBytes),
			"Memory for LoRA adapter names and cache salts of all workers, at least 1MiB. Beyond it, blocks with further names or salts are rejected and reported."},
		{"silence", zeroDuration(&in.Silence, ingestconfig.DefaultSilence, 10*time.Millisecond, unlimited, -1, "for never"),
			"How long an engine may be silent before kvcast tests its connection; 0s disables the test."},
		{"grace", zeroDuration(&in.Grace, ingestconfig.DefaultGrace, 0, unlimited, -1, ""),
			"How long a worker may be disconnected before it is removed."},
		{"reconnect_max", duration(&in.ReconnectMax, ingestconfig.DefaultReconnectMax, 100*time.Millisecond, time.Hour),
			"Maximum time between two attempts to connect to an engine, 100ms to 1h. The first attempt follows the end of a connection after 1s, or this time if it is less."},
		{"replay_timeout", duration(&in.ReplayTimeout, ingestconfig.DefaultReplayTimeout, 10*time.Millisecond, time.Hour),
			"Maximum time until a reply of an engine's replay socket, 10ms to 1h. The first request to a socket waits 1s, and each further one twice as long, up to this time. On a busy machine, times are extended."},
		{"replay_patience", zeroDuration(&in.ReplayPatience, ingestconfig.DefaultReplayPatience, 0, time.Hour, -1, "for a few requests"),
			"How long a replay socket that does not answer is asked before lost batches are given up, and those after them are read. Up to 1h."},
		{"start_wait", duration(&c.StartWait, 5*time.Second, 0, time.Hour),
			"How long to wait at start for unreachable engines before serving routers; 0s does not wait, at most 1h."},
		{"discovery_wait", duration(&c.DiscoveryWait, 5*time.Minute, 0, time.Hour),
			"How long to wait at start for the first success of each discovery before serving routers, so that a server without workers does not replace one that has them; 0s does not wait, at most 1h."},
		{"max_workers", number(&in.MaxWorkers, ingestconfig.DefaultMaxWorkers, maxCount),
			"Maximum number of workers."},
		{"max_sources", number(&in.MaxSources, ingestconfig.DefaultMaxSources, maxCount),
			"Maximum number of sources of all workers. A source counts once per dp rank. One that kvcast connects to uses some 6 file descriptors with libzmq, and 1 with the native transport."},
		{"max_sources_per_address", number(&in.MaxSourcesPerAddress, ingestconfig.DefaultMaxSourcesPerAddress, maxCount),
			"Maximum number of sources that engines at one IP address make known to listeners. A source counts once per dp rank."},
		{"connect_transport", zmq(&in.ConnectZMQ, ingestconfig.DefaultConnectZMQ),
			"ZeroMQ implementation for connecting to engines and their replay sockets: native or libzmq. A build without cgo has native only."},
		{"listen_transport", zmq(&in.ListenZMQ, ingestconfig.ZMQNative),
			"ZeroMQ implementation for listeners: native, which limits what any peer can use, or libzmq. A build without cgo has native only."},
		{"max_connections", number(&in.MaxConnections, ingestconfig.DefaultMaxConnections, maxCount),
			"Maximum number of connections to all listeners with the native transport."},
		{"max_connections_per_address", number(&in.MaxConnectionsPerAddress, ingestconfig.DefaultMaxConnectionsPerAddress, maxCount),
			"Maximum number of connections from one IP address to all listeners with the native transport."},
		{"max_ranks", number(&in.MaxRanks, ingestconfig.DefaultMaxRanks, maxCount),
			"Maximum number of dp ranks that appear in batches but are not configured, of all workers."},
		{"worker_bytes", size(&in.WorkerBytes, ingestconfig.DefaultWorkerBytes, minBytes, maxBytes),
			"Memory for names, labels and endpoints of registered workers, at least 1MiB."},
		{"salt_bytes", size(&in.SaltBytes, ingestconfig.DefaultSaltBytes, minBytes, maxBytes),
			"Memory for cache salts, salted blocks, and attention groups of all engines; at least 1MiB."},
		{"receive_buffer_bytes", size(&in.ReceiveBufferBytes, ingestconfig.DefaultReceiveBufferBytes, minBytes, maxBytes),
			"Memory for received messages of all engines that wait to be processed; at least 1MiB. Messages that do not fit are dropped and requested again."},
		{"reorder_buffer_bytes", size(&in.ReorderBufferBytes, ingestconfig.DefaultReorderBufferBytes, minBytes, maxBytes),
			"Memory for live batches of all engines that wait for a replay; at least 1MiB. Batches that do not fit are requested again."},
		{"pool_bytes", size(&in.PoolBytes, ingestconfig.DefaultPoolBytes, minBytes, maxBytes),
			"Memory for the contents of blocks in pools whose servers do not tell them; at least 1MiB. Blocks that do not fit do not count as held."},
		{"register_hosts", hosts(&c.RegisterHostsText, &c.RegisterHosts),
			"Hosts that RegisterWorker may name, separated by commas: IP addresses, CIDRs, names, *.DOMAIN. Empty allows any."},
	}
}

func (c *Config) subscriberFields() mapping {
	s := &c.Server
	return mapping{
		{"max", number(&s.MaxSubscribers, server.DefaultMaxSubscribers, maxCount),
			"Maximum number of subscribers."},
		{"max_connections", number(&s.MaxConnections, server.DefaultMaxConnections, maxCount),
			"Maximum number of connections to the gRPC port, and of health watches."},
		{"max_connections_per_address", number(&s.MaxConnectionsPerAddress, server.DefaultMaxConnectionsPerAddress, maxCount),
			"Maximum number of connections, and of health watches, from one IPv4 address or IPv6 /64. Clients behind one NAT or load balancer share it."},
		{"stall", duration(&s.StallTimeout, server.DefaultStallTimeout, time.Second, time.Hour),
			"How long a subscriber may read nothing while data is pending, 1s to 1h. A snapshot must be read at 8 MiB in this time."},
		{"progress", duration(&s.ProgressInterval, server.DefaultProgressInterval, 100*time.Millisecond, time.Hour),
			"Interval of progress messages to idle subscribers. A View of a client grows older after two without a message, and is STALE after 3s."},
		{"max_snapshots", number(&s.MaxSnapshots, server.DefaultMaxSnapshots, 1024),
			"Maximum number of snapshots that are encoded at a time, 1 to 1024. Clients that want the same at the same time share one. Further ones wait."},
		{"snapshot_wait", duration(&s.MaxSnapshotWait, server.DefaultMaxSnapshotWait, 100*time.Millisecond, time.Hour),
			"How long a snapshot may wait to start, 100ms to 1h. As many may wait as there may be subscribers."},
		{"response_bytes", size(&s.ResponseBytes, server.DefaultResponseBytes, server.MinResponseBytes, server.MaxResponseBytes),
			"Approximate size of a response to a subscriber that is behind, 4KiB to 512KiB."},
		{"filter_bytes", size(&s.MaxFilterBytes, server.DefaultMaxFilterBytes, server.MinFilterBytes, maxBytes),
			"Memory for the filters of all calls, at least 1MiB."},
		{"ping_interval", duration(&s.PingInterval, server.DefaultPingInterval, time.Second, time.Hour),
			"Minimum interval of clients' keepalive pings, 1s to 1h. Clients that ping more often are disconnected."},
		{"max_connection_age", zeroDuration(&s.MaxConnectionAge, 0, time.Second, year, 0, "for no limit"),
			"Maximum age of a connection, give or take a tenth, 1s to 8760h. Its client is then asked to reconnect, so that a load balancer can choose another server. 0s sets no limit."},
		{"max_connection_age_grace", duration(&s.MaxConnectionAgeGrace, server.DefaultMaxConnectionAgeGrace, time.Second, time.Hour),
			"Time over which the subscriptions of such a connection end, and which other calls have to finish, 1s to 1h."},
	}
}

// Package ingest/config validates the values of workers and listeners, which also come from elsewhere.

func workerFields(w *ingestconfig.Worker) mapping {
	return mapping{
		{key: "name", node: word(&w.Name)},
		{key: "model", node: word(&w.Model)},
		{key: "block_size", node: number(&w.BlockSize, 0, wire.MaxBlockSize)},
		{key: "endpoint", node: word(&w.Endpoint)},
		{key: "http", node: word(&w.HTTP)},
		{key: "consolidate", node: oneOf(&w.Consolidate, feed.ConsolidateDedup, feed.ConsolidatePassthrough)},
		{key: "labels", node: labels{&w.Labels}},
		{key: "pool", node: boolean(&w.Pool, false)},
		{key: "pools", node: listOf(&w.Pools, word).atMost(ingestconfig.MaxPools)},
		{key: "chunk_size", node: number(&w.Attention.ChunkSize, 0, hybrid.MaxTokens)},
		{key: "eagle_groups", node: eagleGroups(&w.Attention.EAGLEGroups)},
		{key: "hash_seed", node: word(&w.Attention.HashSeed)},
		{key: "lora_paths", node: loraPaths(&w.Attention.LoRAPaths)},
		{key: "sources", node: listOf(&w.Sources, sourceFields).atMost(feed.MaxSources)},
	}
}

func sourceFields(s *ingestconfig.Source) mapping {
	return mapping{
		{key: "engine", node: discoveredEngine(&s.Engine)},
		{key: "connect", node: word(&s.Connect)},
		{key: "replay", node: word(&s.Replay)},
		{key: "snapshot", node: word(&s.Snapshot)},
		{key: "first_rank", node: rank(&s.FirstRank)},
		{key: "dp_size", node: number(&s.DPSize, 1, feed.MaxRanks)},
		{key: "topic", node: word(&s.Topic)},
		{key: "copies", node: copies(&s.Copies)},
		{key: "clear", node: clears(&s.Clears)},
	}
}

func listenerFields(l *ingestconfig.Listener) mapping {
	return mapping{
		{key: "bind", node: word(&l.Bind)},
		{key: "engine", node: engine(&l.Engine)},
		{key: "copies", node: copies(&l.Copies)},
		{key: "clear", node: clears(&l.Clears)},
		{key: "replay_port", node: replayPort(&l.ReplayPort, ingestconfig.DefaultReplayPort, -1)},
		{key: "worker", node: word(&l.Worker)},
		{key: "chunk_size", node: number(&l.Attention.ChunkSize, 0, hybrid.MaxTokens)},
		{key: "eagle_groups", node: eagleGroups(&l.Attention.EAGLEGroups)},
		{key: "hash_seed", node: word(&l.Attention.HashSeed)},
		{key: "lora_paths", node: loraPaths(&l.Attention.LoRAPaths)},
		{key: "topics", node: listOf(&l.Topics, word)},
		{key: "replay_hosts", node: listOf(&l.ReplayHosts, word)},
	}
}

func discoveryFields(d *Discovery) mapping {
	dns := field{key: "dns", node: text(&d.DNS, "", ingestconfig.ValidHost, "the name of a host, such as vllm.default.svc")}
	engines := mapping{
		{key: "port", node: number(&d.Engines.Port, 0, math.MaxUint16)},
		{key: "replay_port", node: replayPort(&d.Engines.ReplayPort, 0, 0)},
		{key: "engine", node: discoveredEngine(&d.Engines.Engine)},
		{key: "copies", node: copies(&d.Engines.Copies)},
		{key: "clear", node: clears(&d.Engines.Clears)},
		{key: "model", node: text(&d.Engines.Model, "", ingestconfig.ValidModel, ingestconfig.AllowedModel)},
		{key: "block_size", node: number(&d.Engines.BlockSize, 0, wire.MaxBlockSize)},
		{key: "pools", node: listOf(&d.Engines.Pools, poolName).atMost(ingestconfig.MaxPools)},
	}
	k := &d.Kubernetes
	selector := field{key: "kubernetes", node: text(&k.Selector, "", kubernetes.ValidSelector, "a label selector, such as llm-d.ai/inference-serving=true")}
	pool := field{key: "inference_pool", node: text(&k.Pool, "", kubernetes.ValidPool, "the name of an InferencePool, such as vllm-qwen3")}
	pods := mapping{
		{key: "namespaces", node: listOf(&k.Namespaces, namespace)},
		{key: "kubeconfig", node: fileName(&k.Kubeconfig, ingestconfig.Printable)},
		{key: "http_port", node: number(&k.HTTPPort, 0, math.MaxUint16)},
		{key: "dp_size", node: number(&k.DPSize, 0, feed.MaxRanks)},
		{key: "labels", node: listOf(&k.Labels, podLabel)},
	}
	file := field{key: "file", node: fileName(&d.File, func(s string) bool { return s != "" && ingestconfig.Printable(s) })}
	interval := field{key: "interval", node: duration(&d.Interval, discovery.DefaultInterval, 100*time.Millisecond, time.Hour)}
	switch {
	case d.File != "":
		return mapping{file, interval}
	case d.DNS != "":
		return slices.Concat(mapping{dns}, engines, mapping{interval})
	case k.Selector != "":
		return slices.Concat(mapping{selector}, pods, engines)
	case k.Pool != "":
		return slices.Concat(mapping{pool}, pods, engines)
	default:
		return slices.Concat(mapping{dns}, engines, mapping{selector, pool}, pods, mapping{file, interval})
	}
}
