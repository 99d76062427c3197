package config

import (
	"fmt"
	"math"
	"strconv"
	"strings"

	ingestconfig "github.com/kvcast/kvcast/ingest/config"
	"github.com/kvcast/kvcast/internal/feed"
)

// Egress is how routers that do not use kvcast's API read the state.
type Egress struct {
	ZMQ    ZMQ
	Dynamo Dynamo
	SMG    SMG
	SGLang SGLang
}

// ZMQ publishes events in vLLM's format over ZeroMQ.
type ZMQ struct {
	// Bind is an endpoint for all workers; empty: none. Connect are the endpoints of consumers.
	Bind    string
	Connect []string
	// Publishers are endpoints for single workers.
	Publishers []Publisher
	// Topic is the pattern of topics; see vllm.Config.
	Topic    string
	Events   EventForm
	FirstSeq FirstSeq

	HistoryBatches int
	HistoryBytes   int
	StateBytes     int64
	MaxConsumers   int
}

// Publisher is the endpoints of DPSize dp ranks of a worker, from FirstRank on: rank FirstRank + i has the ports + i.
type Publisher struct {
	Worker, Bind, Replay string
	FirstRank, DPSize    int
}

// EventForm is the encoding of events.
type EventForm string

// The forms.
const (
	EventMaps   EventForm = "map"
	EventArrays EventForm = "array"
)

// FirstSeq is the first seq of a dp rank.
type FirstSeq string

// The first seqs.
const (
	FirstSeqTime FirstSeq = "time" // larger than all of earlier runs
	FirstSeqZero FirstSeq = "zero"
)

// Enabled reports whether anything is published.
func (z *ZMQ) Enabled() bool { return z.Bind != "" || len(z.Connect)+len(z.Publishers) > 0 }

// Dynamo answers the queries of Dynamo's routers over HTTP.
type Dynamo struct {
	Listen string // address; empty: none
	// WorkerIDLabel and GroupLabel are keys of workers' labels; empty: none.
	WorkerIDLabel, GroupLabel string
	WorkerIDs                 []WorkerID
}

// WorkerID is the id of a worker.
type WorkerID struct {
	Worker string
	ID     uint64
}

// SMG answers SubscribeKvEvents at the gRPC port.
type SMG struct {
	Enabled        bool
	Workers        []Authority
	HistoryBytes   int
	StateBytes     int64
	MaxSubscribers int
}

// Authority is the worker that an authority of calls names.
type Authority struct {
	Authority, Worker string
}

// SGLang answers MatchExternalKvPrefix at the gRPC port.
type SGLang struct {
	Enabled bool
	// Address is the pattern of addresses; see sglang.Config.
	Address string
	Workers []Address
}

// Address is the address by which routers know a worker.
type Address struct {
	Worker, Address string
}

