package config

import (
	"errors"
	"fmt"
	"maps"
	"net/url"
	"path"
	"slices"
	"strconv"
	"strings"
	"time"
	"unicode"
	"unicode/utf8"

	"github.com/kvcast/kvcast/internal/core/index/hybrid"
	"github.com/kvcast/kvcast/internal/feed"
	"github.com/kvcast/kvcast/internal/wire"
)

// FieldError is an invalid field of a Config.
type FieldError struct {
	// Field is the path of the field, such as Workers[0].Sources[1].Connect.
	Field string
	// Value is the invalid value.
	Value any
	// Allowed describes valid values.
	Allowed string
}

// Error names the field, its value, and what is allowed.
func (e *FieldError) Error() string {
	if s, ok := e.Value.(string); ok {
		return fmt.Sprintf("%s is %q: must be %s", e.Field, s, e.Allowed)
	}
	return fmt.Sprintf("%s is %v: must be %s", e.Field, e.Value, e.Allowed)
}

// Path returns Field in snake case, as in configuration files: workers[0].sources[1].dp_size. The key of a label is not changed.
func (e *FieldError) Path() string {
	names, label, isLabel := strings.Cut(e.Field, `["`)
	var path strings.Builder
	for i, c := range names {
		isUpper := i > 0 && unicode.IsUpper(c) && names[i-1] != '.' // a new word, or a letter of an acronym
		if isUpper && (unicode.IsLower(rune(names[i-1])) || i+1 < len(names) && unicode.IsLower(rune(names[i+1]))) {
			path.WriteByte('_')
		}
		path.WriteRune(unicode.ToLower(c))
	}
	if isLabel {
		path.WriteString(`["` + label)
	}
	return path.String()
}

// FieldErrors returns the errors that Validate has joined; none for other errors.
func FieldErrors(err error) (all []*FieldError) {
	if joined, ok := err.(interface{ Unwrap() []error }); ok {
		for _, err := range joined.Unwrap() {
			var field *FieldError
			if errors.As(err, &field) {
				all = append(all, field)
			}
		}
	}
	return all
}

// maxLabels is how many labels a worker may have.
const maxLabels = 64

// maxLoRAPaths is of how many LoRA adapters a worker may have the paths.
const maxLoRAPaths = 1024

// AllowedName and AllowedModel describe valid names in errors.
const (
	AllowedName  = "1 to 253 bytes of UTF-8 without control or format characters"
	AllowedModel = "at most 1024 bytes of UTF-8 without control or format characters"
	AllowedHTTP  = "http://HOST:PORT or https://HOST:PORT"
)

// HTTPEngines are the engines that can be asked at Worker.HTTP.
var HTTPEngines = []feed.Engine{feed.EngineVLLM, feed.EngineSGLang}

// ValidHTTP reports whether a text is a URL with a host and a port alone.
func ValidHTTP(text string) bool {
	u, err := url.Parse(text)
	if err != nil || u.Scheme != "http" && u.Scheme != "https" || u.Scheme+"://"+u.Host != text {
		return false
	}
	port, err := strconv.ParseUint(u.Port(), 10, 16)
	return err == nil && port > 0 && u.Hostname() != ""
}

