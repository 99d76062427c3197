package config

import (
	"fmt"
	"maps"
	"reflect"
	"slices"
	"strconv"
	"strings"

	"github.com/alecthomas/kong"

	"github.com/kvcast/kvcast/cmd/kvcast/internal/cli"
	ingestconfig "github.com/kvcast/kvcast/ingest/config"
)

// Flags returns a pointer to a struct with a flag for each setting, to be embedded into a kong command. Read validates
// the texts of the flags.
func Flags() any {
	var fields []reflect.StructField
	for i, s := range newConfig().fields().settings("") {
		tag := fmt.Sprintf("name:%q help:%q", s.flag(), s.help)
		kind := reflect.TypeFor[string]()
		switch s.initial {
		case "false":
			kind = reflect.TypeFor[bool]() // a flag without a value
		case "":
		default:
			tag += fmt.Sprintf(" default:%q", s.initial)
		}
		fields = append(fields, reflect.StructField{Name: "F" + strconv.Itoa(i), Type: kind, Tag: reflect.StructTag(tag)})
	}
	return reflect.New(reflect.StructOf(fields)).Interface()
}

// Given returns the flags on the command line, each with its last value.
func Given(line *kong.Context) map[string]string {
	flags := make(map[string]string)
	for _, p := range line.Path {
		if p.Flag != nil {
			flags[p.Flag.Name] = fmt.Sprint(p.Flag.Target.Interface())
		}
	}
	return flags
}

func (r *reader) flags(from Sources) {
	for _, s := range r.config.fields().settings("") {
		if text, ok := from.Flags[s.flag()]; ok {
			r.set(s, origin{place: "--" + s.flag()}, text)
		}
	}
	for _, text := range from.Workers {
		r.addWorker(origin{place: "--worker " + text}, text)
	}
	for _, text := range from.Binds {
		r.addListener(origin{place: "--bind " + text}, text)
	}
}

// variables reads the variables of the environment. A misspelt variable is a mistake. Other unknown variables are
// ignored, since Kubernetes sets variables with the prefix KVCAST_ for a service named kvcast.
func (r *reader) variables(environ []string) {
	values := make(map[string]string)
	for _, variable := range environ {
		name, text, _ := strings.Cut(variable, "=")
		values[name] = text
	}
	known := []string{"KVCAST_CONFIG", "KVCAST_WORKER", "KVCAST_BIND", "ZMQ_PORT", cli.TokenVariable}
	for _, s := range r.config.fields().settings("") {
		known = append(known, s.variable())
		if text, ok := values[s.variable()]; ok {
			r.set(s, origin{place: s.variable()}, text)
		}
	}
	for i, line := range lines(values["KVCAST_WORKER"]) {
		r.addWorker(origin{place: fmt.Sprintf("KVCAST_WORKER, line %d", i+1)}, line)
	}
	for i, line := range lines(values["KVCAST_BIND"]) {
		r.addListener(origin{place: fmt.Sprintf("KVCAST_BIND, line %d", i+1)}, line)
	}
	// Kubernetes sets ZMQ_PORT=tcp://ADDRESS:PORT for a service named zmq. Ignore that.
	if port, ok := values["ZMQ_PORT"]; ok && !strings.HasPrefix(port, "tcp://") {
		at := origin{place: "ZMQ_PORT"}
		if n, err := strconv.ParseUint(port, 10, 16); err != nil || n == 0 {
			r.wrong(at, "", notAllowed(port, "a port, 1 to 65535, such as 5557"))
		} else {
			r.addListener(at, "tcp://*:"+port)
		}
	}
	for _, name := range slices.Sorted(maps.Keys(values)) {
		if !strings.HasPrefix(name, "KVCAST_") || slices.Contains(known, name) {
			continue
		}
		switch meant := closest(name, known); meant {
		case "":
		case cli.TokenVariable:
			r.wrong(origin{place: name}, "", "unknown variable, did you mean KVCAST_AUTH_TOKENS, the file of the tokens that a server accepts, or "+
				cli.TokenVariable+", the token that a client sends?")
		default:
			r.wrong(origin{place: name}, "", "unknown variable, did you mean "+meant+"?")
		}
	}
}

// lines returns the nonblank lines of a text, trimmed.
func lines(text string) []string {
	var all []string
	for line := range strings.Lines(text) {
		if line = strings.TrimSpace(line); line != "" {
			all = append(all, line)
		}
	}
	return all
}

// set stores the text of a variable or a flag, and its origin.
func (r *reader) set(s setting, at origin, text string) {
	if !s.set(text) {
		r.wrong(at, "", notAllowed(text, s.want))
		return
	}
	r.origins[s.path] = at
}

// addWorker adds a worker in the form of the flag --worker. It has one source.
func (r *reader) addWorker(at origin, text string) {
	w := ingestconfig.Worker{Sources: make([]ingestconfig.Source, 1)}
	if err := setPairs(text, append(workerFields(&w), sourceFields(&w.Sources[0])...)); err != nil {
		r.wrong(at, "", err.Error())
		return
	}
	r.origins[fmt.Sprintf("workers[%d]", len(r.config.Ingest.Workers))] = at
	r.config.Ingest.Workers = append(r.config.Ingest.Workers, w)
}

// addListener adds a listener in the form of the flag --bind: an endpoint, and optionally KEY=VALUE pairs.
func (r *reader) addListener(at origin, endpoint string) {
	var l ingestconfig.Listener
	var topics, replayHosts [1]string
	pairs := append(listenerFields(&l), field{key: "topic", node: word(&topics[0])}, field{key: "replay_host", node: word(&replayHosts[0])})
	if err := setPairs("bind="+endpoint, pairs); err != nil {
		r.wrong(at, "", err.Error())
		return
	}
	if topics[0] != "" {
		l.Topics = topics[:]
	}
	if replayHosts[0] != "" {
		l.ReplayHosts = replayHosts[:]
	}
	r.origins[fmt.Sprintf("listeners[%d]", len(r.config.Ingest.Listeners))] = at
	r.config.Ingest.Listeners = append(r.config.Ingest.Listeners, l)
}

// setPairs stores the defaults of fields, and then the values in KEY=VALUE pairs separated by commas.
func setPairs(text string, fields mapping) error {
	setDefaults(fields)
	byKey := make(map[string]*value)
	for _, f := range fields {
		if v, ok := f.node.(*value); ok {
			byKey[f.key] = v
		}
	}
	seen := make(map[string]bool)
	for pair := range strings.SplitSeq(text, ",") {
		key, text, ok := strings.Cut(pair, "=")
		if seen[key] {
			return fmt.Errorf("%q is not allowed: %s is given twice", pair, key)
		}
		seen[key] = true
		v, known := byKey[key]
		if !ok || !known {
			return fmt.Errorf("%q is not allowed: want KEY=VALUE with a key among %s", pair, strings.Join(slices.Sorted(maps.Keys(byKey)), ", "))
		}
		if !v.set(text) {
			return fmt.Errorf("%s: %s", key, notAllowed(text, v.want))
		}
	}
	return nil
}
