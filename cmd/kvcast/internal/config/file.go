package config

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"slices"
	"strconv"
	"strings"

	"go.yaml.in/yaml/v3"

	ingestconfig "github.com/kvcast/kvcast/ingest/config"
)

// file reads a configuration file. It walks the YAML nodes rather than decode them into structs, because only nodes have
// line numbers, with which every mistake is reported.
func (r *reader) file(name string, data []byte) {
	r.document(name, data, func(n *yaml.Node) { r.config.fields().read(r, n, "") })
}

// document reads the only document of a file, unless the file is empty.
func (r *reader) document(name string, data []byte, read func(*yaml.Node)) {
	r.fileName = strings.Map(func(c rune) rune {
		if !ingestconfig.Printable(string(c)) {
			return '?'
		}
		return c
	}, name)
	documents := yaml.NewDecoder(bytes.NewReader(data))
	var first, second yaml.Node
	err := documents.Decode(&first)
	if err == nil {
		if hasMoreNodes(&first, 2*len(data)+maxAliased) {
			r.wrong(origin{place: r.fileName}, "", "aliases make it many times larger: want the values themselves")
		} else {
			read(&first)
		}
		err = documents.Decode(&second)
	}
	switch {
	case err == nil:
		r.wrong(r.at(&second), "", "a second document is not allowed: want one")
	case !errors.Is(err, io.EOF):
		r.wrong(origin{place: r.fileName}, "", err.Error()) // the text has "yaml", the cause, and usually the line
	}
}

// maxAliased is how many nodes a file may have with its aliases, beyond two for each of its bytes.
const maxAliased = 10_000

// hasMoreNodes reports whether there are more nodes under a node than a number, with the target of an alias in its place.
func hasMoreNodes(n *yaml.Node, most int) bool {
	left := []*yaml.Node{n}
	for total := 1; len(left) > 0; {
		last := len(left) - 1
		content := resolve(left[last]).Content
		if total += len(content); total > most {
			return true
		}
		left = append(left[:last], content...)
	}
	return false
}

func (r *reader) at(n *yaml.Node) origin { return origin{r.fileName, n.Line} }

// read stores the text of a scalar. YAML's distinction of strings, numbers and booleans has no effect.
func (v *value) read(r *reader, n *yaml.Node, path string) {
	n = resolve(n)
	switch {
	case isNull(n):
		r.wrong(r.at(n), path, "has no value: want "+v.want)
	case n.Kind != yaml.ScalarNode:
		r.wrong(r.at(n), path, shown(n)+" is not allowed: want "+v.want)
	case !v.set(n.Value):
		r.wrong(r.at(n), path, notAllowed(n.Value, v.want))
	}
}

// read stores the values of the keys that are given, and records unknown and repeated keys.
func (m mapping) read(r *reader, n *yaml.Node, path string) {
	n = resolve(n)
	keys := make([]string, len(m))
	nodes := make(map[string]node)
	for i, known := range m {
		keys[i], nodes[known.key] = known.key, known.node
	}
	if n.Kind != yaml.MappingNode {
		if !isNull(n) || strings.HasSuffix(path, "]") {
			if len(r.unreadable) < r.mostMistakes {
				r.unreadable = append(r.unreadable, path)
			}
			r.wrong(r.at(n), path, fmt.Sprintf("%s is not allowed: want a mapping with %s", shown(n), either(keys)))
		}
		return
	}
	given := make(map[string]bool)
	for pair := range slices.Chunk(n.Content, 2) {
		given[pair[0].Value] = true
	}
	r.eachKey(n, path, func(key, content *yaml.Node) {
		name := key.Value
		if nodes[name] == nil {
			meant := closest(name, keys)
			r.wrong(r.at(key), path, unknownKey(shown(key), meant, keys))
			if meant == "" || given[meant] {
				return
			}
			name = meant // validate the value too, and do not report the key as missing
		}
		r.origins[join(path, name)] = r.at(key)
		nodes[name].read(r, content, join(path, name))
	})
}

// eachKey calls read for each key of a mapping and its content, and records repeated keys.
func (r *reader) eachKey(n *yaml.Node, path string, read func(key, content *yaml.Node)) {
	seen := make(map[string]int)
	for pair := range slices.Chunk(n.Content, 2) {
		key := resolve(pair[0])
		if line, repeated := seen[key.Value]; repeated {
			r.wrong(r.at(key), path, fmt.Sprintf("key %q is given twice, first in line %d", key.Value, line))
			continue
		}
		seen[key.Value] = key.Line
		read(key, pair[1])
	}
}

func unknownKey(name, meant string, keys []string) string {
	if meant != "" {
		return fmt.Sprintf("unknown key %s, did you mean %s? want %s", name, meant, either(keys))
	}
	return fmt.Sprintf("unknown key %s: want %s", name, either(keys))
}

// read appends the items of a sequence.
func (l list) read(r *reader, n *yaml.Node, path string) {
	n = resolve(n)
	switch {
	case isNull(n): // allowed, since all items may be commented out
	case n.Kind != yaml.SequenceNode:
		r.wrong(r.at(n), path, shown(n)+" is not allowed: want a list")
	case l.most > 0 && len(n.Content) > l.most:
		r.wrong(r.at(n), path, notAllowed(len(n.Content), fmt.Sprintf("at most %d", l.most)))
	default:
		for i, n := range n.Content {
			path := fmt.Sprintf("%s[%d]", path, i)
			r.origins[path] = r.at(n)
			l.add().read(r, n, path)
		}
	}
}

// read stores each label.
func (l labels) read(r *reader, n *yaml.Node, path string) {
	n = resolve(n)
	if isNull(n) {
		return
	}
	if n.Kind != yaml.MappingNode {
		r.wrong(r.at(n), path, shown(n)+" is not allowed: want a mapping of labels")
		return
	}
	r.eachKey(n, path, func(key, content *yaml.Node) {
		if key.Kind != yaml.ScalarNode || isNull(key) {
			r.wrong(r.at(key), path, shown(key)+" is not allowed as a label's key: want a text")
			return
		}
		label := fmt.Sprintf("%s[%q]", path, key.Value)
		r.origins[label] = r.at(key)
		var labelText string
		labelValue := word(&labelText)
		labelValue.want = `a text, which may be ""`
		labelValue.read(r, content, label)
		if *l.to == nil {
			*l.to = make(map[string]string)
		}
		(*l.to)[key.Value] = labelText
	})
}

// resolve returns the content of a document or the target of an alias.
func resolve(n *yaml.Node) *yaml.Node {
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

// shown describes a node in a message.
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

// closest returns the name that is nearest to a misspelt name, with an edit distance of at most 2; empty if none is.
func closest(name string, names []string) string {
	best, least := "", 3
	for _, n := range names {
		if d := editDistance(name, n); d < least && d < len(n) {
			best, least = n, d
		}
	}
	return best
}

// editDistance is the Levenshtein distance.
func editDistance(a, b string) int {
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