// Validate returns nil, or a FieldError for each invalid field, joined.
func (c Config) Validate() error {
	var v Validation
	c = c.WithDefaults()
	v.Check(c.MaxWorkers > 0, "MaxWorkers", c.MaxWorkers, "above 0")
	v.Check(c.MaxSources > 0, "MaxSources", c.MaxSources, "above 0")
	v.Check(c.MaxSourcesPerAddress > 0, "MaxSourcesPerAddress", c.MaxSourcesPerAddress, "above 0")
	v.Check(c.MaxRanks > 0, "MaxRanks", c.MaxRanks, "above 0")
	v.Check(c.MaxConnections > 0, "MaxConnections", c.MaxConnections, "above 0")
	v.Check(c.MaxConnectionsPerAddress > 0, "MaxConnectionsPerAddress", c.MaxConnectionsPerAddress, "above 0")
	v.Check(c.ConnectZMQ.Available(), "ConnectZMQ", string(c.ConnectZMQ), AllowedZMQ())
	v.Check(c.ListenZMQ.Available(), "ListenZMQ", string(c.ListenZMQ), AllowedZMQ())
	v.Check(c.WorkerBytes > 0, "WorkerBytes", c.WorkerBytes, "above 0")
	v.Check(c.SaltBytes > 0, "SaltBytes", c.SaltBytes, "above 0")
	v.Check(c.ReceiveBufferBytes > 0, "ReceiveBufferBytes", c.ReceiveBufferBytes, "above 0")
	v.Check(c.PoolBytes > 0, "PoolBytes", c.PoolBytes, "above 0")
	v.Check(c.ReorderBufferBytes > 0, "ReorderBufferBytes", c.ReorderBufferBytes, "above 0")
	v.Durations(c)
	for i, w := range c.Workers {
		v.worker(fmt.Sprintf("Workers[%d]", i), w)
	}
	for i, l := range c.Listeners {
		v.listener(fmt.Sprintf("Listeners[%d]", i), l)
	}
	v.Check(c.MaxWorkers < 0 || len(v.names) <= c.MaxWorkers, "Workers", len(v.names),
		fmt.Sprintf("at most %d, with the workers that listeners name", c.MaxWorkers))
	v.Check(c.MaxSources <= 0 || c.sources() <= c.MaxSources || v.errs != nil, "Workers", c.sources(),
		fmt.Sprintf("at most %d sources, each dp rank counted", c.MaxSources))
	const socketsEach = 3 // libzmq sockets of a source or listener: its own and two of its monitor
	sockets := 0
	if c.ConnectZMQ == ZMQLib {
		sockets += socketsEach * c.sources()
	}
	if c.ListenZMQ == ZMQLib {
		sockets += socketsEach * len(c.Listeners)
	}
	v.Check(sockets <= MaxSockets || v.errs != nil, "Workers", sockets,
		fmt.Sprintf("sources, each dp rank counted, that with the listeners use at most %d sockets of libzmq", MaxSockets))
	return v.Err()
}

// sources returns the number of sources of the workers, each counted once for each dp rank.
func (c Config) sources() (n int) {
	for _, w := range c.Workers {
		n += w.Publishers()
	}
	return n
}

// Publishers returns the number of sources, each counted once for each dp rank.
func (w Worker) Publishers() (n int) {
	for _, s := range w.Sources {
		n += s.DPSize
	}
	return n
}

// Bytes returns the approximate memory of the worker's strings, in bytes. Ingest and pipeline each have a copy.
func (w Worker) Bytes() int64 {
	const labelOverhead, rankOverhead = 128, 48
	n := len(w.Name) + len(w.Model) + len(w.Endpoint)
	for k, value := range w.Labels {
		n += len(k) + len(value) + labelOverhead
	}
	for _, name := range w.Pools {
		n += len(name) + rankOverhead
	}
	for name, path := range w.Attention.LoRAPaths {
		n += len(name) + len(path) + labelOverhead
	}
	n += len(w.Attention.HashSeed)
	for _, s := range w.Sources {
		n += len(s.Connect) + len(s.Replay) + len(s.Snapshot) + len(s.Topic)
		for _, r := range s.Ranks {
			n += len(r.Connect) + len(r.Replay) + rankOverhead
		}
	}
	return 2 * int64(n)
}

// Validation collects the errors of a config. The zero Validation is ready to use.
type Validation struct {
	errs    []error
	names   map[string]bool   // names of workers
	asked   map[string]string // names of workers by the HTTP server of their engine
	sockets SocketSet
}

// Err returns the errors, joined; nil if there are none.
func (v *Validation) Err() error { return errors.Join(v.errs...) }

