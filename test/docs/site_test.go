package docs_test

import (
	"bytes"
	"io/fs"
	"net/url"
	"os"
	"os/exec"
	"path"
	"path/filepath"
	"regexp"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"golang.org/x/net/html"
	"google.golang.org/protobuf/reflect/protoreflect"
	"google.golang.org/protobuf/reflect/protoregistry"

	"github.com/kvcast/kvcast/internal/core/testclass"
	_ "github.com/kvcast/kvcast/proto/kvcast/v1" // registers the contract
	"github.com/kvcast/kvcast/test/harness"
)

// sources matches an address of a file or folder of this repository on its code host, at the commit of the site.
var sources = regexp.MustCompile(`^https://github\.com/kvcast/kvcast/(tree|blob)/[0-9a-f]{40}/([^#]+)(#|$)`)

func TestMain(m *testing.M) { os.Exit(harness.RunTests(m)) }

// site returns the folder of the site. It skips the test if that has not been built.
func site(t *testing.T) string {
	t.Helper()
	dir := filepath.Join(root, "bin", "docs")
	if _, err := os.Stat(filepath.Join(dir, "index.html")); err != nil {
		t.Skip("bin/docs/index.html is missing: run make docs")
	}
	return dir
}

// element is an element of a page, or a text in one.
type element struct {
	*html.Node
	attr map[string]string
}

// sitePages returns the elements of each page, and the texts outside code, by the page's path in the site.
func sitePages(t *testing.T) map[string][]element {
	t.Helper()
	dir := site(t)
	pages := make(map[string][]element)
	err := filepath.WalkDir(dir, func(name string, _ fs.DirEntry, err error) error {
		if err != nil || !strings.HasSuffix(name, ".html") {
			return err
		}
		f, err := os.Open(name)
		if err != nil {
			return err
		}
		defer func() { _ = f.Close() }()
		document, err := html.Parse(f)
		if err != nil {
			return err
		}
		rel, err := filepath.Rel(dir, name)
		if err != nil {
			return err
		}
		for n := range document.Descendants() {
			e := element{n, make(map[string]string)}
			for _, a := range n.Attr {
				e.attr[a.Key] = a.Val
			}
			pages[filepath.ToSlash(rel)] = append(pages[filepath.ToSlash(rel)], e)
		}
		return nil
	})
	if err != nil || len(pages) < 30 {
		t.Fatalf("got %d pages, %v", len(pages), err)
	}
	return pages
}

// TestSiteHasNoBrokenLink checks that links within the site lead to pages and anchors, that those to the repository lead to its files, and
// that nothing is loaded from another host.
func TestSiteHasNoBrokenLink(t *testing.T) {
	testclass.Packaging(t)
	t.Parallel()
	pages := sitePages(t)
	anchors := make(map[string]bool)
	for name, elements := range pages {
		for _, e := range elements {
			if id := e.attr["id"]; id != "" {
				anchors[name+"#"+id] = true
			}
		}
	}
	toSources := 0
	for name, elements := range pages {
		for _, e := range elements {
			for _, key := range []string{"href", "src", "data", "poster"} {
				address, ok := e.attr[key]
				if !ok {
					continue
				}
				u, err := url.Parse(address)
				if err != nil {
					t.Errorf("%s: <%s %s=%q>: %v", name, e.Data, key, address, err)
					continue
				}
				switch m := sources.FindStringSubmatch(address); {
				case m != nil:
					toSources++
					info, err := os.Stat(filepath.Join(root, m[2]))
					if err != nil || info.IsDir() != (m[1] == "tree") {
						t.Errorf("%s: %s leads to no %s of the repository", name, address, m[1])
					}
				case u.IsAbs() || u.Host != "":
					if e.Data != "a" {
						t.Errorf("%s: <%s %s=%q> is loaded from another host", name, e.Data, key, address)
					}
				default:
					to := name
					if strings.HasPrefix(u.Path, "/") {
						to = path.Clean(u.Path[1:])
					} else if u.Path != "" {
						to = path.Join(path.Dir(name), u.Path)
					}
					if info, err := os.Stat(filepath.Join(site(t), to)); err != nil || info.IsDir() && to != "." {
						t.Errorf("%s: %s leads to no file of the site", name, address)
					} else if u.Fragment != "" && !anchors[to+"#"+u.Fragment] {
						t.Errorf("%s: %s leads to no anchor of %s", name, address, to)
					}
				}
			}
		}
	}
	if toSources < 50 {
		t.Errorf("got %d links to files of the repository, want all", toSources)
	}
}

// TestSiteRendersMarkdown looks for Markdown that was not understood: where a list or a table begins, code hosts are less strict than the
// generator. Text within an item of a list is indented by four spaces, and a list that follows another kind of list begins after a paragraph.
func TestSiteRendersMarkdown(t *testing.T) {
	testclass.Packaging(t)
	t.Parallel()
	raw := regexp.MustCompile("(?m)^ *([-*] |\\| |#+ |```|\\[.*\\]\\()")
	for name, elements := range sitePages(t) {
		for _, e := range elements {
			if e.Type != html.TextNode || e.Parent.Data != "p" && e.Parent.Data != "li" && e.Parent.Data != "td" {
				continue
			}
			if found := raw.FindString(e.Data); found != "" {
				t.Errorf("%s: %q in the text %q", name, found, e.Data)
			}
		}
	}
}

