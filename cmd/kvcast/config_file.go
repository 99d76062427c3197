package main

import (
	"bytes"
	"cmp"
	"errors"
	"fmt"
	"io"
	"regexp"
	"strconv"
	"strings"
	"unicode"

	"go.yaml.in/yaml/v3"
)

// file reads a configuration file. It walks the nodes rather than having them
// decoded into a struct, so that each mistake can be told with its line.
func (r *configReader) file(name string, data []byte) {
	r.document(name, data, func(f *fileReader, n *yaml.Node) { f.mapping(n, "", f.root()) })
}

// document reads a file's one document, unless it is empty.
func (r *configReader) document(name string, data []byte, read func(*fileReader, *yaml.Node)) {
	f := &fileReader{r, strings.Map(func(c rune) rune {
		if unicode.IsControl(c) {
			return '?'
		}
		return c
	}, name)}
	documents := yaml.NewDecoder(bytes.NewReader(data))
	var first, second yaml.Node
	if err := documents.Decode(&first); err != nil {
		f.syntax(err)
		return
	}
	read(f, &first)
	if err := documents.Decode(&second); err == nil {
		f.wrong(f.at(&second), "", "a second document is not allowed: want one")
	} else {
		f.syntax(err)
	}
}

var yamlLine = regexp.MustCompile(`^(?:yaml: )+(?:line (\d+): )?`)

// syntax notes why a document cannot be read, unless there is none.
func (f *fileReader) syntax(err error) {
	if errors.Is(err, io.EOF) {
		return
	}
	at := origin{place: f.name}
	m := yamlLine.FindStringSubmatch(err.Error())
	if m != nil {
		at.line, _ = strconv.Atoi(m[1]) // 0 where it has none
	}
	f.wrong(at, "", "not valid YAML: "+yamlLine.ReplaceAllString(err.Error(), ""))
}

// fileReader reads one file.
type fileReader struct {
	*configReader
	name string
}

func (f *fileReader) at(n *yaml.Node) origin { return origin{f.name, n.Line} }

// field is a key of a mapping, and how its value is read.
type field struct {
	key  string
	read func(n *yaml.Node, path string)
}

// root are the keys of the file.
func (f *fileReader) root() []field {
	var root []field
	sections := make(map[string][]field)
	for _, s := range f.config.settings() {
		section, key, ok := strings.Cut(s.key, ".")
		if !ok {
			root = append(root, f.scalar(s))
			continue
		}
		if sections[section] == nil {
			root = append(root, field{section, func(n *yaml.Node, path string) { f.mapping(n, path, sections[section]) }})
		}
		s.key = key
		sections[section] = append(sections[section], f.scalar(s))
	}
	return append(root,
		field{"workers", f.list(f.worker)},
		field{"listeners", f.list(f.listener)},
		field{"discovery", f.list(f.discovery)},
	)
}

// discovery reads a place to find workers, by which its other keys go.
func (f *fileReader) discovery(n *yaml.Node, path string) {
	d := defaultDiscovery()
	before := len(f.mistakes)
	f.mapping(n, path, f.scalars(d.settings()))
	f.config.Discovery = append(f.config.Discovery, d)
	given := func(key string) bool { _, ok := f.origins[inside(path, key)]; return ok }
	switch {
	case given("dns") && given("file"):
		f.wrong(f.origins[inside(path, "file")], inside(path, "file"), "is not allowed beside dns: want one of the two")
	case given("file"):
		for _, s := range d.settings() {
			if given(s.key) && s.key != "file" && s.key != "interval" {
				f.wrong(f.origins[inside(path, s.key)], inside(path, s.key), "is not allowed with file, where each worker has its own: want file and interval alone")
			}
		}
	case given("dns"):
		if !given("port") {
			f.wrong(f.at(n), inside(path, "port"), "is missing: want 1 to 65535, where each engine publishes, such as 5557")
		}
	case len(f.mistakes) == before:
		f.wrong(f.at(n), path, "names no place to find workers: want dns with port, or file")
	}
}

func (f *fileReader) worker(n *yaml.Node, path string) {
	w := defaultWorker()
	fields := append(f.scalars(w.settings()), field{"labels", f.labels(&w.Labels)}, field{"sources", f.list(func(n *yaml.Node, path string) {
		s := defaultSource()
		f.mapping(n, path, f.scalars(s.settings()))
		w.Sources = append(w.Sources, s)
	})})
	f.mapping(n, path, fields)
	f.config.Workers = append(f.config.Workers, w)
}

// labels reads a mapping whose keys are anyone's. Which of them are allowed is judged
// by ingest.
func (f *fileReader) labels(to *map[string]string) func(*yaml.Node, string) {
	return func(n *yaml.Node, path string) {
		n = resolved(n)
		if isNull(n) {
			return
		}
		if n.Kind != yaml.MappingNode {
			f.wrong(f.at(n), path, shown(n)+" is not allowed: want labels, each with its value")
			return
		}
		first := make(map[string]int)
		for i := 0; i < len(n.Content); i += 2 {
			key := resolved(n.Content[i])
			at := f.at(n.Content[i])
			if key.Kind != yaml.ScalarNode || isNull(key) {
				f.wrong(at, path, shown(key)+" is not allowed for a label's name: want a text")
				continue
			}
			if line, again := first[key.Value]; again {
				f.wrong(at, path, fmt.Sprintf("%q is not allowed twice: it is in line %d already", key.Value, line))
				continue
			}
			first[key.Value] = at.line
			f.origins[labelPath(path, key.Value)] = at
			value := ""
			f.scalar(text("", &value, anything, `a text, which may be ""`)).read(n.Content[i+1], labelPath(path, key.Value))
			if *to == nil {
				*to = make(map[string]string)
			}
			(*to)[key.Value] = value
		}
	}
}

