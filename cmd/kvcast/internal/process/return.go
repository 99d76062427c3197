package process

import (
	"context"
	"runtime/debug"
	"runtime/metrics"
	"time"
)

const (
	// returnInterval is the time between two looks at the memory.
	returnInterval = 10 * time.Second
	// minReturned is the least memory in bytes whose return is worth a garbage collection.
	minReturned = 64 << 20
)

// ReturnMemory returns memory that is not used any more to the operating system until ctx is done, such as after the workers of a deployment or
// a flood of large messages have gone. The runtime alone collects no garbage for two minutes if little is allocated, and returns memory slowly.
func ReturnMemory(ctx context.Context) {
	ticker := time.NewTicker(returnInterval)
	defer ticker.Stop()
	r := newReturner(readMemory())
	for {
		select {
		case <-ticker.C:
			if r.due(readMemory()) {
				debug.FreeOSMemory()
				r.returned(readMemory())
			}
		case <-ctx.Done():
			return
		}
	}
}

// memoryUse is what the Go runtime uses, in bytes.
type memoryUse struct {
	kept      uint64 // from the operating system, and not returned
	allocated uint64 // since the start of the process
}

func readMemory() memoryUse {
	s := []metrics.Sample{
		{Name: "/memory/classes/total:bytes"}, {Name: "/memory/classes/heap/released:bytes"}, {Name: "/gc/heap/allocs:bytes"},
	}
	metrics.Read(s)
	return memoryUse{kept: s[0].Value.Uint64() - s[1].Value.Uint64(), allocated: s[2].Value.Uint64()}
}

// returner decides when memory is returned.
type returner struct {
	last  memoryUse
	least uint64 // memoryUse.kept since the last return, or since the start
}

func newReturner(u memoryUse) returner { return returner{u, u.kept} }

// due reports whether much of the memory may be unused, and little of it would be used again at once. It is called at intervals.
func (r *returner) due(u memoryUse) bool {
	allocated := u.allocated - r.last.allocated
	r.last, r.least = u, min(u.kept, r.least)
	excess := u.kept - r.least
	return excess >= max(minReturned, r.least/4) && allocated < excess/16
}

// returned records the memory that is kept after a return.
func (r *returner) returned(u memoryUse) { r.last, r.least = u, u.kept }
