package main

import "testing"

func TestGoroutinesAreFoundInSource(t *testing.T) {
	for _, tt := range []struct {
		src  string
		want bool
	}{
		{"package a\nfunc f() { g() }", false},
		{"package a\nfunc f() { go g() }", true},
		{"package a\nfunc f() { x.loops.Go(g) }", true},
		{"package a\nfunc TestX(t *testing.T) { t.Parallel() }", true},
		{"package a\nimport \"testing/synctest\"\nfunc f() { synctest.Wait() }", true},
		{"package a\nimport \"sync\"\nvar mu sync.Mutex", false},
	} {
		if got, err := hasGoroutines("a.go", tt.src); err != nil || got != tt.want {
			t.Errorf("%s\ngot %v, %v", tt.src, got, err)
		}
	}
}

func TestPackagesThatMayHaveGoroutines(t *testing.T) {
	of := func(name string, imports ...string) *listed {
		p := &listed{ImportPath: module + name}
		for _, i := range imports {
			p.Imports = append(p.Imports, module+i)
		}
		p.Imports = append(p.Imports, "net/http")
		return p
	}
	alone, loop, caller := of("alone"), of("loop"), of("caller", "alone", "middle")
	parallel, tester, unknown := of("parallel"), of("tester", "alone"), of("unknown", "elsewhere")
	tester.XTestImports = []string{module + "caller"}
	c := &concurrency{
		packages: make(map[string]*listed),
		own:      map[string]bool{loop.ImportPath: true}, ownTests: map[string]bool{parallel.ImportPath: true},
	}
	for _, p := range []*listed{alone, loop, caller, parallel, tester, unknown, of("middle", "loop")} {
		c.packages[p.ImportPath] = p
	}
	for p, want := range map[*listed]bool{alone: false, loop: true, caller: true, parallel: true, tester: true, unknown: true} {
		if got := c.tests(p); got != want {
			t.Errorf("%s: got %v", p.ImportPath, got)
		}
	}
}
