package pipeline

import (
	"context"
	"slices"
	"sync"
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

// take waits for so many bytes, or until ctx is done. Where it returns nil, give has
// to give them back.
func (b *budget) take(ctx context.Context, bytes int) error {
	b.mu.Lock()
	if len(b.waiting) == 0 && b.fits(bytes) {
		b.given += bytes
		b.mu.Unlock()
		return nil
	}
	a := &ask{bytes: bytes, granted: make(chan struct{})}
	b.waiting = append(b.waiting, a)
	b.mu.Unlock()
	select {
	case <-a.granted:
		return nil
	case <-ctx.Done():
	}
	b.mu.Lock()
	defer b.mu.Unlock()
	i := slices.Index(b.waiting, a)
	if i < 0 {
		return nil // it was granted just now
	}
	b.waiting = slices.Delete(b.waiting, i, i+1)
	b.grant() // what is behind it may fit
	return ctx.Err()
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