// Check adds an error for a field if ok is false.
func (v *Validation) Check(ok bool, field string, value any, allowed string) {
	if !ok {
		v.errs = append(v.errs, &FieldError{Field: field, Value: value, Allowed: allowed})
	}
}

// Durations checks the durations of a config, except Grace.
func (v *Validation) Durations(c Config) {
	v.Check(c.ReplayTimeout >= 10*time.Millisecond && c.ReplayTimeout <= time.Hour,
		"ReplayTimeout", c.ReplayTimeout, "10 ms to 1 h")
	v.Check(c.ReplayPatience <= time.Hour, "ReplayPatience", c.ReplayPatience, "at most 1 h")
	v.Check(c.ReconnectMin >= time.Millisecond && c.ReconnectMin <= time.Hour,
		"ReconnectMin", c.ReconnectMin, "1 ms to 1 h")
	v.Check(c.ReconnectMax >= c.ReconnectMin && c.ReconnectMax <= time.Hour,
		"ReconnectMax", c.ReconnectMax, "at least the minimum, and at most 1 h")
	v.Check(c.PeerTTL == 0 || c.PeerTTL >= 100*time.Millisecond, "PeerTTL", c.PeerTTL, "100 ms or more, or 0 for none")
	v.Check(c.Silence < 0 || c.Silence >= 10*time.Millisecond, "Silence", c.Silence, "10 ms or more, or negative for never")
}

func (v *Validation) attention(field string, a *Attention) {
	v.Check(a.ChunkSize >= 0 && a.ChunkSize <= hybrid.MaxTokens, field+".ChunkSize", a.ChunkSize, fmt.Sprintf("at most %d", hybrid.MaxTokens))
	v.Check(a.HashSeed == "" || ValidModel(a.HashSeed), field+".HashSeed", a.HashSeed, AllowedModel)
	v.Check(len(a.LoRAPaths) <= maxLoRAPaths, field+".LoraPaths", len(a.LoRAPaths), fmt.Sprintf("at most %d", maxLoRAPaths))
	for _, name := range slices.Sorted(maps.Keys(a.LoRAPaths)) {
		path := fmt.Sprintf("%s.LoraPaths[%q]", field, name)
		v.Check(name != "" && ValidModel(name), path, name, "a key of "+AllowedModel)
		v.Check(a.LoRAPaths[name] != "" && ValidModel(a.LoRAPaths[name]), path, a.LoRAPaths[name], AllowedModel)
	}
}

func (v *Validation) worker(field string, w Worker) {
	before := len(v.errs)
	v.Name(field+".Name", w.Name)
	v.Check(ValidModel(w.Model), field+".Model", w.Model, AllowedModel)
	v.Check(w.BlockSize <= wire.MaxBlockSize, field+".BlockSize", w.BlockSize, fmt.Sprintf("at most %d", wire.MaxBlockSize))
	v.Check(ValidModel(w.Endpoint), field+".Endpoint", w.Endpoint, AllowedModel)
	v.Check(w.HTTP == "" || ValidHTTP(w.HTTP), field+".HTTP", w.HTTP, AllowedHTTP)
	v.Check(w.HTTP == "" || len(w.Sources) == 1 && slices.Contains(HTTPEngines, w.Sources[0].Engine), field+".HTTP", w.HTTP,
		"none unless the worker has one source, of the engine vllm or sglang")
	for _, key := range slices.Sorted(maps.Keys(w.Labels)) {
		label := fmt.Sprintf("%s.Labels[%q]", field, key)
		v.Check(ValidName(key), label, key, "a key of "+AllowedName)
		v.Check(ValidModel(w.Labels[key]), label, w.Labels[key], AllowedModel)
	}
	v.Check(len(w.Labels) <= maxLabels, field+".Labels", len(w.Labels), fmt.Sprintf("at most %d", maxLabels))
	v.pools(field, w)
	v.attention(field+".Attention", &w.Attention)
	v.Check(len(w.Sources) > 0, field+".Sources", len(w.Sources), "one source at least")
	v.Check(len(w.Sources) <= feed.MaxSources, field+".Sources", len(w.Sources), fmt.Sprintf("at most %d", feed.MaxSources))
	v.Check(w.Consolidate == feed.ConsolidateDedup || w.Consolidate == feed.ConsolidatePassthrough,
		field+".Consolidate", string(w.Consolidate), "dedup or passthrough")
	for i, s := range w.Sources {
		v.source(fmt.Sprintf("%s.Sources[%d]", field, i), s)
	}
	tooManyInOne := slices.ContainsFunc(w.Sources, func(s Source) bool { return s.DPSize > feed.MaxRanks })
	v.Check(tooManyInOne || w.Publishers() <= feed.MaxRanks, field+".Sources", w.Publishers(), fmt.Sprintf("at most %d, ranks counted", feed.MaxRanks))
	if len(v.errs) == before {
		v.conflicts(field, w)
	}
}

