package bench_test

import (
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
	"time"
)

// tick is the unit of CPU times in /proc, 1/USER_HZ s: the kernel's interface
// has the same on every architecture that Go has. A difference of two readings
// of user and system time is some 10 ms off, so that what is measured should
// take a second.
const tick = 10 * time.Millisecond

// requireProc skips where the CPU time of another process cannot be read.
func requireProc(tb testing.TB) {
	tb.Helper()
	if _, err := cpuTime(os.Getpid()); err != nil {
		tb.Skipf("skipped: this measures another process by way of /proc, as Linux has it: %v", err)
	}
}

// cpuTime is the time that a process has run so far, in user and system mode,
// all its threads included, those that have ended too.
func cpuTime(pid int) (time.Duration, error) {
	stat, err := os.ReadFile(filepath.Join("/proc", strconv.Itoa(pid), "stat"))
	if err != nil {
		return 0, fmt.Errorf("read CPU time: %w", err)
	}
	// The second field is the command in parentheses, with whatever it has in it.
	text := string(stat)
	fields := strings.Fields(text[strings.LastIndexByte(text, ')')+1:])
	const utime, stime = 14 - 3, 15 - 3 // the third field is the first one here
	if len(fields) <= stime {
		return 0, fmt.Errorf("read CPU time: %d fields", len(fields))
	}
	var ticks int64
	for _, f := range []string{fields[utime], fields[stime]} {
		n, err := strconv.ParseInt(f, 10, 64)
		if err != nil {
			return 0, fmt.Errorf("read CPU time: %w", err)
		}
		ticks += n
	}
	return time.Duration(ticks) * tick, nil
}

// residentBytes is the memory that a process has now.
func residentBytes(pid int) (int64, error) {
	status, err := os.ReadFile(filepath.Join("/proc", strconv.Itoa(pid), "status"))
	if err != nil {
		return 0, fmt.Errorf("read memory: %w", err)
	}
	for line := range strings.Lines(string(status)) {
		if rest, ok := strings.CutPrefix(line, "VmRSS:"); ok {
			kib, err := strconv.ParseInt(strings.TrimSuffix(strings.TrimSpace(rest), " kB"), 10, 64)
			if err != nil {
				return 0, fmt.Errorf("read memory: %w", err)
			}
			return kib << 10, nil
		}
	}
	return 0, fmt.Errorf("read memory: no VmRSS")
}

func TestCPUTimeIsThatOfTheProcess(t *testing.T) {
	requireProc(t)
	before, err := cpuTime(os.Getpid())
	if err != nil {
		t.Fatal(err)
	}
	began := ownUsage()
	for ownUsage().cpu-began.cpu < 5*tick {
	}
	after, err := cpuTime(os.Getpid())
	if err != nil {
		t.Fatal(err)
	}
	own := ownUsage().cpu - began.cpu
	if got := after - before; got < 3*tick || got > own+2*tick {
		t.Errorf("/proc tells of %v, getrusage of %v", got, own)
	}
	rss, err := residentBytes(os.Getpid())
	if err != nil {
		t.Fatal(err)
	}
	if rss < 1<<20 || rss > 8<<30 {
		t.Errorf("%d bytes of memory", rss)
	}
}
