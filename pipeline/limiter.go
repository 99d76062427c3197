package pipeline

import (
	"context"
	"slices"
	"sync"
	"time"
)

// maxCopies bounds the memory of copies of tables that are being read, all together;
// a copy of a table that is larger by itself is made alone. A million blocks take
// some 50 MB.
const maxCopies = 64 << 20

// limiter gives out bytes, up to a limit, in the order in which they are asked for:
// a large request is not overtaken for ever by small ones. Whoever asks waits, so
// many as there are snapshots being sent.
type limiter struct {
	limit int

	mu      sync.Mutex // guards all below
	given   int
	waiting []*ask
}

type ask struct {
	bytes   int
	granted chan struct{}
}

// fits tells whether so many bytes can be given now.
func (l *limiter) fits(bytes int) bool { return l.given == 0 || l.given+bytes <= l.limit }

// waitBeat is how often whoever waits for bytes is told that it does.
const waitBeat = time.Second

// take waits for so many bytes, until ctx is done, or until waiting, which it calls
// each waitBeat, returns false. Where it returns true, give has to give them back.
func (l *limiter) take(ctx context.Context, bytes int, waiting func() bool) bool {
	l.mu.Lock()
	if len(l.waiting) == 0 && l.fits(bytes) {
		l.given += bytes
		l.mu.Unlock()
		return true
	}
	a := &ask{bytes: bytes, granted: make(chan struct{})}
	l.waiting = append(l.waiting, a)
	l.mu.Unlock()
	beats := time.NewTicker(waitBeat)
	defer beats.Stop()
	for wanted := true; wanted; {
		select {
		case <-a.granted:
			return true
		case <-beats.C:
			wanted = waiting()
		case <-ctx.Done():
			wanted = false
		}
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	i := slices.Index(l.waiting, a)
	if i < 0 {
		return true // it was granted just now
	}
	l.waiting = slices.Delete(l.waiting, i, i+1)
	l.grant() // what is behind it may fit
	return false
}

// give gives bytes back.
func (l *limiter) give(bytes int) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.given -= bytes
	l.grant()
}

func (l *limiter) grant() {
	for len(l.waiting) > 0 && l.fits(l.waiting[0].bytes) {
		l.given += l.waiting[0].bytes
		close(l.waiting[0].granted)
		l.waiting = slices.Delete(l.waiting, 0, 1)
	}
}
