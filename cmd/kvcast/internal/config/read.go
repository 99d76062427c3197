package config

import (
	"cmp"
	"errors"
	"fmt"
	"net"
	"net/url"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"

	ingestconfig "github.com/kvcast/kvcast/ingest/config"
	"github.com/kvcast/kvcast/internal/discovery/kubernetes"
	"github.com/kvcast/kvcast/internal/feed"
)

// Sources are the sources of a configuration. Environ overrides File, and Flags overrides both.
type Sources struct {
	File    string            // name of the YAML file; empty: none
	Environ []string          // NAME=VALUE, as os.Environ returns
	Flags   map[string]string // settings by the name of their flag, as Given returns
	Workers []string          // values of --worker
	Binds   []string          // values of --bind
}

// Read reads the file, the variables and the flags. Workers and listeners of all three add up. Without a file, workers,
// listeners and discovery, the configuration has a listener at DefaultBind. Read returns the configuration and the origin
// of each value that is not a default, or an error that lists every mistake.
func Read(from Sources) (*Config, Origins, error) {
	r := newReader()
	if from.File != "" {
		data, err := os.ReadFile(from.File)
		if err != nil {
			return nil, nil, fmt.Errorf("read configuration: %w", err)
		}
		r.file(from.File, data)
		if err := r.resolveWatched(from.File); err != nil {
			return nil, nil, fmt.Errorf("read configuration: %w", err)
		}
	}
	r.variables(from.Environ)
	r.flags(from)
	if from.File == "" && r.config.ReadsNothing() && r.config.Cluster.Ingest {
		r.addListener(byDefault, DefaultBind)
	}
	return r.finish()
}

// resolveWatched makes the names of the files of discovery absolute. They are relative to the directory of the configuration
// file, or to the working directory if that is a pipe.
func (r *reader) resolveWatched(file string) error {
	dir := filepath.Dir(file)
	if info, err := os.Stat(file); err == nil && !info.Mode().IsRegular() {
		dir = "."
	}
	for i := range r.config.Discovery {
		watched := &r.config.Discovery[i].File
		if *watched == "" {
			continue
		}
		name := *watched
		if !filepath.IsAbs(name) {
			name = filepath.Join(dir, name)
		}
		var err error
		if *watched, err = filepath.Abs(name); err != nil {
			return err
		}
	}
	return nil
}

// reader fills a Config and collects mistakes.
type reader struct {
	config     *Config
	origins    Origins
	fileName   string // of the file being read, without control or format characters
	mistakes   []mistake
	further    int      // mistakes beyond mostMistakes
	unreadable []string // paths of items that are not mappings, at most mostMistakes
	// mostMistakes bounds what a file can make of the log, and the time in which mistakes are searched.
	mostMistakes int
}

func newReader() *reader {
	return &reader{config: newConfig(), origins: make(Origins), mostMistakes: 100}
}

// finish validates what depends on several settings, and returns the Config or all mistakes.
func (r *reader) finish() (*Config, Origins, error) {
	r.validateTLS()
	r.validateJournal()
	r.validateDiscovery()
	r.validateIngest()
	r.validateEgress()
	switch all := r.messages(); len(all) {
	case 0:
		return r.config, r.origins, nil
	case 1:
		return nil, nil, errors.New(all[0])
	default:
		return nil, nil, fmt.Errorf("read configuration: %d mistakes:\n  %s", len(r.mistakes)+r.further, strings.Join(all, "\n  "))
	}
}

// origin is the place where a value was given.
type origin struct {
	place string // a file, a variable or a flag
	line  int    // in the file; 0 for a variable or a flag
}

func (o origin) String() string {
	if o.line > 0 {
		return fmt.Sprintf("%s:%d", o.place, o.line)
	}
	return o.place
}

// Origins are the origins of given values by path. Examples of paths are journal.max_bytes, workers[0] and workers[0].name.
type Origins map[string]origin

// byDefault is the origin of the listener at DefaultBind.
var byDefault = origin{place: "the default, since no workers, listeners or discovery are configured"}

// ListensByDefault reports whether the only listener is the one at DefaultBind.
func (o Origins) ListensByDefault() bool { return o["listeners[0]"] == byDefault }

