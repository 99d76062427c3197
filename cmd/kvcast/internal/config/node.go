package config

import (
	"strings"

	"go.yaml.in/yaml/v3"
)

// node is a part of the configuration in the form of its file: a *value, a mapping, a list or labels.
type node interface {
	// read stores the values of a part of the file, and records mistakes.
	read(r *reader, n *yaml.Node, path string)
	// write returns the stored values as a part of a file.
	write(from Origins, path string) *yaml.Node
}

// list is a list of mappings or of values.
type list struct {
	// items returns the nodes of the stored items.
	items func() []node
	// add appends an item with default values, and returns its node.
	add func() node
	// most bounds the items of a file, of which none is read if there are more; 0: no bound.
	most int
}

// atMost returns the list with a bound.
func (l list) atMost(items int) list {
	l.most = items
	return l
}

func listOf[T any, N node](to *[]T, item func(*T) N) list {
	at := func(i int) node { return item(&(*to)[i]) }
	return list{
		items: func() (all []node) {
			for i := range *to {
				all = append(all, at(i))
			}
			return all
		},
		add: func() node {
			*to = append(*to, *new(T))
			added := at(len(*to) - 1)
			setDefaults(added)
			return added
		},
	}
}

// labels is a mapping with any keys. Package ingest validates them.
type labels struct{ to *map[string]string }

// setDefaults stores the default of each value of a node.
func setDefaults(n node) {
	switch n := n.(type) {
	case *value:
		n.set(n.initial) // a value without a default stays zero
	case mapping:
		for _, f := range n {
			setDefaults(f.node)
		}
	}
}

// setting is a value outside lists.
type setting struct {
	*value
	path string // such as journal.max_bytes
	help string
}

// name is the path without the key of a value that is named like its section.
func (s setting) name() string {
	if s.namesSection {
		return s.path[:strings.LastIndexByte(s.path, '.')]
	}
	return s.path
}

// flag and variable are the names of a setting on the command line and in the environment.
func (s setting) flag() string { return strings.NewReplacer(".", "-", "_", "-").Replace(s.name()) }

func (s setting) variable() string {
	return "KVCAST_" + strings.ToUpper(strings.ReplaceAll(s.name(), ".", "_"))
}

// settings returns the values outside lists, in the order of the file.
func (m mapping) settings(path string) (all []setting) {
	for _, f := range m {
		switch n := f.node.(type) {
		case *value:
			all = append(all, setting{n, join(path, f.key), f.help})
		case mapping:
			all = append(all, n.settings(join(path, f.key))...)
		}
	}
	return all
}

// join returns the path of a key within a path.
func join(path, key string) string { return strings.TrimPrefix(path+"."+key, ".") }
