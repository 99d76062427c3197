package main

import (
	"fmt"
	"go/ast"
	"go/parser"
	"go/token"
	"path/filepath"
	"slices"
	"strings"
)

// module begins the import paths of kvcast's packages.
const module = "github.com/kvcast/kvcast/"

// concurrency knows which packages have goroutines, from their source: where there are none, the race detector can find nothing.
type concurrency struct {
	packages map[string]*listed
	own      map[string]bool // has goroutines in its own files, without its tests
	ownTests map[string]bool // has goroutines in its tests
}

func newConcurrency(packages []*listed) (*concurrency, error) {
	c := &concurrency{packages: make(map[string]*listed), own: make(map[string]bool), ownTests: make(map[string]bool)}
	for _, p := range packages {
		c.packages[p.ImportPath] = p
		var err error
		if c.own[p.ImportPath], err = anyGoroutines(p.Dir, slices.Concat(p.GoFiles, p.CgoFiles)); err != nil {
			return nil, err
		}
		if c.ownTests[p.ImportPath], err = anyGoroutines(p.Dir, slices.Concat(p.TestGoFiles, p.XTestGoFiles)); err != nil {
			return nil, err
		}
	}
	return c, nil
}

// tests reports whether the tests of a package have goroutines, or may call a package of kvcast that has. A package that is not known may have.
func (c *concurrency) tests(p *listed) bool {
	if c.ownTests[p.ImportPath] {
		return true
	}
	seen := make(map[string]bool)
	return slices.ContainsFunc(slices.Concat([]string{p.ImportPath}, p.TestImports, p.XTestImports), func(path string) bool {
		return c.mayStart(path, seen)
	})
}

// mayStart reports whether a package of kvcast, or one that it imports, starts goroutines. seen are packages that need not be looked at again.
func (c *concurrency) mayStart(path string, seen map[string]bool) bool {
	if seen[path] || !strings.HasPrefix(path, module) {
		return false
	}
	seen[path] = true
	p := c.packages[path]
	return p == nil || c.own[path] || slices.ContainsFunc(p.Imports, func(path string) bool { return c.mayStart(path, seen) })
}

func anyGoroutines(dir string, files []string) (found bool, err error) {
	for _, name := range files {
		if found, err = hasGoroutines(filepath.Join(dir, name), nil); found || err != nil {
			break
		}
	}
	return found, err
}

// hasGoroutines reports whether a file starts goroutines: by a go statement, by a method Go, as that of a sync.WaitGroup, by parallel tests,
// or by package synctest. src is its text, nil: that of the file.
func hasGoroutines(path string, src any) (found bool, err error) {
	file, err := parser.ParseFile(token.NewFileSet(), path, src, parser.SkipObjectResolution)
	if err != nil {
		return false, fmt.Errorf("look for goroutines: %w", err)
	}
	for _, i := range file.Imports {
		found = found || i.Path.Value == `"testing/synctest"`
	}
	ast.Inspect(file, func(n ast.Node) bool {
		switch n := n.(type) {
		case *ast.GoStmt:
			found = true
		case *ast.SelectorExpr:
			found = found || n.Sel.Name == "Go" || n.Sel.Name == "Parallel" || n.Sel.Name == "RunParallel"
		}
		return !found
	})
	return found, nil
}
