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

// Ticks is a clock that goes at a rate, to some 60 µs, which is what the kernel
// keeps; time.Ticker rounds up to a millisecond where nothing else runs. Who waits
// for it waits in Go's scheduler: in a pause in C, which holds a processor, others of
// the program that wait for the network may do so for 10 ms longer. It needs Linux.
type Ticks struct {
	file *os.File
	owed uint64
}

// NewTicks returns a clock whose first tick is now. It must be closed.
func NewTicks(every time.Duration) (*Ticks, error) {
	fd, err := C.ticks_open(C.longlong(every))
	if fd < 0 {
		return nil, fmt.Errorf("open timer: %w", err)
	}
	return &Ticks{file: os.NewFile(uintptr(fd), "timer")}, nil
}

// Wait waits for the next tick. One that is over already is not left out.
func (t *Ticks) Wait() error {
	var over [8]byte
	for t.owed == 0 {
		if _, err := t.file.Read(over[:]); err != nil {
			return fmt.Errorf("wait for timer: %w", err)
		}
		t.owed = binary.NativeEndian.Uint64(over[:])
	}
	t.owed--
	return nil
}

// Close ends it.
func (t *Ticks) Close() error { return t.file.Close() }
