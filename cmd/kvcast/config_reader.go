package main

import (
	"cmp"
	"errors"
	"fmt"
	"os"
	"regexp"
	"slices"
	"strings"

	ingestconfig "github.com/kvcast/kvcast/ingest/config"
)

// configSources are where a configuration comes from.
type configSources struct {
	file    string            // a path; empty: no file
	environ []string          // NAME=VALUE, as os.Environ has them
	flags   map[string]string // of settings, as given; by their names without dashes
	workers []string          // each --worker
	binds   []string          // each --bind
}

// readConfig reads the file, the environment over it, and the flags over both;
// workers and listeners of all three add up. Where nothing to read from is among
// them, and no file, there is a listener at defaultBind. It returns either a
// configuration in which all is allowed, or all that is wrong.
func readConfig(from configSources) (config, origins, error) {
	r := &configReader{config: defaultConfig(), origins: make(origins)}
	if from.file != "" {
		data, err := os.ReadFile(from.file)
		if err != nil {
			return config{}, nil, fmt.Errorf("read configuration: %w", err)
		}
		r.file(from.file, data)
	}
	r.environ(from.environ)
	r.flags(from)
	if from.file == "" && r.config.readsNothing() {
		r.addListener(fromDefault, defaultBind)
	}
	r.validate()
	return r.config, r.origins, r.err()
}

// configReader fills a config, and collects what is wrong.
type configReader struct {
	config   config
	origins  origins
	mistakes []mistake
	unread   []string // paths of items that could not be read at all
}

// origin is where something was given.
type origin struct {
	// place is a file's name, a variable, or a flag.
	place string
	// line is where in the file; 0 where it is no file.
	line int
}

func (o origin) String() string {
	if o.line > 0 {
		return fmt.Sprintf("%s:%d", o.place, o.line)
	}
	return o.place
}

// origins are the origins of what was given, by path: of a setting, such as
// journal.max_bytes, of an item, such as workers[0], of what is in an item.
type origins map[string]origin

// of returns the origin of a path, or of the nearest thing around it, with the
// rest of the path within that.
func (o origins) of(path string) (_ origin, rest string) {
	for around := path; around != ""; {
		if at, ok := o[around]; ok {
			return at, strings.TrimPrefix(path[len(around):], ".")
		}
		around = around[:max(strings.LastIndexAny(around, ".["), 0)]
	}
	return origin{}, path
}

// mistake is something that is not allowed.
type mistake struct {
	origin
	path    string
	problem string
}

func (m mistake) String() string {
	parts := []string{m.origin.String(), m.path, m.problem}
	return strings.Join(slices.DeleteFunc(parts, func(s string) bool { return s == "" }), ": ")
}

// wrong notes a mistake. One in a file is told with its path; a variable or a
// flag says by its own name what it is.
func (r *configReader) wrong(at origin, path string, problem string) {
	r.mistakes = append(r.mistakes, mistake{at, path, problem})
}

// told are the mistakes in words, in order.
func (r *configReader) told() []string {
	slices.SortStableFunc(r.mistakes, func(a, b mistake) int {
		if a.line == 0 || b.line == 0 { // the file first
			return cmp.Compare(b.line, a.line)
		}
		return cmp.Compare(a.line, b.line)
	})
	all := make([]string, len(r.mistakes))
	for i, m := range r.mistakes {
		all[i] = m.String()
	}
	return all
}

func (r *configReader) err() error {
	switch told := r.told(); len(told) {
	case 0:
		return nil
	case 1:
		return errors.New(told[0])
	default:
		return fmt.Errorf("read configuration: %d mistakes:\n  %s", len(told), strings.Join(told, "\n  "))
	}
}

// validate judges what goes together.
func (r *configReader) validate() {
	r.validateTLS()
	r.validateIngest()
}

// validateTLS wants both of the files or none.
func (r *configReader) validateTLS() {
	given, file, missing := "tls.cert", r.config.TLS.Cert, "tls.key"
	switch {
	case (r.config.TLS.Cert == "") == (r.config.TLS.Key == ""):
		return
	case file == "":
		given, file, missing = "tls.key", r.config.TLS.Key, "tls.cert"
	}
	if r.isWrong(missing) {
		return
	}
	at, _ := r.origins.of(given)
	path := given
	if at.line == 0 {
		path = "" // the variable or the flag has said it
	}
	r.wrong(at, path, notAllowed(file, missing+" beside it, or neither").Error())
}

