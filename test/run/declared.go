package main

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"go/ast"
	"go/doc"
	"go/parser"
	"go/token"
	"io"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"unicode"
	"unicode/utf8"

	"github.com/kvcast/kvcast/internal/core/testclass"
)

// test is a top-level test function, an example or a fuzz target, as its source declares it.
type test struct {
	pkg, name   string
	dir         string // of the package
	class       testclass.Class
	withoutRace bool
	parallel    bool // runs at the same time as others, or its subtests do
}

// matches reports whether the name matches a pattern; nil matches all.
func (t *test) matches(pattern *regexp.Regexp) bool {
	return pattern == nil || pattern.MatchString(t.name)
}

// listed is a package as go list describes it.
type listed struct {
	Dir, ImportPath                              string
	GoFiles, CgoFiles, TestGoFiles, XTestGoFiles []string
	Imports, TestImports, XTestImports           []string
}

// declaredTests returns the tests of packages, from their source. Those of a package without goroutines are without the race detector.
func declaredTests(ctx context.Context, patterns []string) ([]test, error) {
	args := append([]string{"list", "-json=Dir,ImportPath,GoFiles,CgoFiles,TestGoFiles,XTestGoFiles,Imports,TestImports,XTestImports"}, patterns...)
	out, err := exec.CommandContext(ctx, "go", args...).Output()
	if failed := (*exec.ExitError)(nil); errors.As(err, &failed) {
		return nil, fmt.Errorf("go list: %w\n%s", err, failed.Stderr)
	}
	if err != nil {
		return nil, fmt.Errorf("go list: %w", err)
	}
	var packages []*listed
	for d := json.NewDecoder(bytes.NewReader(out)); ; {
		p := &listed{}
		if err := d.Decode(p); errors.Is(err, io.EOF) {
			break
		} else if err != nil {
			return nil, fmt.Errorf("go list: %w", err)
		}
		packages = append(packages, p)
	}
	concurrent, err := newConcurrency(packages)
	if err != nil {
		return nil, err
	}
	var all []test
	for _, p := range packages {
		withoutRace := !concurrent.tests(p)
		for _, name := range append(p.TestGoFiles, p.XTestGoFiles...) {
			tests, err := testsOf(p.ImportPath, filepath.Join(p.Dir, name), nil)
			if err != nil {
				return nil, err
			}
			for i := range tests {
				tests[i].dir = p.Dir
				tests[i].withoutRace = tests[i].withoutRace || withoutRace
			}
			all = append(all, tests...)
		}
	}
	return all, nil
}

// testsOf returns the tests that a file declares. src is its text, nil: that of the file.
func testsOf(pkg, path string, src any) (tests []test, err error) {
	file, err := parser.ParseFile(token.NewFileSet(), path, src, parser.SkipObjectResolution|parser.ParseComments)
	if err != nil {
		return nil, fmt.Errorf("read tests: %w", err)
	}
	for _, e := range doc.Examples(file) {
		if e.Output != "" || e.EmptyOutput { // otherwise go test compiles it only
			tests = append(tests, test{pkg: pkg, name: "Example" + e.Name, class: testclass.ClassQuick})
		}
	}
	for _, d := range file.Decls {
		f, ok := d.(*ast.FuncDecl)
		if !ok || f.Recv != nil || !isTest(f.Name.Name) || f.Body == nil || f.Name.Name == "TestMain" {
			continue
		}
		t := test{pkg: pkg, name: f.Name.Name, class: testclass.ClassQuick, parallel: callsParallel(f.Body)}
		for _, s := range f.Body.List {
			switch name := declaration(s); name {
			case "":
			case "WithoutRace":
				t.withoutRace = true
			default:
				t.class = testclass.Class(strings.ToLower(name))
				if !isClass(string(t.class)) {
					return nil, fmt.Errorf("%s: %s calls testclass.%s, which is no class; want %s", path, t.name, name, classNames())
				}
			}
		}
		tests = append(tests, t)
	}
	return tests, nil
}

// callsParallel reports whether a test, or a function within it, calls a method Parallel.
func callsParallel(body ast.Node) (found bool) {
	ast.Inspect(body, func(n ast.Node) bool {
		if s, ok := n.(*ast.SelectorExpr); ok && s.Sel.Name == "Parallel" {
			found = true
		}
		return !found
	})
	return found
}

// isTest reports whether go test runs a function of this name as a test or a fuzz target.
func isTest(name string) bool {
	for _, prefix := range []string{"Test", "Fuzz"} {
		if rest, ok := strings.CutPrefix(name, prefix); ok {
			first, _ := utf8.DecodeRuneInString(rest)
			return !unicode.IsLower(first)
		}
	}
	return false
}

// declaration returns the name of the function if a statement is a call of one of package testclass, and else "".
func declaration(s ast.Stmt) string {
	statement, ok := s.(*ast.ExprStmt)
	if !ok {
		return ""
	}
	call, ok := statement.X.(*ast.CallExpr)
	if !ok {
		return ""
	}
	function, ok := call.Fun.(*ast.SelectorExpr)
	if !ok {
		return ""
	}
	if from, ok := function.X.(*ast.Ident); !ok || from.Name != "testclass" {
		return ""
	}
	return function.Sel.Name
}
