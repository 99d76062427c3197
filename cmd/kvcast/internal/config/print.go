package config

import (
	"fmt"
	"io"
	"maps"
	"slices"
	"strings"

	"go.yaml.in/yaml/v3"
)

// Write writes the configuration in the form of its file. Comments give the origin of each value that is not the default.
func (c *Config) Write(to io.Writer, from Origins) error {
	e := yaml.NewEncoder(to)
	e.SetIndent(2)
	err := e.Encode(c.fields().write(from, ""))
	if err == nil {
		err = e.Close()
	}
	if err != nil {
		return fmt.Errorf("write configuration: %w", err)
	}
	return nil
}

// write returns the text. It is unquoted if YAML reads it as a string, an integer or a boolean.
func (v *value) write(from Origins, path string) *yaml.Node {
	n := &yaml.Node{Kind: yaml.ScalarNode, Value: v.text()}
	if tag := n.ShortTag(); tag != "!!int" && tag != "!!bool" {
		n.Tag = "!!str"
	}
	if v.text() != v.initial && !inItem(path) {
		n.LineComment = comment(from, path)
	}
	return n
}

// write omits empty lists and labels, and within list items also keys without a value.
func (m mapping) write(from Origins, path string) *yaml.Node {
	n := &yaml.Node{Kind: yaml.MappingNode}
	for _, f := range m {
		content := f.node.write(from, join(path, f.key))
		isEmpty := content.Value == "" && len(content.Content) == 0
		if isEmpty && (content.Kind != yaml.ScalarNode || inItem(path)) {
			continue
		}
		n.Content = append(n.Content, stringNode(f.key), content)
	}
	return n
}

func (l list) write(from Origins, path string) *yaml.Node {
	n := &yaml.Node{Kind: yaml.SequenceNode}
	for i, item := range l.items() {
		path := fmt.Sprintf("%s[%d]", path, i)
		content := item.write(from, path)
		switch {
		case content.Kind == yaml.ScalarNode:
			n.Style = yaml.FlowStyle
		case strings.Count(path, "[") > 1:
			content.Style = yaml.FlowStyle
		default:
			content.HeadComment = comment(from, path)
		}
		n.Content = append(n.Content, content)
	}
	return n
}

func (l labels) write(Origins, string) *yaml.Node {
	n := &yaml.Node{Kind: yaml.MappingNode, Style: yaml.FlowStyle}
	for _, key := range slices.Sorted(maps.Keys(*l.to)) {
		n.Content = append(n.Content, stringNode(key), stringNode((*l.to)[key]))
	}
	return n
}

// inItem reports whether a path is within a list item.
func inItem(path string) bool { return strings.Contains(path, "[") }

func comment(from Origins, path string) string {
	if at, ok := from[path]; ok {
		return "from " + at.String()
	}
	return ""
}

func stringNode(text string) *yaml.Node {
	return &yaml.Node{Kind: yaml.ScalarNode, Tag: "!!str", Value: text}
}
