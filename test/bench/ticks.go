package bench

/*
#include <errno.h>
#ifdef __linux__
#include <sys/timerfd.h>
#include <unistd.h>

static int ticks_open(long long ns) {
	struct itimerspec every = {{ns / 1000000000, ns % 1000000000}, {0, 1}};
	int fd = timerfd_create(CLOCK_MONOTONIC, TFD_NONBLOCK | TFD_CLOEXEC);
	if (fd >= 0 && timerfd_settime(fd, 0, &every, NULL) != 0) {
		int why = errno;
		close(fd);
		errno = why;
		return -1;
	}
	return fd;
}
#else
static int ticks_open(long long ns) {
	errno = ENOSYS;
	return -1;
}
#endif
*/
import "C"

import (
	"encoding/binary"
	"fmt"
	"os"
	"time"
)

// Ticks is a ticker with a precision of about 60 µs, the kernel's timer slack. time.Ticker rounds up to a millisecond in
// an idle program. Wait blocks in Go's scheduler; a pause in C would occupy a processor, and delay goroutines that wait
// for the network by up to 10 ms. Ticks requires Linux.
type Ticks struct {
	file    *os.File
	pending uint64 // ticks that have passed and not been returned
}

// NewTicks returns a ticker whose first tick is now. The caller closes it.
func NewTicks(every time.Duration) (*Ticks, error) {
	fd, err := C.ticks_open(C.longlong(every))
	if fd < 0 {
		return nil, fmt.Errorf("open timer: %w", err)
	}
	return &Ticks{file: os.NewFile(uintptr(fd), "timer")}, nil
}

// Wait waits for the next tick. A tick that has already passed is not skipped.
func (t *Ticks) Wait() error {
	var over [8]byte
	for t.pending == 0 {
		if _, err := t.file.Read(over[:]); err != nil {
			return fmt.Errorf("wait for timer: %w", err)
		}
		t.pending = binary.NativeEndian.Uint64(over[:])
	}
	t.pending--
	return nil
}

// Close releases the ticker.
func (t *Ticks) Close() error { return t.file.Close() }