// validateIngest has ingest judge what it will read. The names it has for fields
// are those of its Config.
func (r *configReader) validateIngest() {
	for _, err := range leaves(r.config.ingestConfig().Validate()) {
		var field *ingestconfig.FieldError
		if !errors.As(err, &field) {
			r.wrong(origin{}, "", err.Error())
			continue
		}
		path := inFile(field.Field)
		if key, ok := field.Value.(string); ok && strings.HasSuffix(path, ".labels") {
			path = labelPath(path, key) // its name is wrong, not its value
		}
		if r.isWrong(path) {
			continue
		}
		at, rest := r.origins.of(path)
		problem := notAllowed(field.Value, inFile(field.Allowed))
		if at.line == 0 && at.place != "" {
			r.wrong(at, "", strings.TrimSpace(flagKey(path, rest)+" "+problem.Error()))
			continue
		}
		r.wrong(at, path, problem.Error())
	}
}

// isWrong tells whether what is at the path was found wrong, and so not kept.
func (r *configReader) isWrong(path string) bool {
	return slices.ContainsFunc(r.mistakes, func(m mistake) bool { return m.path == path }) ||
		slices.ContainsFunc(r.unread, func(item string) bool { return strings.HasPrefix(path, item+".") })
}

// leaves are the errors that were joined to one.
func leaves(err error) []error {
	switch joined := err.(type) { //nolint:errorlint // what is joined is wanted, not what is wrapped
	case nil:
		return nil
	case interface{ Unwrap() []error }:
		return joined.Unwrap()
	default:
		return []error{err}
	}
}

// goField is a field of ingest.Config, by itself or in a path, and quoted what is
// somebody's own text.
var (
	goField = regexp.MustCompile(`\b(MaxWorkers|MaxSources|MaxRanks|WorkerBytes|SaltBytes|ReceiveBufferBytes|ReorderBufferBytes|ReplayHosts|Silence|Workers|Listeners|Sources|Name|Model|Endpoint|BlockSize|Engine|Connect|Replay|ReplayPort|DPSize|Copies|Consolidate|Labels|Bind|Topics?|Worker)\b`)
	quoted  = regexp.MustCompile(`"(?:[^"\\]|\\.)*"|` + goField.String())
)

// inFile says in the keys of the file what is said in fields of ingest.Config.
func inFile(text string) string {
	return quoted.ReplaceAllStringFunc(text, func(field string) string {
		switch field {
		case "MaxWorkers":
			return "ingest.max_workers"
		case "MaxSources":
			return "ingest.max_sources"
		case "MaxRanks":
			return "ingest.max_ranks"
		case "WorkerBytes":
			return "ingest.worker_bytes"
		case "SaltBytes":
			return "ingest.salt_bytes"
		case "ReceiveBufferBytes":
			return "ingest.receive_buffer_bytes"
		case "ReorderBufferBytes":
			return "ingest.reorder_buffer_bytes"
		case "ReplayHosts":
			return "replay_hosts"
		case "Silence":
			return "ingest.silence"
		case "ReplayPort":
			return "replay_port"
		case "BlockSize":
			return "block_size"
		case "DPSize":
			return "dp_size"
		default:
			if field[0] == '"' {
				return field
			}
			return strings.ToLower(field)
		}
	})
}

// flagKey is the key that --worker and --bind have for a path within an item.
func flagKey(path, rest string) string {
	key := rest[strings.LastIndexByte(rest, '.')+1:]
	key, _, _ = strings.Cut(key, "[")
	switch {
	case key == "bind":
		return "endpoint"
	case key == "topics":
		return "topic"
	case key == "replay_hosts":
		return "replay_host"
	case rest == path:
		return path
	default:
		return key
	}
}

// nearest returns the one of the names that a misspelt one most likely means, or
// nothing.
func nearest(name string, names []string) string {
	best, least := "", 3
	for _, n := range names {
		if d := distance(name, n); d < least && d < len(n) {
			best, least = n, d
		}
	}
	return best
}

// distance is how many letters one must change, add or leave out to get from a
// to b (Levenshtein).
func distance(a, b string) int {
	row := make([]int, len(b)+1)
	for j := range row {
		row[j] = j
	}
	for i := range len(a) {
		diagonal := row[0]
		row[0] = i + 1
		for j := range len(b) {
			change := diagonal
			if a[i] != b[j] {
				change++
			}
			diagonal = row[j+1]
			row[j+1] = min(change, row[j]+1, diagonal+1)
		}
	}
	return row[len(b)]
}