// nearest returns the origin of a path, or of the nearest part of the configuration that contains the path. It also
// returns the rest of the path.
func (o Origins) nearest(path string) (_ origin, rest string) {
	for around := path; around != ""; around = around[:max(strings.LastIndexAny(around, ".["), 0)] {
		if at, ok := o[around]; ok {
			return at, strings.TrimPrefix(path[len(around):], ".")
		}
	}
	return origin{}, path
}

// mistake is a part of the configuration that is not allowed.
type mistake struct {
	at      origin
	path    string // as in Origins
	shown   string // the part of the path that the message includes
	problem string
}

func (r *reader) wrong(at origin, path, problem string) { r.record(mistake{at, path, path, problem}) }

func (r *reader) record(m mistake) {
	if len(r.mistakes) == r.mostMistakes {
		r.further++
		return
	}
	r.mistakes = append(r.mistakes, m)
}

// wrongGiven records a mistake at a path, with the nearest origin. The message for a variable or a flag omits the part of
// the path that the variable or flag stands for.
func (r *reader) wrongGiven(path, problem string) {
	at, rest := r.origins.nearest(path)
	m := mistake{at, path, path, problem}
	if at.line == 0 && at.place != "" {
		m.shown = strings.TrimPrefix(rest, "sources[0].")
	}
	r.record(m)
}

// isWrong reports whether a mistake at the path is recorded, or the item that contains the path is not a mapping.
func (r *reader) isWrong(path string) bool {
	return slices.ContainsFunc(r.mistakes, func(m mistake) bool { return m.path == path }) ||
		slices.ContainsFunc(r.unreadable, func(item string) bool { return strings.HasPrefix(path, item+".") })
}

// messages returns the mistakes as text. Mistakes in the file come first, by line.
func (r *reader) messages() []string {
	slices.SortStableFunc(r.mistakes, func(a, b mistake) int {
		if a.at.line == 0 || b.at.line == 0 {
			return cmp.Compare(b.at.line, a.at.line)
		}
		return cmp.Compare(a.at.line, b.at.line)
	})
	all := make([]string, len(r.mistakes))
	for i, m := range r.mistakes {
		parts := slices.DeleteFunc([]string{m.at.String(), m.shown, m.problem}, func(s string) bool { return s == "" })
		all[i] = strings.Join(parts, ": ")
		if len(all[i]) > maxMessage {
			all[i] = strings.ToValidUTF8(all[i][:maxMessage], "") + "..."
		}
	}
	if r.further > 0 {
		all = append(all, fmt.Sprintf("and %d more", r.further))
	}
	return all
}

// maxMessage bounds the message of a mistake, in bytes.
const maxMessage = 1 << 10

func notAllowed(v any, want string) string {
	if s, ok := v.(string); ok {
		v = strconv.Quote(s)
	}
	return fmt.Sprintf("%v is not allowed: want %s", v, want)
}

// validateTLS requires both files or neither.
func (r *reader) validateTLS() {
	r.validatePair("tls.cert", r.config.CertFile, "tls.key", r.config.KeyFile)
	r.validatePair("journal.tls_cert", r.config.Journal.Cert, "journal.tls_key", r.config.Journal.Key)
	r.validateNeeds("tls.client_ca", r.config.ClientCAFile, "tls.cert", r.config.CertFile)
	if r.config.Server.OpenRegistration && (r.config.TokensFile != "" || r.config.ClientCAFile != "") {
		r.wrongGiven("auth.open_registration", notAllowed("true", "it without auth.tokens and tls.client_ca, with which operators register workers"))
	}
	r.validateNeeds("auth.certificates", r.config.CertificatesFile, "tls.client_ca", r.config.ClientCAFile)
	if r.config.AdminTLS {
		r.validateNeeds("admin_tls", "true", "tls.cert", r.config.CertFile)
	}
}

// validateNeeds requires a file if another value is given.
func (r *reader) validateNeeds(given, value, missing, other string) {
	if value != "" && other == "" && !r.isWrong(missing) {
		r.wrongGiven(given, notAllowed(value, missing+" as well"))
	}
}