// MaxPools bounds the pools of a worker.
const MaxPools = 16

// pools checks the pools of a worker, and a worker that is one.
func (v *Validation) pools(field string, w Worker) {
	v.Check(len(w.Pools) == 0 || !w.Pool, field+".Pools", w.Pools, "none of a pool")
	v.Check(len(w.Pools) <= MaxPools, field+".Pools", len(w.Pools), fmt.Sprintf("at most %d", MaxPools))
	for i, name := range w.Pools {
		v.Check(ValidName(name) && !slices.Contains(w.Pools[:i], name), fmt.Sprintf("%s.Pools[%d]", field, i), name, "the name of another pool: "+AllowedName)
	}
	if slices.ContainsFunc(w.Sources, func(s Source) bool { return s.Engine.IsPool() }) {
		v.Check(len(w.Sources) == 1, field+".Sources", len(w.Sources), "one, if the engine is a store")
		v.Check(w.Model != "", field+".Model", w.Model, "the model whose blocks are read, if the engine is a store")
	}
}

// conflicts checks that no other worker reads the sockets of a valid one, and that its sources and ranks have their own. An
// engine that is asked may tell others than the configured ones: these must not conflict with each other alone.
func (v *Validation) conflicts(field string, w Worker) {
	sockets := &v.sockets
	if w.HTTP != "" {
		server := normalHTTP(w.HTTP)
		other, ok := v.asked[server]
		v.Check(!ok, field+".HTTP", w.HTTP, fmt.Sprintf("that of another engine than worker %q has", other))
		if v.asked == nil {
			v.asked = make(map[string]string)
		}
		v.asked[server], sockets = w.Name, new(SocketSet)
	}
	sockets.add(v, field, w)
}

