package ingest

import (
	"errors"
	"fmt"
	"maps"
	"path"
	"slices"
	"strings"
	"time"
	"unicode"
	"unicode/utf8"
)

// FieldError is a field of a Config that holds what it must not.
type FieldError struct {
	// Field is its path, such as Workers[0].Sources[1].Connect.
	Field string
	// Value is what it holds.
	Value any
	// Allowed says what it may hold.
	Allowed string
}

// Error names the field, its value, and what is allowed.
func (e *FieldError) Error() string {
	if s, ok := e.Value.(string); ok {
		return fmt.Sprintf("%s is %q: must be %s", e.Field, s, e.Allowed)
	}
	return fmt.Sprintf("%s is %v: must be %s", e.Field, e.Value, e.Allowed)
}

// maxLabels is how many labels a worker may have.
const maxLabels = 64

const (
	allowedName  = "1 to 253 bytes of UTF-8 without control characters"
	allowedModel = "at most 1024 bytes of UTF-8 without control characters"
)

// Validate returns a FieldError for each field that holds what it must not, all
// joined to one error, or nil.
func (c Config) Validate() error {
	v := &validation{names: make(map[string]struct{})}
	c = c.withDefaults()
	v.check(c.MaxWorkers > 0, "MaxWorkers", c.MaxWorkers, "above 0")
	v.check(c.MaxSources > 0, "MaxSources", c.MaxSources, "above 0")
	v.check(c.MaxRanks > 0, "MaxRanks", c.MaxRanks, "above 0")
	v.check(c.WorkerBytes > 0, "WorkerBytes", c.WorkerBytes, "above 0")
	v.check(c.SaltBytes > 0, "SaltBytes", c.SaltBytes, "above 0")
	v.check(c.ReceiveBufferBytes > 0, "ReceiveBufferBytes", c.ReceiveBufferBytes, "above 0")
	v.check(c.ReorderBufferBytes > 0, "ReorderBufferBytes", c.ReorderBufferBytes, "above 0")
	v.check(c.ReplayTimeout >= 10*time.Millisecond && c.ReplayTimeout <= time.Hour,
		"ReplayTimeout", c.ReplayTimeout, "10 ms to 1 h")
	v.check(c.Silence < 0 || c.Silence >= 10*time.Millisecond, "Silence", c.Silence, "10 ms or more, or negative for never")
	v.check(c.ReconnectMin >= time.Millisecond && c.ReconnectMin <= time.Hour,
		"ReconnectMin", c.ReconnectMin, "1 ms to 1 h")
	v.check(c.ReconnectMax >= c.ReconnectMin && c.ReconnectMax <= time.Hour,
		"ReconnectMax", c.ReconnectMax, "ReconnectMin to 1 h")
	for i, w := range c.Workers {
		v.worker(fmt.Sprintf("Workers[%d]", i), w)
	}
	for i, l := range c.Listeners {
		v.listener(fmt.Sprintf("Listeners[%d]", i), l)
	}
	v.check(c.MaxWorkers < 0 || len(v.names) <= c.MaxWorkers, "Workers", len(v.names),
		fmt.Sprintf("with those that Listeners name at most MaxWorkers, %d", c.MaxWorkers))
	v.check(c.MaxSources <= 0 || c.sources() <= c.MaxSources || len(v.errs) > 0, "Workers", c.sources(),
		fmt.Sprintf("sources, ranks counted, of at most MaxSources, %d", c.MaxSources))
	v.check(c.sockets() <= maxSockets, "Workers", c.sockets(),
		fmt.Sprintf("sources, ranks counted, that with Listeners come to %d sockets at most", maxSockets))
	return errors.Join(v.errs...)
}

// socketsEach is how many sockets of libzmq a source or a listener takes: its own
// and the two of its monitor.
const socketsEach = 3

// sockets is how many sockets the sources and listeners of c take.
func (c Config) sockets() int {
	return socketsEach * (len(c.Listeners) + c.sources())
}

// sources is how many sources there are to connect to, ranks counted.
func (c Config) sources() (n int) {
	for _, w := range c.Workers {
		n += w.publishers()
	}
	return n
}

// publishers is how many sources a worker has, ranks counted.
func (w WorkerConfig) publishers() (n int) {
	for _, s := range w.Sources {
		n += s.DPSize
	}
	return n
}

// bytes is about what is kept of what is said of a worker. Each label is kept by ingest
// and by the stream's state.
func (w WorkerConfig) bytes() int64 {
	const labelOverhead = 128
	n := len(w.Name) + len(w.Model) + len(w.Endpoint)
	for k, value := range w.Labels {
		n += len(k) + len(value) + labelOverhead
	}
	for _, s := range w.Sources {
		n += len(s.Connect) + len(s.Replay) + len(s.Topic)
	}
	return 2 * int64(n)
}

// validation collects what is wrong.
type validation struct {
	errs  []error
	names map[string]struct{} // of workers
}

