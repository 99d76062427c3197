package harness

import (
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"time"
)

// CPUTick is the resolution of CPUTime, 1/USER_HZ s, which is the same on every Linux architecture
// that Go supports.
const CPUTick = 10 * time.Millisecond

// CPUTime returns the CPU time of a process, in user and system mode, over all its threads,
// including those that have ended. It reads /proc.
func CPUTime(pid int) (time.Duration, error) {
	stat, err := os.ReadFile(procFile(pid, "stat"))
	if err != nil {
		return 0, fmt.Errorf("read CPU time: %w", err)
	}
	// The second field is the command in parentheses, which may contain spaces.
	text := string(stat)
	fields := strings.Fields(text[strings.LastIndexByte(text, ')')+1:])
	const utime, stime = 14 - 3, 15 - 3 // stat(5) counts from 1, and the first field here is the third
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
	return time.Duration(ticks) * CPUTick, nil
}

// ResidentBytes returns the resident memory of a process. It reads /proc.
func ResidentBytes(pid int) (int64, error) {
	status, err := os.ReadFile(procFile(pid, "status"))
	if err != nil {
		return 0, fmt.Errorf("read resident memory: %w", err)
	}
	for line := range strings.Lines(string(status)) {
		var kib int64
		if _, err := fmt.Sscanf(line, "VmRSS: %d kB", &kib); err == nil {
			return kib << 10, nil
		}
	}
	return 0, fmt.Errorf("read resident memory: %s has no VmRSS", procFile(pid, "status"))
}

// Descriptors returns the number of open file descriptors of a process, and how many of them are
// sockets. It reads /proc.
func Descriptors(pid int) (all, sockets int, err error) {
	dir := procFile(pid, "fd")
	entries, err := os.ReadDir(dir)
	if err != nil {
		return 0, 0, fmt.Errorf("count descriptors: %w", err)
	}
	for _, entry := range entries {
		target, err := os.Readlink(filepath.Join(dir, entry.Name()))
		if err != nil {
			continue // closed in the meantime
		}
		all++
		if strings.HasPrefix(target, "socket:") {
			sockets++
		}
	}
	return all, sockets, nil
}

func procFile(pid int, name string) string {
	return filepath.Join("/proc", strconv.Itoa(pid), name)
}