// TestSiteNavigation compares the navigation with the README's list of docs.
func TestSiteNavigation(t *testing.T) {
	testclass.Packaging(t)
	t.Parallel()
	titles, links := make(map[string]bool), make(map[string]bool)
	for _, e := range sitePages(t)["index.html"] {
		if !strings.Contains(e.attr["class"], "md-nav__link") {
			continue
		}
		links[e.attr["href"]] = true
		for n := range e.Descendants() {
			if n.Type == html.TextNode {
				titles[strings.TrimSpace(n.Data)] = true
			}
		}
	}
	for _, g := range readGroups(t) {
		if !titles["For "+g.name] {
			t.Errorf("the navigation has no group %q", "For "+g.name)
		}
		for _, p := range g.pages {
			if strings.HasSuffix(p, ".md") && !links["./"+strings.TrimSuffix(p, ".md")+".html"] {
				t.Errorf("the navigation has no %s", p)
			}
		}
	}
}

// TestSiteHasTheContract checks that the reference has each declaration of the contract, and that its pages are in the navigation.
func TestSiteHasTheContract(t *testing.T) {
	testclass.Packaging(t)
	t.Parallel()
	pages := sitePages(t)
	navigation := make(map[string]bool)
	for _, e := range pages["index.html"] {
		if strings.Contains(e.attr["class"], "md-nav__link") {
			navigation[e.attr["href"]] = true
		}
	}
	checked := 0
	protoregistry.GlobalFiles.RangeFilesByPackage("kvcast.v1", func(file protoreflect.FileDescriptor) bool {
		name := "proto/" + file.Path() + ".html"
		if !navigation["./"+name] {
			t.Errorf("the navigation has no %s", name)
		}
		anchors := make(map[string]bool)
		for _, e := range pages[name] {
			anchors[e.attr["id"]] = true
		}
		for _, d := range declarations(file) {
			checked++
			if !anchors[d] {
				t.Errorf("%s has no %s", name, d)
			}
		}
		return true
	})
	if checked < 300 {
		t.Errorf("checked %d declarations, want all", checked)
	}
}

// declarations returns the names of all services, methods, messages, fields, enums and values of a file, within its package.
func declarations(file protoreflect.FileDescriptor) (names []string) {
	relative := func(d protoreflect.Descriptor) string {
		return strings.TrimPrefix(string(d.FullName()), string(file.Package())+".")
	}
	enums := func(all protoreflect.EnumDescriptors) {
		for i := range all.Len() {
			names = append(names, relative(all.Get(i)))
			for j := range all.Get(i).Values().Len() {
				names = append(names, relative(all.Get(i))+"."+string(all.Get(i).Values().Get(j).Name()))
			}
		}
	}
	var messages func(protoreflect.MessageDescriptors)
	messages = func(all protoreflect.MessageDescriptors) {
		for i := range all.Len() {
			if all.Get(i).IsMapEntry() {
				continue
			}
			names = append(names, relative(all.Get(i)))
			for j := range all.Get(i).Fields().Len() {
				names = append(names, relative(all.Get(i).Fields().Get(j)))
			}
			enums(all.Get(i).Enums())
			messages(all.Get(i).Messages())
		}
	}
	for i := range file.Services().Len() {
		s := file.Services().Get(i)
		names = append(names, relative(s))
		for j := range s.Methods().Len() {
			names = append(names, relative(s.Methods().Get(j)))
		}
	}
	enums(file.Enums())
	messages(file.Messages())
	return names
}

// TestSiteHasTheManPage compares the man page with the one that kvcast prints, which has another version in the first line, and libzmq as
// the default transport if there is cgo.
func TestSiteHasTheManPage(t *testing.T) {
	testclass.Packaging(t)
	t.Parallel()
	got, err := os.ReadFile(filepath.Join(site(t), "kvcast.1"))
	if err != nil {
		t.Fatal(err)
	}
	program, err := harness.Program(false)
	if err != nil {
		t.Fatal(err)
	}
	want, err := exec.CommandContext(harness.Context(t), program, "man").Output()
	if err != nil {
		t.Fatalf("kvcast man: %v", err)
	}
	_, got, _ = bytes.Cut(got, []byte("\n"))
	_, want, _ = bytes.Cut(bytes.ReplaceAll(want, []byte(`="libzmq"`), []byte(`="native"`)), []byte("\n"))
	if diff := cmp.Diff(string(want), string(got)); diff != "" || len(want) == 0 {
		t.Errorf("run make docs again (-kvcast man +bin/docs/kvcast.1):\n%s", diff)
	}
	if groff, err := exec.LookPath("groff"); err == nil {
		out, err := exec.CommandContext(harness.Context(t), groff, "-man", "-Tutf8", "-ww", "-z", filepath.Join(site(t), "kvcast.1")).CombinedOutput()
		if err != nil || len(out) > 0 {
			t.Errorf("groff: %v\n%s", err, out)
		}
	}
}
