package main

import (
	"fmt"
	"io"
	"slices"
	"strings"

	"go.yaml.in/yaml/v3"
)

// write writes the configuration in the form of its file. What is not the
// default has a comment that says where it was given.
func (c config) write(w io.Writer, from origins) error {
	root := &yaml.Node{Kind: yaml.MappingNode}
	sections := make(map[string]*yaml.Node)
	defaults := defaultConfig()
	initial := defaults.settings()
	for i, s := range c.settings() {
		to := root
		section, key, ok := strings.Cut(s.key, ".")
		if !ok {
			key = s.key
		} else if to = sections[section]; to == nil {
			to = &yaml.Node{Kind: yaml.MappingNode}
			sections[section] = to
			addTo(root, section, to)
		}
		value := scalarNode(s.text())
		if s.text() != initial[i].text() {
			value.LineComment = comment(from, s.key)
		}
		addTo(to, key, value)
	}
	workers := &yaml.Node{Kind: yaml.SequenceNode}
	for i, w := range c.Workers {
		node := itemNode(w.settings())
		node.HeadComment = comment(from, fmt.Sprintf("workers[%d]", i))
		if len(w.Labels) > 0 {
			labels := &yaml.Node{Kind: yaml.MappingNode, Style: yaml.FlowStyle}
			for _, key := range sortedKeys(w.Labels) {
				addTo(labels, key, stringNode(w.Labels[key]))
			}
			addTo(node, "labels", labels)
		}
		sources := &yaml.Node{Kind: yaml.SequenceNode}
		for _, s := range w.Sources {
			source := itemNode(s.settings())
			source.Style = yaml.FlowStyle
			sources.Content = append(sources.Content, source)
		}
		addTo(node, "sources", sources)
		workers.Content = append(workers.Content, node)
	}
	addTo(root, "workers", workers)
	listeners := &yaml.Node{Kind: yaml.SequenceNode}
	for i, l := range c.Listeners {
		node := itemNode(l.settings())
		node.HeadComment = comment(from, fmt.Sprintf("listeners[%d]", i))
		addTo(node, "topics", stringsNode(l.Topics))
		addTo(node, "replay_hosts", stringsNode(l.ReplayHosts))
		listeners.Content = append(listeners.Content, node)
	}
	addTo(root, "listeners", listeners)
	places := &yaml.Node{Kind: yaml.SequenceNode}
	for i, d := range c.Discovery {
		node := itemNode(slices.DeleteFunc(d.settings(), func(s setting) bool { return !d.takes(s.key) }))
		node.HeadComment = comment(from, fmt.Sprintf("discovery[%d]", i))
		places.Content = append(places.Content, node)
	}
	addTo(root, "discovery", places)

	e := yaml.NewEncoder(w)
	e.SetIndent(2)
	if err := e.Encode(root); err != nil {
		return fmt.Errorf("write configuration: %w", err)
	}
	if err := e.Close(); err != nil {
		return fmt.Errorf("write configuration: %w", err)
	}
	return nil
}

func comment(from origins, path string) string {
	if at, ok := from[path]; ok {
		return "from " + at.String()
	}
	return ""
}

// itemNode has the settings of an item that say something.
func itemNode(settings []setting) *yaml.Node {
	node := &yaml.Node{Kind: yaml.MappingNode}
	for _, s := range settings {
		if s.text() != "" && !s.fixed {
			addTo(node, s.key, scalarNode(s.text()))
		}
	}
	return node
}

func stringsNode(list []string) *yaml.Node {
	node := &yaml.Node{Kind: yaml.SequenceNode, Style: yaml.FlowStyle}
	for _, s := range list {
		node.Content = append(node.Content, stringNode(s))
	}
	return node
}

func addTo(mapping *yaml.Node, key string, value *yaml.Node) {
	if len(value.Content) == 0 && value.Kind == yaml.SequenceNode {
		return
	}
	mapping.Content = append(mapping.Content, stringNode(key), value)
}

// scalarNode is a setting's text, plain wherever YAML has it mean that text.
func scalarNode(text string) *yaml.Node {
	node := &yaml.Node{Kind: yaml.ScalarNode, Value: text}
	if node.ShortTag() == "!!int" || node.ShortTag() == "!!bool" {
		return node
	}
	return stringNode(text)
}

func stringNode(text string) *yaml.Node {
	return &yaml.Node{Kind: yaml.ScalarNode, Tag: "!!str", Value: text}
}
