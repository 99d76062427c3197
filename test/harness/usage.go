package harness

import (
	"fmt"
	"strings"
	"time"

	"github.com/prometheus/procfs"
)

// CPUTick is the resolution of CPUTime, 1/USER_HZ s, which is the same on every Linux architecture
// that Go supports.
const CPUTick = 10 * time.Millisecond

// CPUTime returns the CPU time of a process, in user and system mode, over all its threads,
// including threads that have ended. It reads /proc.
func CPUTime(pid int) (time.Duration, error) {
	stat, err := procStat(pid)
	if err != nil {
		return 0, fmt.Errorf("read CPU time: %w", err)
	}
	return time.Duration(stat.UTime+stat.STime) * CPUTick, nil
}

// ResidentBytes returns the resident memory of a process. It reads /proc.
func ResidentBytes(pid int) (int64, error) {
	stat, err := procStat(pid)
	if err != nil {
		return 0, fmt.Errorf("read resident memory: %w", err)
	}
	return int64(stat.ResidentMemory()), nil
}

// PeakResidentBytes returns the most resident memory that a process has had. It reads /proc.
func PeakResidentBytes(pid int) (int64, error) {
	p, err := procfs.NewProc(pid)
	if err == nil {
		var status procfs.ProcStatus
		if status, err = p.NewStatus(); err == nil {
			return int64(status.VmHWM), nil
		}
	}
	return 0, fmt.Errorf("read peak of resident memory: %w", err)
}

// Threads returns the number of threads of a process. It reads /proc.
func Threads(pid int) (int, error) {
	stat, err := procStat(pid)
	if err != nil {
		return 0, fmt.Errorf("count threads: %w", err)
	}
	return stat.NumThreads, nil
}

func procStat(pid int) (procfs.ProcStat, error) {
	p, err := procfs.NewProc(pid)
	if err != nil {
		return procfs.ProcStat{}, err
	}
	return p.Stat()
}

// Descriptors returns the number of open file descriptors of a process, and how many of them are
// sockets. It reads /proc.
func Descriptors(pid int) (all, sockets int, err error) {
	p, err := procfs.NewProc(pid)
	if err != nil {
		return 0, 0, fmt.Errorf("count descriptors: %w", err)
	}
	targets, err := p.FileDescriptorTargets()
	if err != nil {
		return 0, 0, fmt.Errorf("count descriptors: %w", err)
	}
	for _, target := range targets {
		if strings.HasPrefix(target, "socket:") {
			sockets++
		}
	}
	return len(targets), sockets, nil
}
