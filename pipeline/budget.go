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

// budget gives out bytes, up to a limit, in the order in which they are asked for:
// a large request is not overtaken for ever by small ones. Whoever asks waits, so
// many as there are snapshots being sent.
type budget struct {
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
func (b *budget) fits(bytes int) bool { return b.given == 0 || b.given+bytes <= b.limit }

// waitBeat is how often whoever waits for bytes is told that it does.
const waitBeat = time.Second

// take waits for so many bytes, until ctx is done, or until waiting, which it calls
// each waitBeat, returns false. Where it returns true, give has to give them back.
func (b *budget) take(ctx context.Context, bytes int, waiting func() bool) bool {
	b.mu.Lock()
	if len(b.waiting) == 0 && b.fits(bytes) {
		b.given += bytes
		b.mu.Unlock()
		return true
	}
	a := &ask{bytes: bytes, granted: make(chan struct{})}
	b.waiting = append(b.waiting, a)
	b.mu.Unlock()
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
	b.mu.Lock()
	defer b.mu.Unlock()
	i := slices.Index(b.waiting, a)
	if i < 0 {
		return true // it was granted just now
	}
	b.waiting = slices.Delete(b.waiting, i, i+1)
	b.grant() // what is behind it may fit
	return false
}

// give gives bytes back.
func (b *budget) give(bytes int) {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.given -= bytes
	b.grant()
}

func (b *budget) grant() {
	for len(b.waiting) > 0 && b.fits(b.waiting[0].bytes) {
		b.given += b.waiting[0].bytes
		close(b.waiting[0].granted)
		b.waiting = slices.Delete(b.waiting, 0, 1)
	}
}