func (v *Validation) source(field string, s Source) {
	v.Check(s.Engine.Known(), field+".Engine", string(s.Engine), AllowedEngines)
	v.Check(s.Copies.known(), field+".Copies", string(s.Copies), allowedCopies)
	v.Check(s.Clears.known(), field+".Clears", string(s.Clears), allowedClears)
	v.Check(s.DPSize >= 1 && s.DPSize <= feed.MaxRanks, field+".DPSize", s.DPSize, fmt.Sprintf("1 to %d", feed.MaxRanks))
	if s.DPSize >= 1 && s.DPSize <= feed.MaxRanks {
		last := feed.MaxRanks - s.DPSize
		if len(s.Ranks) > 0 { // checked one by one
			last = feed.MaxRanks - 1
		}
		want := fmt.Sprintf("0 to %d", last)
		if last < feed.MaxRanks-1 {
			want += fmt.Sprintf(" with %d ranks", s.DPSize)
		}
		v.Check(s.FirstRank >= 0 && s.FirstRank <= last, field+".FirstRank", s.FirstRank, want)
	}
	v.Check(ValidModel(s.Topic), field+".Topic", s.Topic, AllowedModel)
	if len(s.Ranks) > 0 {
		v.ranks(field+".Ranks", s)
		s.DPSize = 1 // of Connect and Replay
	}
	v.connect(field+".Connect", s.Connect, s)
	if s.Replay != "" {
		v.socket(field+".Replay", s.Replay, s)
	}
	if e, ok := ParseSource(s.Connect); ok {
		isMooncake, isWorkers, isCoordinator := s.Engine == feed.EngineMooncake, s.Engine == feed.EngineWorkers, s.Engine == feed.EngineLMCacheCoordinator
		v.Check(s.Topic == "" || !e.Called() || isMooncake || isCoordinator, field+".Topic", s.Topic, "none, unless the endpoint is tcp://, ipc://, lmcache-coordinator:// or mooncake://")
		isLMCache := s.Engine == feed.EngineLMCache
		v.Check(!isLMCache || e.Transport == TransportLMCache, field+".Connect", s.Connect, "lmcache://HOST:PORT, if the engine is lmcache")
		v.Check(isLMCache || e.Transport != TransportLMCache, field+".Engine", string(s.Engine), "lmcache, if the endpoint is lmcache://HOST:PORT")
		v.Check(isMooncake == (e.Transport == TransportMooncake), field+".Connect", s.Connect, "mooncake://HOST:PORT, of the master's HTTP server, if and only if the engine is mooncake")
		v.Check(isCoordinator == (e.Transport == TransportLMCacheCoordinator), field+".Connect", s.Connect, "lmcache-coordinator://HOST:PORT, if and only if the engine is lmcache-coordinator")
		v.Check(isWorkers == (e.Transport == TransportWorkers), field+".Connect", s.Connect, "workers://disk or workers://external, if and only if the engine is workers")
		v.Check(!s.Engine.IsPool() || s.DPSize == 1 && s.FirstRank == 0, field+".DPSize", s.DPSize, "1, from rank 0 on, if the engine is a store")
	}
	if s.Snapshot != "" {
		v.Check(SnapshotEngine(s.Engine), field+".Snapshot", s.Snapshot, "none, unless the engine is vllm or sglang")
		for _, r := range s.Ranks {
			s.DPSize = max(s.DPSize, int(r.Rank)-s.FirstRank+1) // the endpoint of a rank follows from that of the first
		}
		v.socket(field+".Snapshot", s.Snapshot, s)
	}
}

// ranks checks the endpoints of each dp rank.
func (v *Validation) ranks(field string, s Source) {
	v.Check(len(s.Ranks) == s.DPSize, field, len(s.Ranks), fmt.Sprintf("%d, as DPSize", s.DPSize))
	seen := make(map[uint32]bool)
	for i, r := range s.Ranks {
		item := fmt.Sprintf("%s[%d]", field, i)
		isAllowed := r.Rank < feed.MaxRanks && int(r.Rank) >= s.FirstRank && !seen[r.Rank]
		v.Check(isAllowed, item+".Rank", r.Rank, fmt.Sprintf("unique, %d to %d", s.FirstRank, feed.MaxRanks-1))
		seen[r.Rank] = true
		one := Source{Engine: s.Engine, DPSize: 1}
		v.connect(item+".Connect", r.Connect, one)
		if one.Connect = r.Connect; r.Replay != "" {
			v.socket(item+".Replay", r.Replay, one)
		}
	}
}

// connect checks the endpoint of a source's first rank, and the endpoints of its other ranks.
func (v *Validation) connect(field, value string, s Source) {
	e, ok := ParseSource(value)
	v.Check(ok, field, value, AllowedSource)
	v.ofRanks(field, value, s, e)
}

