// Command protoc-gen-reference generates a reference of the files of a contract: a Markdown page for each, which has the comments, the methods
// of services, the fields of messages and the values of enums. Comments are Go doc comments. Each name has an anchor: Message, Message.field,
// Service.Method.
package main

import (
	"fmt"
	"go/doc/comment"
	"html"
	"path"
	"strings"

	"google.golang.org/protobuf/compiler/protogen"
	"google.golang.org/protobuf/reflect/protoreflect"
	"google.golang.org/protobuf/types/pluginpb"
)

func main() {
	protogen.Options{}.Run(func(p *protogen.Plugin) error {
		p.SupportedFeatures = uint64(pluginpb.CodeGeneratorResponse_FEATURE_PROTO3_OPTIONAL)
		for _, file := range p.Files {
			if file.Generate {
				g := page{p.NewGeneratedFile(file.Desc.Path()+".md", "")}
				g.file(file)
			}
		}
		return nil
	})
}

type page struct{ *protogen.GeneratedFile }

func (g page) file(f *protogen.File) {
	g.P("# ", path.Base(f.Desc.Path()))
	g.P()
	g.P("Package `", f.Desc.Package(), "`.")
	for _, s := range f.Services {
		g.heading("##", string(s.Desc.Name()), string(s.Desc.Name()))
		g.P(text(s.Comments))
		for _, m := range s.Methods {
			g.heading("###", string(m.Desc.Name()), relative(m.Desc))
			g.P("<div class=\"highlight\"><pre><code>rpc ", m.Desc.Name(), "(", stream(m.Desc.IsStreamingClient()), link(m.Desc, m.Input.Desc), ") returns (",
				stream(m.Desc.IsStreamingServer()), link(m.Desc, m.Output.Desc), ")</code></pre></div>")
			g.P()
			g.P(text(m.Comments))
		}
	}
	g.enums(f.Enums)
	g.messages(f.Messages)
}

func (g page) heading(level, title, anchor string) {
	g.P()
	g.P(level, " ", title, " { #", anchor, " }")
	g.P()
}

func (g page) messages(all []*protogen.Message) {
	for _, m := range all {
		if m.Desc.IsMapEntry() {
			continue
		}
		g.heading("##", relative(m.Desc), relative(m.Desc))
		g.P(text(m.Comments))
		if len(m.Fields) > 0 {
			g.P()
			g.P("<table><thead><tr><th>Field</th><th>Type</th><th>Number</th><th>Description</th></tr></thead><tbody>")
			for _, f := range m.Fields {
				g.row(f.Desc, f.Desc.Number(), f.Comments, "<td>"+typeOf(f.Desc)+"</td>")
			}
			g.P("</tbody></table>")
		}
		g.enums(m.Enums)
		g.messages(m.Messages)
	}
}

func (g page) enums(all []*protogen.Enum) {
	for _, e := range all {
		g.heading("##", relative(e.Desc), relative(e.Desc))
		g.P(text(e.Comments))
		g.P()
		g.P("<table><thead><tr><th>Value</th><th>Number</th><th>Description</th></tr></thead><tbody>")
		for _, v := range e.Values {
			g.row(v.Desc, v.Desc.Number(), v.Comments, "")
		}
		g.P("</tbody></table>")
	}
}

// row writes a field or a value. Columns are those between its name and its number.
func (g page) row(d protoreflect.Descriptor, number any, comments protogen.CommentSet, columns string) {
	description := strings.Replace(text(comments), "<p>", "", 1) // without its margin
	g.P("<tr id=\"", relative(d), "\"><td><strong>", d.Name(), "</strong></td>", columns, "<td>", number, "</td><td>", description, "</td></tr>")
}

// text returns the comments of a declaration as HTML, in one block for Markdown.
func text(c protogen.CommentSet) string {
	var lines []string
	for line := range strings.Lines(string(c.Leading + c.Trailing)) {
		lines = append(lines, strings.TrimPrefix(line, " "))
	}
	var parser comment.Parser
	var printer comment.Printer
	block := string(printer.HTML(parser.Parse(strings.Join(lines, ""))))
	return "<div>" + strings.NewReplacer("<pre>", "<pre><code>", "</pre>", "</code></pre>").Replace(block) + "</div>" // code scrolls
}

// relative returns the name of a declaration within its package.
func relative(d protoreflect.Descriptor) string {
	if v, ok := d.(protoreflect.EnumValueDescriptor); ok { // a sibling of its enum
		return relative(v.Parent()) + "." + string(v.Name())
	}
	return strings.TrimPrefix(string(d.FullName()), string(d.ParentFile().Package())+".")
}

func stream(is bool) string {
	if is {
		return "stream "
	}
	return ""
}

func typeOf(f protoreflect.FieldDescriptor) string {
	switch oneof := f.ContainingOneof(); {
	case f.IsMap():
		return fmt.Sprintf("map&lt;%s, %s&gt;", typeOf(f.MapKey()), typeOf(f.MapValue()))
	case f.IsList():
		return "repeated " + single(f)
	case oneof != nil && oneof.IsSynthetic():
		return "optional " + single(f)
	case oneof != nil:
		return fmt.Sprintf("%s, oneof %s", single(f), oneof.Name())
	}
	return single(f)
}

func single(f protoreflect.FieldDescriptor) string {
	switch {
	case f.Message() != nil:
		return link(f, f.Message())
	case f.Enum() != nil:
		return link(f, f.Enum())
	}
	return f.Kind().String()
}

// link returns a link from a declaration to another one. Declarations of other packages have no page.
func link(from, to protoreflect.Descriptor) string {
	if to.ParentFile().Package() != from.ParentFile().Package() {
		return html.EscapeString(string(to.FullName()))
	}
	return fmt.Sprintf("<a href=\"%s.html#%s\">%s</a>", path.Base(to.ParentFile().Path()), relative(to), relative(to))
}
