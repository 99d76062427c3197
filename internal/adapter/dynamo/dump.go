package dynamo

import (
	"bufio"
	"context"
	"encoding/json"
	"net/http"
	"time"

	"google.golang.org/protobuf/proto"

	"github.com/kvcast/kvcast/internal/core/index"
	"github.com/kvcast/kvcast/internal/core/kvblock"
	kvcastv1 "github.com/kvcast/kvcast/proto/kvcast/v1"
)

// routerEvent is an event of a dump.
type routerEvent struct {
	WorkerID    uint64    `json:"worker_id"`
	StorageTier string    `json:"storage_tier"`
	Event       tierEvent `json:"event"`
}

type tierEvent struct {
	EventID uint64    `json:"event_id"`
	Data    storeData `json:"data"`
	DPRank  uint32    `json:"dp_rank"`
}

type storeData struct {
	Stored stored `json:"stored"`
}

type stored struct {
	ParentHash    *uint64       `json:"parent_hash"`
	StartPosition *uint32       `json:"start_position"` // null
	Blocks        []storedBlock `json:"blocks"`
}

type storedBlock struct {
	BlockHash  uint64 `json:"block_hash"`
	TokensHash uint64 `json:"tokens_hash"`
}

// dump answers with the blocks of all workers, as events that store them. Blocks without content are left out.
func (h *handler) dump(w http.ResponseWriter, r *http.Request) {
	ctx, cancel := context.WithTimeout(r.Context(), dumpTimeout)
	defer cancel()
	_ = http.NewResponseController(w).SetReadDeadline(time.Time{}) // the request has been read
	w.Header().Set("Content-Type", "application/json")
	out := &dumper{Writer: bufio.NewWriterSize(&paced{w: w, control: http.NewResponseController(w), began: time.Now()}, 64<<10)}
	_ = out.WriteByte('{')
	workers, _ := h.index.Workers(nil)
	parts := make(map[string][]index.Worker)
	var keys []string
	for _, worker := range workers {
		if worker.Added.GetPool() {
			continue
		}
		key := worker.Model + ":" + h.group(worker.Added.GetLabels())
		if parts[key] == nil {
			keys = append(keys, key)
		}
		parts[key] = append(parts[key], worker)
	}
	for i, key := range keys {
		if i > 0 {
			_ = out.WriteByte(',')
		}
		if !h.dumpPartition(ctx, out, key, parts[key]) {
			panic(http.ErrAbortHandler) // the client must not take a part for the whole
		}
	}
	_ = out.WriteByte('}')
	_ = out.Flush()
}

// paced writes to a client that reads at least dumpPace bytes in each writeTimeout.
type paced struct {
	w       http.ResponseWriter
	control *http.ResponseController
	began   time.Time
	bytes   int
}

func (p *paced) Write(b []byte) (int, error) {
	p.bytes += len(b)
	allowed := time.Duration(float64(writeTimeout) * (1 + float64(p.bytes)/dumpPace))
	_ = p.control.SetWriteDeadline(p.began.Add(min(allowed, dumpTimeout))) // without one, a recorder in a test
	return p.w.Write(b)
}

// dumper writes JSON. Errors are those of bufio.Writer, which keeps them.
type dumper struct {
	*bufio.Writer
	events uint64
}

func (d *dumper) json(v any) {
	text, _ := json.Marshal(v) // no value here can fail
	_, _ = d.Write(text)
}

// dumpPartition writes a partition, and reports whether that was possible.
func (h *handler) dumpPartition(ctx context.Context, out *dumper, key string, workers []index.Worker) bool {
	out.json(key)
	_, _ = out.WriteString(`:{"block_size":`)
	out.json(h.partition(workers[0].Model, h.group(workers[0].Added.GetLabels())).blockSize)
	_, _ = out.WriteString(`,"events":[`)
	first := true
	for i := range workers {
		id, ok := h.workerID(workers[i].Name, workers[i].Added.GetLabels())
		if !ok {
			continue
		}
		s, ok := h.index.Snapshot(workers[i].Name)
		if !ok {
			continue
		}
		for piece := range s.Blocks(ctx, kvblock.AllEvents) {
			var blocks kvcastv1.SnapshotBlocks
			err := proto.Unmarshal(piece, &blocks)
			s.Reuse(piece)
			if err != nil {
				return false
			}
			for _, e := range blocks.GetEvents() {
				if len(e.GetStored().GetTokensHashes()) == 0 {
					continue
				}
				if !first {
					_ = out.WriteByte(',')
				}
				first = false
				out.json(event(id, out.events, e))
				out.events++
			}
			if out.Flush() != nil {
				return false
			}
		}
		if ctx.Err() != nil {
			return false
		}
	}
	_, _ = out.WriteString("]}")
	return true
}

func event(id, number uint64, e *kvcastv1.RouterEvent) routerEvent {
	tier := "device"
	if name := tierNames[e.GetTier()-1]; name != "" {
		tier = name
	}
	s := stored{ParentHash: e.GetStored().ParentHash, Blocks: make([]storedBlock, len(e.GetStored().GetBlockHashes()))}
	for i, hash := range e.GetStored().GetBlockHashes() {
		s.Blocks[i] = storedBlock{hash, e.GetStored().GetTokensHashes()[i]}
	}
	return routerEvent{id, tier, tierEvent{number, storeData{s}, e.GetDpRank()}}
}