func (c *Config) egressFields() mapping {
	d, z, s, g := &c.Egress.Dynamo, &c.Egress.ZMQ, &c.Egress.SMG, &c.Egress.SGLang
	return mapping{
		{"zmq", mapping{
			{"bind", text(&z.Bind, "", func(s string) bool { return s == "" || isBind(s) }, ingestconfig.AllowedBind+", or nothing for no such endpoint"),
				"ZeroMQ endpoint at which the events of all workers are published in vLLM's format, such as tcp://*:5560. Needs retain_token_ids."},
			{"connect", listOf(&z.Connect, consumer), ""},
			{"publishers", listOf(&z.Publishers, publisherFields), ""},
			{"topic", text(&z.Topic, "kv@{endpoint}@{model}", isTopic, "at most 1024 bytes of UTF-8 without control or format characters, with no other {names} than {worker}, {endpoint}, {rank_endpoint}, {model} and {rank}"),
				"Topic of batches. {worker}, {endpoint} (the address for requests, or the worker's name), {rank_endpoint} (that with a port for each dp rank, from its own on), {model} and {rank} are replaced. It may be empty if there are publishers only."},
			{"events", oneOf(&z.Events, EventMaps, EventArrays),
				"Encoding of events: map, as vLLM since 0.26, or array."},
			{"first_seq", oneOf(&z.FirstSeq, FirstSeqTime, FirstSeqZero),
				"First seq of a dp rank: time, which is larger than all seqs before a restart of kvcast, or zero, as engines do."},
			{"history_batches", number(&z.HistoryBatches, 10_000, maxCount),
				"Batches that are kept for each endpoint, for replays and for consumers that are behind."},
			{"history_bytes", size(&z.HistoryBytes, 256<<20, minBytes, maxBytes),
				"Memory for these batches of all endpoints together, but at least 1MiB for each."},
			{"state_bytes", size(&z.StateBytes, 256<<20, minBytes, maxBytes),
				"Memory for blocks that are being sent to consumers that have joined. Beyond it, consumers are disconnected."},
			{"max_consumers", number(&z.MaxConsumers, 1024, maxCount),
				"Maximum number of connections of consumers, to PUB and replay sockets."},
		}, ""},
		{"dynamo", mapping{
			{"listen", text(&d.Listen, "", func(s string) bool { return s == "" || isAddress(s) }, "HOST:PORT or :PORT, or nothing for no such port"),
				"HTTP listen address for Dynamo's routers, whose flag --remote-indexer-url names it. Empty disables it."},
			{"worker_id_label", text(&d.WorkerIDLabel, "dynamo/worker-id", isLabelKey, "the key of a label, or nothing"),
				"Label with the id under which Dynamo's routers know a worker."},
			{"group_label", text(&d.GroupLabel, "dynamo/routing-group", isLabelKey, "the key of a label, or nothing"),
				"Label with a worker's routing group, which is default for a worker without the label."},
			{"worker_ids", listOf(&d.WorkerIDs, workerIDFields), ""},
		}, ""},
		{"smg", mapping{
			{"enabled", boolean(&s.Enabled, false),
				"Answer SubscribeKvEvents of SMG's engines at the gRPC port. Needs retain_token_ids."},
			{"workers", listOf(&s.Workers, authorityFields), ""},
			{"history_bytes", size(&s.HistoryBytes, 256<<20, minBytes, maxBytes),
				"Memory for batches of all workers that are kept for subscribers, but at least 1MiB for each worker."},
			{"state_bytes", size(&s.StateBytes, 256<<20, minBytes, maxBytes),
				"Memory for blocks that are being sent to new subscribers, three quarters of it for those of one address. Beyond it, they are refused."},
			{"max_subscribers", number(&s.MaxSubscribers, 1024, maxCount),
				"Maximum number of open streams of SubscribeKvEvents, of which one address may use three quarters."},
		}, ""},
		{"sglang", mapping{
			{"enabled", boolean(&g.Enabled, false),
				"Answer MatchExternalKvPrefix of SGLang's KV indexer at the gRPC port."},
			{"address", text(&g.Address, "http://{endpoint}", isAddressPattern, "a URL of at most 1024 bytes, with no other {names} than {endpoint} and {worker}"),
				"URL by which SGLang's router knows a worker. {endpoint} (the address for requests) and {worker} are replaced."},
			{"workers", listOf(&g.Workers, addressFields), ""},
		}, ""},
	}
}

func workerIDFields(w *WorkerID) mapping {
	return mapping{
		{key: "worker", node: text(&w.Worker, "", func(s string) bool { return s != "" }, "the name of a worker")},
		{key: "id", node: workerID(&w.ID)},
	}
}

func authorityFields(a *Authority) mapping {
	isSet := func(s string) bool { return s != "" }
	return mapping{
		{key: "authority", node: text(&a.Authority, "", isSet, "HOST or HOST:PORT, as clients name the worker")},
		{key: "worker", node: text(&a.Worker, "", isSet, "the name of a worker")},
	}
}