// socket checks the endpoint of another socket of a source's first rank, and the endpoints of its other ranks.
func (v *Validation) socket(field, value string, s Source) {
	if connect, _ := ParseSource(s.Connect); connect.Called() {
		v.Check(false, field, value, "none, unless the publisher's endpoint is tcp:// or ipc://")
		return
	}
	e, ok := ParseEndpoint(value, false)
	v.Check(ok, field, value, AllowedConnect)
	v.ofRanks(field, value, s, e)
}

// ofRanks checks the endpoints of a source's ranks. That of the first is parsed; it is zero if it is invalid.
func (v *Validation) ofRanks(field, value string, s Source, e Endpoint) {
	if s.DPSize > feed.MaxRanks {
		return
	}
	switch e.Transport {
	case TransportTCP:
		v.Check(e.Port+s.DPSize-1 <= MaxPort, field, value,
			fmt.Sprintf("tcp://HOST:PORT with room for %d ranks' ports below %d", s.DPSize, MaxPort+1))
	case TransportIPC:
		isAllowed := s.DPSize <= 1 || s.Engine == feed.EngineTRTLLM && s.FirstRank == 0
		v.Check(isAllowed, field, value, "tcp if there are several dp ranks, except from rank 0 on for the engine trtllm")
		last := max(s.DPSize-1, 0)
		v.Check(!isAllowed || len(e.OfRank(last).Address) <= maxIPCPath, field, value,
			fmt.Sprintf("ipc://PATH with at most %d bytes in PATH_dp%d, the last rank's path", maxIPCPath, last))
	}
}

func (v *Validation) listener(field string, l Listener) {
	_, ok := ParseEndpoint(l.Bind, true)
	v.Check(ok, field+".Bind", l.Bind, AllowedBind)
	v.Check(l.Engine.Known() && !l.Engine.IsPool(), field+".Engine", string(l.Engine), "an engine that connects: vllm, sglang, trtllm, kvbm or llm-d-sim")
	v.Check(l.Copies.known(), field+".Copies", string(l.Copies), allowedCopies)
	v.Check(l.Clears.known(), field+".Clears", string(l.Clears), allowedClears)
	for i, p := range l.Topics {
		_, err := path.Match(p, "")
		v.Check(err == nil && p != "" && Printable(p), fmt.Sprintf("%s.Topics[%d]", field, i), p, "a pattern as of path.Match")
	}
	for i, h := range l.ReplayHosts {
		_, err := ParseHosts([]string{h})
		v.Check(err == nil, fmt.Sprintf("%s.ReplayHosts[%d]", field, i), h, allowedHosts)
	}
	v.Check(l.ReplayPort <= MaxPort, field+".ReplayPort", l.ReplayPort, "1 to 65535, or negative for none")
	if l.Worker != "" {
		v.Name(field+".Worker", l.Worker)
	}
}

// Name checks that the value of a field is a valid and unique name of a worker.
func (v *Validation) Name(field, name string) {
	if !ValidName(name) {
		v.Check(false, field, name, AllowedName)
		return
	}
	v.Check(!v.names[name], field, name, "unique: another worker has it")
	if v.names == nil {
		v.names = make(map[string]bool)
	}
	v.names[name] = true
}

// ValidName reports whether a worker may have this name. Names appear in protobuf strings, which are UTF-8, in logs and on terminals.
func ValidName(s string) bool {
	return s != "" && len(s) <= MaxNameBytes && Printable(s)
}

// ValidModel reports whether a worker may have this model or endpoint.
func ValidModel(s string) bool {
	return len(s) <= MaxModelBytes && Printable(s)
}

// Printable reports whether s is UTF-8 without control or format characters: those that a terminal obeys, that change the direction of the text
// around them, or that are not shown, so that two names look the same. Line and paragraph separators are among them.
func Printable(s string) bool {
	return utf8.ValidString(s) && strings.IndexFunc(s, func(r rune) bool { return unicode.In(r, unicode.Cc, unicode.Cf, unicode.Zl, unicode.Zp) }) < 0
}