// validatePair requires two files or neither.
func (r *reader) validatePair(given, file, missing, other string) {
	switch {
	case (file == "") == (other == ""):
		return
	case file == "":
		given, file, missing = missing, other, given
	}
	if !r.isWrong(missing) {
		r.wrongGiven(given, notAllowed(file, missing+" as well, or neither"))
	}
}

// validateDiscovery requires one way to find workers in each item, and only the keys of that.
func (r *reader) validateDiscovery() {
	for i := range r.config.Discovery {
		item := fmt.Sprintf("discovery[%d]", i)
		given := func(key string) bool { _, ok := r.origins[join(item, key)]; return ok }
		ways := slices.DeleteFunc([]string{"dns", "kubernetes", "inference_pool", "file"}, func(key string) bool { return !given(key) })
		switch {
		case len(ways) > 1:
			r.wrongGiven(join(item, ways[1]), "is not allowed with "+ways[0]+": want one of the two")
			continue
		case len(ways) == 0:
			if !r.isWrong(item) && !slices.Contains(r.unreadable, item) {
				r.wrong(r.origins[item], item, "has neither dns, kubernetes, inference_pool nor file: want dns with port, kubernetes, inference_pool, or file")
			}
			continue
		case ways[0] == "dns" && !given("port"):
			r.wrong(r.origins[item], join(item, "port"), "is missing: want 1 to 65535, the port at which each engine publishes, such as 5557")
		}
		if n := r.config.Discovery[i].Kubernetes.Namespaces; ways[0] == "inference_pool" && slices.Contains(n, kubernetes.AllNamespaces) {
			r.wrongGiven(join(item, "namespaces"), `"*" is not allowed with inference_pool: want the namespaces that have a pool of the name`)
		}
		one := Discovery{DNS: "dns"}
		switch ways[0] {
		case "kubernetes":
			one = Discovery{Kubernetes: Kubernetes{Selector: "kubernetes"}}
		case "inference_pool":
			one = Discovery{Kubernetes: Kubernetes{Pool: "pool"}}
		case "file":
			one = Discovery{File: "file"}
		}
		var allowed []string
		for _, f := range discoveryFields(&one) {
			allowed = append(allowed, f.key)
		}
		for _, f := range discoveryFields(new(Discovery)) {
			if given(f.key) && !slices.Contains(allowed, f.key) {
				r.wrongGiven(join(item, f.key), "is not allowed with "+ways[0]+": want "+either(allowed))
			}
		}
	}
}

// completeWorkers adds the engines of sources, and the source and the endpoint that a worker with the key http need not have.
func (r *reader) completeWorkers() {
	for i := range r.config.Ingest.Workers {
		w := &r.config.Ingest.Workers[i]
		for j := range w.Sources {
			w.Sources[j].Engine = w.Sources[j].EngineOrDefault()
		}
		server, err := url.Parse(w.HTTP)
		if w.HTTP == "" || err != nil || server.Hostname() == "" {
			continue
		}
		if w.Endpoint == "" {
			w.Endpoint = server.Host
		}
		if len(w.Sources) == 0 {
			w.Sources = append(w.Sources, ingestconfig.Source{})
			setDefaults(sourceFields(&w.Sources[0]))
			w.Sources[0].Engine = feed.EngineVLLM
		}
		if source := &w.Sources[0]; source.Connect == "" {
			source.Connect = "tcp://" + net.JoinHostPort(server.Hostname(), strconv.Itoa(ingestconfig.DefaultPort))
		}
	}
}

func (r *reader) validateIngest() {
	r.completeWorkers()
	for _, field := range ingestconfig.FieldErrors(r.config.Ingest.Validate()) {
		if path := filePath(field.Path()); !r.isWrong(path) {
			r.wrongGiven(path, notAllowed(field.Value, field.Allowed))
		}
	}
}

// filePath returns the path in the file that corresponds to a path in ingestconfig.Config.
func filePath(path string) string {
	if strings.HasPrefix(path, "workers") || strings.HasPrefix(path, "listeners") {
		return path
	}
	return join("ingest", path)
}
