package docs_test

import (
	"io/fs"
	"os"
	"path"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
)

// root is the folder of the repository.
const root = "../.."

var (
	link    = regexp.MustCompile(`\]\(([^)\s]*)\)`)
	code    = regexp.MustCompile("`[^`\n]*`")
	heading = regexp.MustCompile(`^#+ +(.*)$`)
	markup  = regexp.MustCompile("\\[([^]]*)\\]\\([^)]*\\)|[`*]") // of headings
	noSlug  = regexp.MustCompile(`[^\pL\pN_ -]`)
)

// page is a Markdown file without its code.
type page struct {
	text    string
	anchors []string // those that code hosts give headings
}

func readPage(t *testing.T, name string) (p page) {
	t.Helper()
	text, err := os.ReadFile(filepath.Join(root, name))
	if err != nil {
		t.Fatal(err)
	}
	fence := ""
	for line := range strings.Lines(string(text)) {
		line = strings.TrimRight(line, "\n")
		switch trimmed := strings.TrimSpace(line); {
		case fence != "":
			if strings.HasPrefix(trimmed, fence) {
				fence = ""
			}
			continue
		case strings.HasPrefix(trimmed, "```"):
			fence = trimmed[:len(trimmed)-len(strings.TrimLeft(trimmed, "`"))]
			continue
		}
		if m := heading.FindStringSubmatch(line); m != nil {
			title := strings.ToLower(markup.ReplaceAllString(m[1], "$1"))
			p.anchors = append(p.anchors, strings.ReplaceAll(noSlug.ReplaceAllString(title, ""), " ", "-"))
		}
		p.text += code.ReplaceAllString(line, "") + "\n"
	}
	return p
}

// markdownFiles returns the Markdown files of the repository, with slashes.
func markdownFiles(t *testing.T) (names []string) {
	t.Helper()
	err := filepath.WalkDir(root, func(path string, entry fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		name, err := filepath.Rel(root, path)
		if err != nil {
			return err
		}
		if entry.IsDir() && (name == "bin" || name == ".git" || entry.Name() == "target" || entry.Name() == "node_modules") { // what was built
			return filepath.SkipDir
		}
		if strings.HasSuffix(name, ".md") {
			names = append(names, filepath.ToSlash(name))
		}
		return nil
	})
	if err != nil || len(names) < 25 {
		t.Fatalf("got %d Markdown files, %v", len(names), err)
	}
	return names
}

// TestLinksLeadToFilesAndHeadings checks the links of all Markdown files to files and folders of the repository, and to headings in them.
func TestLinksLeadToFilesAndHeadings(t *testing.T) {
	t.Parallel()
	checked := 0
	for _, name := range markdownFiles(t) {
		for _, m := range link.FindAllStringSubmatch(readPage(t, name).text, -1) {
			if strings.Contains(m[1], "://") {
				continue
			}
			checked++
			target, anchor, _ := strings.Cut(m[1], "#")
			to := name
			if target != "" {
				to = path.Join(path.Dir(name), target)
			}
			if _, err := os.Stat(filepath.Join(root, to)); err != nil || strings.HasPrefix(to, "../") {
				t.Errorf("%s: the link %s leads to no file of the repository", name, m[1])
				continue
			}
			if anchor != "" && (!strings.HasSuffix(to, ".md") || !slices.Contains(readPage(t, to).anchors, anchor)) {
				t.Errorf("%s: the link %s leads to no heading of %s", name, m[1], to)
			}
		}
	}
	if checked < 300 {
		t.Errorf("checked %d links, want those of all files", checked)
	}
}

// group is a row of the README's list of docs, which is the navigation of the site.
type group struct {
	name  string
	pages []string // files and folders of the repository
}

func readGroups(t *testing.T) (groups []group) {
	t.Helper()
	_, list, _ := strings.Cut(readPage(t, "README.md").text, "\n## Documentation\n")
	for _, row := range regexp.MustCompile(`(?m)^\| ([^|]+) \| (\[.*) \|$`).FindAllStringSubmatch(list, -1) {
		g := group{name: row[1]}
		for _, m := range link.FindAllStringSubmatch(row[2], -1) {
			g.pages = append(g.pages, m[1])
		}
		groups = append(groups, g)
	}
	if len(groups) < 4 {
		t.Fatalf("got %d groups, want at least 4", len(groups))
	}
	return groups
}

func TestReadmeListsEachPageOnce(t *testing.T) {
	t.Parallel()
	listed := make(map[string]int)
	for _, g := range readGroups(t) {
		for _, p := range g.pages {
			listed[p]++
		}
	}
	for _, name := range markdownFiles(t) {
		if path.Dir(name) == "docs" && listed[name] != 1 {
			t.Errorf("the README's list of docs has %s %d times, want once", name, listed[name])
		}
	}
}
