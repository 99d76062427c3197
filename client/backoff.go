package client

import (
	"math/rand/v2"
	"time"
)

// backoff is how long to wait before the next stream.
type backoff struct {
	least, most time.Duration
	failures    int
}

// next returns the wait after one more failure. A server that asks for a longer
// one gets it, and up to a quarter on top: it asks many.
func (b *backoff) next(asked time.Duration) time.Duration {
	wait := b.least
	for range b.failures {
		if wait *= 2; wait >= b.most {
			wait = b.most
			break
		}
	}
	b.failures++
	wait -= upTo(wait / 2)
	if asked = min(asked, MaxRetryDelay); asked > 0 {
		wait = max(wait, asked+upTo(asked/4))
	}
	return wait
}

// reset forgets all failures.
func (b *backoff) reset() { b.failures = 0 }

func upTo(d time.Duration) time.Duration {
	if d <= 0 {
		return 0
	}
	return time.Duration(rand.Int64N(int64(d) + 1))
}