func (v *validation) check(ok bool, field string, value any, allowed string) {
	if !ok {
		v.errs = append(v.errs, &FieldError{Field: field, Value: value, Allowed: allowed})
	}
}

func (v *validation) worker(field string, w WorkerConfig) {
	v.name(field+".Name", w.Name)
	v.check(validModel(w.Model), field+".Model", w.Model, allowedModel)
	v.check(validModel(w.Endpoint), field+".Endpoint", w.Endpoint, allowedModel)
	for _, key := range slices.Sorted(maps.Keys(w.Labels)) {
		v.check(validName(key), field+".Labels", key, "keys of "+allowedName)
		v.check(validModel(w.Labels[key]), fmt.Sprintf("%s.Labels[%q]", field, key), w.Labels[key], allowedModel)
	}
	v.check(len(w.Labels) <= maxLabels, field+".Labels", len(w.Labels), fmt.Sprintf("at most %d", maxLabels))
	v.check(len(w.Sources) > 0, field+".Sources", len(w.Sources), "one source at least")
	v.check(len(w.Sources) <= MaxSources, field+".Sources", len(w.Sources), fmt.Sprintf("at most %d", MaxSources))
	switch w.Consolidate {
	case ConsolidateDedup, ConsolidatePassthrough:
	default:
		v.check(false, field+".Consolidate", string(w.Consolidate), "dedup or passthrough")
	}
	for i, s := range w.Sources {
		v.source(fmt.Sprintf("%s.Sources[%d]", field, i), s)
	}
	single := slices.ContainsFunc(w.Sources, func(s SourceConfig) bool { return s.DPSize > MaxRanks })
	v.check(single || w.publishers() <= MaxRanks, field+".Sources", w.publishers(), fmt.Sprintf("at most %d, ranks counted", MaxRanks))
}

func (v *validation) source(field string, s SourceConfig) {
	v.check(s.Engine.known(), field+".Engine", string(s.Engine), allowedEngines)
	v.check(s.Copies.known(), field+".Copies", string(s.Copies), allowedCopies)
	v.check(s.DPSize >= 1 && s.DPSize <= MaxRanks, field+".DPSize", s.DPSize, fmt.Sprintf("1 to %d", MaxRanks))
	v.check(validModel(s.Topic), field+".Topic", s.Topic, allowedModel)
	v.ranked(field+".Connect", s.Connect, s)
	if s.Replay != "" {
		v.ranked(field+".Replay", s.Replay, s)
	}
}

// ranked checks an endpoint that a source's ranks count up from.
func (v *validation) ranked(field, value string, s SourceConfig) {
	e, ok := parseEndpoint(value, false)
	v.check(ok, field, value, allowedConnect)
	if !ok || s.DPSize > MaxRanks {
		return
	}
	switch e.transport {
	case transportTCP:
		v.check(e.port+s.DPSize-1 <= maxPort, field, value,
			fmt.Sprintf("tcp://HOST:PORT with room for %d ranks' ports below %d", s.DPSize, maxPort+1))
	case transportIPC:
		v.check(s.DPSize <= 1 || s.Engine == EngineTRTLLM, field, value,
			"tcp where DPSize is above 1, except for the engine trtllm")
	}
}

func (v *validation) listener(field string, l ListenerConfig) {
	_, ok := parseEndpoint(l.Bind, true)
	v.check(ok, field+".Bind", l.Bind, allowedBind)
	v.check(l.Engine.known(), field+".Engine", string(l.Engine), allowedEngines)
	v.check(l.Copies.known(), field+".Copies", string(l.Copies), allowedCopies)
	for i, p := range l.Topics {
		_, err := path.Match(p, "")
		v.check(err == nil && p != "", fmt.Sprintf("%s.Topics[%d]", field, i), p, "a pattern as of path.Match")
	}
	for i, h := range l.ReplayHosts {
		_, err := ParseHosts([]string{h})
		v.check(err == nil, fmt.Sprintf("%s.ReplayHosts[%d]", field, i), h, allowedHosts)
	}
	v.check(l.ReplayPort <= maxPort, field+".ReplayPort", l.ReplayPort, "1 to 65535, or negative for none")
	if l.Worker != "" {
		v.name(field+".Worker", l.Worker)
	}
}

func (v *validation) name(field, name string) {
	if !validName(name) {
		v.check(false, field, name, allowedName)
		return
	}
	_, taken := v.names[name]
	v.check(!taken, field, name, "unique: another worker has it")
	v.names[name] = struct{}{}
}

// validName tells whether a worker may have this name. It goes out in protobuf
// strings, which are UTF-8, and into logs and terminals.
func validName(s string) bool {
	return s != "" && len(s) <= MaxNameBytes && printable(s)
}

func validModel(s string) bool {
	return len(s) <= MaxModelBytes && printable(s)
}

func printable(s string) bool {
	return utf8.ValidString(s) && strings.IndexFunc(s, unicode.IsControl) < 0
}