func addressFields(a *Address) mapping {
	isSet := func(s string) bool { return s != "" }
	return mapping{
		{key: "worker", node: text(&a.Worker, "", isSet, "the name of a worker")},
		{key: "address", node: text(&a.Address, "", isSet, "the URL by which SGLang's router knows the worker")},
	}
}

func consumer(to *string) *value {
	return text(to, "", func(s string) bool { _, ok := ingestconfig.ParseEndpoint(s, false); return ok }, ingestconfig.AllowedConnect)
}

func publisherFields(p *Publisher) mapping {
	return mapping{
		{key: "worker", node: text(&p.Worker, "", func(s string) bool { return s != "" }, "the name of a worker")},
		{key: "bind", node: text(&p.Bind, "", isBind, ingestconfig.AllowedBind)},
		{key: "replay", node: text(&p.Replay, "", isBind, ingestconfig.AllowedBind)},
		{key: "first_rank", node: rank(&p.FirstRank)},
		{key: "dp_size", node: number(&p.DPSize, 1, feed.MaxRanks)},
	}
}

func isBind(s string) bool { _, ok := ingestconfig.ParseEndpoint(s, true); return ok }

func isTopic(s string) bool {
	return s == "" || isPattern(s, "{worker}", "{endpoint}", "{rank_endpoint}", "{model}", "{rank}")
}

// isAddressPattern reports whether a text with {endpoint} and {worker} replaced can be a URL.
func isAddressPattern(s string) bool {
	return isPattern(s, "{endpoint}", "{worker}") && (strings.Contains(s, "://") || strings.HasPrefix(s, "{endpoint}"))
}

// isPattern reports whether a text has no other {names} than some.
func isPattern(s string, names ...string) bool {
	if s == "" || len(s) > 1024 || !ingestconfig.Printable(s) {
		return false
	}
	for _, name := range names {
		s = strings.ReplaceAll(s, name, "")
	}
	return !strings.ContainsAny(s, "{}")
}

func isLabelKey(s string) bool { return ingestconfig.Printable(s) }

func workerID(to *uint64) *value {
	parse := func(s string) (uint64, bool) {
		n, err := strconv.ParseUint(s, 10, 64)
		return n, err == nil
	}
	return newValue(to, 0, fmt.Sprintf("0 to %d", uint64(math.MaxUint64)), parse, func(n uint64) string { return strconv.FormatUint(n, 10) })
}

// validateEgress requires what egress needs, names in lists, and that none is given twice.
func (r *reader) validateEgress() {
	if c := r.config; c.RetainTokenIDs && !c.Pipeline.EmitTokenIDs && c.Cluster.Ingest && !r.isWrong("emit_token_ids") {
		r.wrongGiven("retain_token_ids", notAllowed("true", "emit_token_ids: true as well, since the index keeps the token ids that entries have"))
	}
	r.validateZMQ()
	r.validateSMG()
	r.validateSGLang()
	seen, ids := make(map[string]bool), make(map[uint64]bool)
	for i, w := range r.config.Egress.Dynamo.WorkerIDs {
		item := fmt.Sprintf("egress.dynamo.worker_ids[%d]", i)
		switch {
		case r.isWrong(join(item, "worker")) || r.isWrong(item):
		case w.Worker == "":
			r.wrong(r.origins[item], join(item, "worker"), "is missing: want the name of a worker")
		case seen[w.Worker]:
			r.wrongGiven(join(item, "worker"), fmt.Sprintf("%q is given twice: want each worker once", w.Worker))
		}
		switch _, ok := r.origins[join(item, "id")]; {
		case r.isWrong(join(item, "id")) || r.isWrong(item):
		case !ok:
			r.wrong(r.origins[item], join(item, "id"), "is missing: want the id under which Dynamo's routers know the worker")
		case ids[w.ID]:
			r.wrongGiven(join(item, "id"), fmt.Sprintf("%d is given twice: want each id once", w.ID))
		default:
			ids[w.ID] = true
		}
		seen[w.Worker] = true
	}
}

