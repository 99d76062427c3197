package process

import (
	"errors"
	"log/slog"
	"math"
	"runtime"
	"runtime/debug"

	"github.com/KimMachineGun/automemlimit/memlimit"
)

// memoryRatio is the share of the cgroup's memory that the Go runtime may use. The rest is for what the runtime does not
// count: the program itself, libzmq, and the kernel's buffers.
const memoryRatio = 0.9

// LimitMemory sets the soft memory limit of the Go runtime from the memory limit of the cgroup, so that garbage is
// collected more often near the limit, rather than the process killed. A limit in the variable GOMEMLIMIT stays.
// GOMAXPROCS follows the cgroup's CPU limit by default.
func LimitMemory(log *slog.Logger) {
	_, err := memlimit.Set(memlimit.WithRatio(memoryRatio))
	if err != nil && !errors.Is(err, memlimit.ErrNoCgroup) && !errors.Is(err, memlimit.ErrCgroupsNotSupported) {
		log.Warn("memory is not limited by the cgroup: its limit cannot be read; set GOMEMLIMIT", "error", err)
	}
	limit := slog.String("memory", "unlimited")
	if bytes := debug.SetMemoryLimit(-1); bytes != math.MaxInt64 {
		limit = slog.Int64("memory", bytes)
	}
	log.Info("limits of the Go runtime", limit, "cpus", runtime.GOMAXPROCS(0))
}
