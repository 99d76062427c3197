package bench_test

import (
	"errors"
	"io"
	"os"
	"testing"

	"github.com/kvcast/kvcast/test/harness"
)

// TestMain runs the tests, or the role of a child process that a benchmark started.
func TestMain(m *testing.M) {
	if role := os.Getenv(roleVariable); role != "" {
		os.Exit(childMain(role, os.Stdin, os.Stdout, os.Stderr))
	}
	os.Exit(harness.RunTests(m))
}

// benchmarkWith runs a sub-benchmark on a resource that is opened once per -count and reused for all
// values of b.N. The first value is always 1.
func benchmarkWith[T io.Closer](b *testing.B, name string, open func() (T, error), bench func(*testing.B, T)) {
	b.Helper()
	var opened io.Closer
	closeOpened := func() error {
		if opened == nil {
			return nil
		}
		c := opened
		opened = nil
		return c.Close()
	}
	var t T
	b.Run(name, func(b *testing.B) {
		if b.N == 1 || opened == nil {
			err := closeOpened()
			if err == nil {
				t, err = open()
			}
			if err != nil {
				b.Fatal(err)
			}
			opened = t
		}
		bench(b, t)
	})
	if err := closeOpened(); err != nil {
		b.Error(err)
	}
}

// reportAllocations reports the allocations of the process under test instead of this process.
func reportAllocations(b *testing.B, mallocs, bytes float64) {
	b.ReportMetric(mallocs, "allocs/op")
	b.ReportMetric(bytes, "B/op")
}

// closeAll closes every closer that is not nil.
func closeAll(closers ...io.Closer) error {
	var errs []error
	for _, c := range closers {
		errs = append(errs, c.Close())
	}
	return errors.Join(errs...)
}

// closeAfter closes a resource after an error that makes it unusable.
func closeAfter(err error, c io.Closer) error { return errors.Join(err, c.Close()) }