// validateSMG requires token ids, which gateways hash, and both parts of each authority.
func (r *reader) validateSMG() {
	s := &r.config.Egress.SMG
	if s.Enabled && !r.config.RetainTokenIDs && !r.isWrong("retain_token_ids") {
		r.wrongGiven("egress.smg.enabled", notAllowed("true", "retain_token_ids: true and emit_token_ids: true as well, since gateways hash token ids"))
	}
	seen := make(map[string]bool)
	for i, a := range s.Workers {
		item := fmt.Sprintf("egress.smg.workers[%d]", i)
		r.validateBoth(item, "authority", "worker")
		if seen[a.Authority] && a.Authority != "" {
			r.wrongGiven(join(item, "authority"), fmt.Sprintf("%q is given twice: want each authority once", a.Authority))
		}
		seen[a.Authority] = true
	}
}

// validateSGLang requires both parts of each address, and one address for a worker.
func (r *reader) validateSGLang() {
	seen := make(map[string]bool)
	for i, a := range r.config.Egress.SGLang.Workers {
		item := fmt.Sprintf("egress.sglang.workers[%d]", i)
		r.validateBoth(item, "worker", "address")
		if seen[a.Worker] && a.Worker != "" {
			r.wrongGiven(join(item, "worker"), fmt.Sprintf("%q is given twice: want each worker once", a.Worker))
		}
		seen[a.Worker] = true
	}
}

// validateBoth requires two keys of an element.
func (r *reader) validateBoth(item, a, b string) {
	for _, key := range []string{a, b} {
		if _, ok := r.origins[join(item, key)]; !ok && !r.isWrong(item) {
			r.wrong(r.origins[item], join(item, key), fmt.Sprintf("is missing: want %s and %s", a, b))
		}
	}
}

// validateZMQ checks three things: that there are token ids, without which consumers cannot hash blocks; that there is a topic if workers share an
// endpoint, at which consumers tell them apart by it; and that each publisher has what it needs.
func (r *reader) validateZMQ() {
	z := &r.config.Egress.ZMQ
	if z.Enabled() && !r.config.RetainTokenIDs && !r.isWrong("retain_token_ids") {
		path := "egress.zmq.bind"
		switch {
		case len(z.Publishers) > 0:
			path = "egress.zmq.publishers"
		case len(z.Connect) > 0:
			path = "egress.zmq.connect"
		}
		r.wrongGiven(path, "is not allowed without token ids, which consumers hash: want retain_token_ids: true and emit_token_ids: true as well")
	}
	if z.Topic == "" && (z.Bind != "" || len(z.Connect) > 0) && !r.isWrong("egress.zmq.topic") {
		r.wrongGiven("egress.zmq.topic", notAllowed("", "a topic with bind or connect, whose consumers tell workers apart by it, or only publishers"))
	}
	for i, p := range z.Publishers {
		item := fmt.Sprintf("egress.zmq.publishers[%d]", i)
		r.validateBoth(item, "worker", "bind")
		if p.FirstRank+p.DPSize > feed.MaxRanks {
			r.wrongGiven(join(item, "first_rank"), notAllowed(strconv.Itoa(p.FirstRank), fmt.Sprintf("at most %d with %d dp ranks", feed.MaxRanks-p.DPSize, p.DPSize)))
		}
		for key, endpoint := range map[string]string{"bind": p.Bind, "replay": p.Replay} {
			at, ok := ingestconfig.ParseEndpoint(endpoint, true)
			if ok && at.Transport == ingestconfig.TransportTCP && p.DPSize > 1 && (at.Port == 0 || at.Port+p.DPSize-1 > ingestconfig.MaxPort) {
				r.wrongGiven(join(item, key), notAllowed(endpoint, fmt.Sprintf("a port with %d ports after it, one for each dp rank", p.DPSize-1)))
			}
		}
	}
}
