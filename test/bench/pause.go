package bench

/*
#include <errno.h>
#include <time.h>

static void pause_for(long long ns) {
	struct timespec left = {ns / 1000000000, ns % 1000000000};
	while (nanosleep(&left, &left) != 0 && errno == EINTR) {
	}
}
*/
import "C"

import "time"

// Pause sleeps with a precision of about 60 µs, the kernel's timer slack, and blocks the goroutine's thread. time.Sleep
// rounds up to a millisecond in an idle program.
func Pause(d time.Duration) {
	if d > 0 {
		C.pause_for(C.longlong(d))
	}
}
