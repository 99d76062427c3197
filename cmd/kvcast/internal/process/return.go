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
	// blockBytes is the memory of a block in pipeline and index.
	blockBytes = 90
)

// ReturnMemory returns memory that is not used any more to the operating system until ctx is done, such as after the workers of a deployment or
// a flood of large messages have gone. The runtime alone collects no garbage for two minutes if little is allocated, and returns memory slowly.
// blocks returns the number of blocks in the index.
func ReturnMemory(ctx context.Context, blocks func() uint64) {
	ticker := time.NewTicker(returnInterval)
	defer ticker.Stop()
	var r returner
	for {
		select {
		case <-ticker.C:
			if r.due(readMemory(blocks())) {
				debug.FreeOSMemory()
			}
		case <-ctx.Done():
			return
		}
	}
}

// memoryUse is what the Go runtime uses, in bytes.
type memoryUse struct {
	heap      uint64 // from the operating system, and not returned
	allocated uint64 // since the start of the process
	live      uint64 // after the last garbage collection
	cycles    uint64 // of garbage collection
	blocks    uint64 // of the index
}

func readMemory(blocks uint64) memoryUse {
	s := []metrics.Sample{
		{Name: "/memory/classes/heap/objects:bytes"}, {Name: "/memory/classes/heap/unused:bytes"}, {Name: "/memory/classes/heap/free:bytes"},
		{Name: "/gc/heap/allocs:bytes"}, {Name: "/gc/heap/live:bytes"}, {Name: "/gc/cycles/total:gc-cycles"},
	}
	metrics.Read(s)
	value := func(i int) uint64 { return s[i].Value.Uint64() }
	return memoryUse{heap: value(0) + value(1) + value(2), allocated: value(3), live: value(4), cycles: value(5), blocks: blocks}
}

// returner decides when memory is returned.
type returner struct {
	allocated uint64 // at the last look
	// cycles and blocks are those of the look after the last garbage collection.
	cycles, blocks uint64
}

// due reports whether much of the memory is unused, and little of it would be used again at once. It is called at intervals.
func (r *returner) due(u memoryUse) bool {
	allocated := u.allocated - r.allocated
	r.allocated = u.allocated
	if u.cycles != r.cycles {
		r.cycles, r.blocks = u.cycles, u.blocks
	}
	live := u.live
	if u.blocks < r.blocks {
		live -= min(live, (r.blocks-u.blocks)*blockBytes)
	}
	unused := u.heap - min(u.heap, live)
	return unused >= max(minReturned, live/4) && allocated < unused/16
}