// labelPath is the path of a label's value, as ingest has it.
func labelPath(labels, key string) string { return fmt.Sprintf("%s[%q]", labels, key) }

func (f *fileReader) listener(n *yaml.Node, path string) {
	l := defaultListener()
	fields := append(f.scalars(l.settings()), field{"topics", f.list(func(n *yaml.Node, path string) {
		l.Topics = append(l.Topics, "")
		f.scalar(text("", &l.Topics[len(l.Topics)-1], printable, "a pattern such as kv@*")).read(n, path)
	})}, field{"replay_hosts", f.list(func(n *yaml.Node, path string) {
		l.ReplayHosts = append(l.ReplayHosts, "")
		f.scalar(text("", &l.ReplayHosts[len(l.ReplayHosts)-1], printable, "a host such as 10.0.0.0/8")).read(n, path)
	})})
	f.mapping(n, path, fields)
	f.config.Listeners = append(f.config.Listeners, l)
}

// mapping reads the values of the fields that are there.
func (f *fileReader) mapping(n *yaml.Node, path string, fields []field) {
	n = resolved(n)
	keys := make([]string, len(fields))
	byKey := make(map[string]field)
	for i, known := range fields {
		keys[i], byKey[known.key] = known.key, known
	}
	if n.Kind != yaml.MappingNode {
		if !isNull(n) || strings.HasSuffix(path, "]") {
			f.unread = append(f.unread, path)
			f.wrong(f.at(n), path, fmt.Sprintf("%s is not allowed: want %s, each with its value", shown(n), either(keys)))
		}
		return
	}
	lines := make(map[string]int)
	for i := 0; i < len(n.Content); i += 2 {
		lines[n.Content[i].Value] = n.Content[i].Line
	}
	first := make(map[string]int)
	for i := 0; i < len(n.Content); i += 2 {
		key, value := n.Content[i], n.Content[i+1]
		name := key.Value
		if line, again := first[name]; again {
			f.wrong(f.at(key), path, fmt.Sprintf("%q is not allowed twice: it is in line %d already", name, line))
			continue
		}
		first[name] = key.Line
		known, ok := byKey[name]
		if !ok {
			meant := nearest(name, keys)
			f.wrong(f.at(key), path, unknown(shown(key), meant, either(keys)))
			if _, both := lines[meant]; meant == "" || both {
				continue
			}
			known = byKey[meant] // it may be wrong as well, and is not missing
		}
		f.origins[inside(path, known.key)] = f.at(key)
		known.read(value, inside(path, known.key))
	}
}

// unknown says that there is no such key.
func unknown(name, meant, want string) string {
	if meant != "" {
		return fmt.Sprintf("key %s is not known, did you mean %s? want %s", name, meant, want)
	}
	return fmt.Sprintf("key %s is not known: want %s", name, want)
}

func inside(path, key string) string {
	if path == "" {
		return key
	}
	return path + "." + key
}

// list reads each item of a sequence.
func (f *fileReader) list(item func(n *yaml.Node, path string)) func(*yaml.Node, string) {
	return func(n *yaml.Node, path string) {
		n = resolved(n)
		switch {
		case isNull(n): // as where all its items are commented out
		case n.Kind != yaml.SequenceNode:
			f.wrong(f.at(n), path, shown(n)+" is not allowed: want a list")
		default:
			for i, n := range n.Content {
				path := fmt.Sprintf("%s[%d]", path, i)
				f.origins[path] = f.at(n)
				item(n, path)
			}
		}
	}
}

func (f *fileReader) scalars(settings []setting) []field {
	fields := make([]field, len(settings))
	for i, s := range settings {
		fields[i] = f.scalar(s)
	}
	return fields
}

// scalar reads one value by its text: whether YAML takes it for a string or for
// a number makes no difference.
func (f *fileReader) scalar(s setting) field {
	return field{s.key, func(n *yaml.Node, path string) {
		n = resolved(n)
		want := s.want
		if s.fixed {
			want = s.text()
		}
		switch {
		case isNull(n):
			problem := "has no value"
			if want != "" {
				problem += ": want " + want
			}
			f.wrong(f.at(n), path, problem)
		case n.Kind != yaml.ScalarNode:
			f.wrong(f.at(n), path, shown(n)+" is not allowed: want "+cmp.Or(want, "one value"))
		default:
			if err := s.set(n.Value); err != nil {
				f.wrong(f.at(n), path, err.Error())
			}
		}
	}}
}

// resolved is what a document holds, or an alias stands for.
func resolved(n *yaml.Node) *yaml.Node {
	for {
		switch {
		case n.Kind == yaml.AliasNode:
			n = n.Alias
		case n.Kind == yaml.DocumentNode && len(n.Content) == 1:
			n = n.Content[0]
		default:
			return n
		}
	}
}

func isNull(n *yaml.Node) bool { return n.Kind == yaml.ScalarNode && n.ShortTag() == "!!null" }

// shown says what stands where something else should.
func shown(n *yaml.Node) string {
	switch n.Kind {
	case yaml.MappingNode:
		return "a mapping"
	case yaml.SequenceNode:
		return "a list"
	default:
		return strconv.Quote(n.Value)
	}
}
