package main_test

import (
	"compress/gzip"
	"crypto/sha256"
	"encoding/binary"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"maps"
	"math"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"

	"github.com/tinylib/msgp/msgp"
)

// oracle derives the blocks of an engine's device tier independently of kvcast: with a
// generic decoder and plain counts. It supports only the forms in the recordings.
type oracle struct {
	// blockSize is the size of the blocks to count; 0 means any.
	blockSize int
	counts    map[uint64]int
	mainKind  map[any]bool // by attention group: whether its blocks count
}

func newOracle(blockSize int) *oracle {
	return &oracle{blockSize: blockSize, counts: make(map[uint64]int), mainKind: make(map[any]bool)}
}

// restart clears the oracle, as a restarted engine's cache is empty.
func (o *oracle) restart() { *o = *newOracle(o.blockSize) }

// apply applies a payload and returns its time. labels are the engine's labels of the events; empty means no labels.
func (o *oracle) apply(payload []byte, labels string) (ts float64, err error) {
	v, _, err := msgp.ReadIntfBytes(payload)
	if err != nil {
		return 0, err
	}
	var events []any
	switch b := v.(type) {
	case []any:
		ts, events = b[0].(float64), b[1].([]any)
	case map[string]any:
		ts, events = b["ts"].(float64), b["events"].([]any)
	default:
		return 0, fmt.Errorf("a batch of type %T", v)
	}
	if labels != "" && len(labels) != len(events) {
		return 0, fmt.Errorf("%d labels for %d events", len(labels), len(events))
	}
	for i, e := range events {
		if labels == "" || labels[i] != announced {
			o.event(e)
		}
	}
	return ts, nil
}

// announced is the label of a store that announces existing blocks.
const announced = 'a'

func (o *oracle) event(e any) {
	f := fields(e)
	if medium := f["medium"]; medium != nil && medium != "GPU" {
		return
	}
	switch f["type"] {
	case "AllBlocksCleared":
		clear(o.counts)
	case "BlockStored":
		if group, kind := f["group_idx"], f["kv_cache_spec_kind"]; kind != nil {
			o.mainKind[group] = kind == "full_attention"
		}
		if o.counted(f["group_idx"]) && (o.blockSize == 0 || fmt.Sprint(f["block_size"]) == strconv.Itoa(o.blockSize)) {
			for _, h := range f["block_hashes"].([]any) {
				o.counts[identity(h)]++
			}
		}
	case "BlockRemoved":
		if !o.counted(f["group_idx"]) {
			return
		}
		for _, h := range f["block_hashes"].([]any) {
			if id := identity(h); o.counts[id] > 1 {
				o.counts[id]--
			} else {
				delete(o.counts, id)
			}
		}
	}
}

func (o *oracle) counted(group any) bool {
	if group == nil {
		return true
	}
	known, ok := o.mainKind[group]
	return known || (!ok && fmt.Sprint(group) == "0")
}

// fields returns the fields of an event by name, for events in array and map form.
func fields(e any) map[string]any {
	if m, ok := e.(map[string]any); ok {
		return m
	}
	list := e.([]any)
	names := []string{"type", "block_hashes", "medium", "group_idx"}
	if list[0] == "BlockStored" {
		names = []string{
			"type", "block_hashes", "parent_block_hash", "token_ids", "block_size", "lora_id",
			"medium", "lora_name", "extra_keys", "group_idx", "kv_cache_spec_kind",
		}
	}
	m := make(map[string]any)
	for i := range min(len(list), len(names)) {
		m[names[i]] = list[i]
	}
	return m
}

// identity returns the 64 bits of a block hash.
func identity(h any) uint64 {
	switch v := h.(type) {
	case int64:
		return uint64(v)
	case uint64:
		return v
	case []byte:
		return binary.BigEndian.Uint64(v[len(v)-8:])
	}
	panic(fmt.Sprintf("a block hash of type %T", h))
}

func (o *oracle) blocks() map[uint64]struct{} {
	set := make(map[uint64]struct{}, len(o.counts))
	for h := range o.counts {
		set[h] = struct{}{}
	}
	return set
}

// engineTime returns the time of a batch in nanoseconds, as in entries. It keeps the precision of ts, unlike ts * 1e9.
func engineTime(ts float64) int64 {
	seconds := math.Floor(ts)
	return int64(seconds)*1e9 + int64(math.Round((ts-seconds)*1e9))
}

// checkpoint is a pool's report of its blocks after a batch.
type checkpoint struct {
	Incarnation int    `json:"incarnation"`
	AfterSeq    uint64 `json:"after_seq"`
	Len         int    `json:"len"`
	SHA256      string `json:"sha256"`
	Labels      string `json:"labels"`
}

// readCheckpoints reads the checkpoints and the block size of the only engine in oracle.json
// or oracle.json.gz.
func readCheckpoints(dir string) (_ []checkpoint, blockSize int, err error) {
	var r io.ReadCloser
	if r, err = os.Open(filepath.Join(dir, "oracle.json")); errors.Is(err, fs.ErrNotExist) {
		r, err = os.Open(filepath.Join(dir, "oracle.json.gz"))
	}
	if err != nil {
		return nil, 0, err
	}
	defer func() { _ = r.Close() }()
	if z, err := gzip.NewReader(r); err == nil {
		r = z
	} else if _, err := r.(*os.File).Seek(0, io.SeekStart); err != nil {
		return nil, 0, err
	}
	var o struct {
		BlockSize int `json:"block_size"`
		Engines   map[string]struct {
			Checkpoints []checkpoint `json:"checkpoints"`
		} `json:"engines"`
	}
	if err := json.NewDecoder(r).Decode(&o); err != nil {
		return nil, 0, fmt.Errorf("read oracle of %s: %w", dir, err)
	}
	for _, e := range o.Engines {
		return e.Checkpoints, o.BlockSize, nil
	}
	return nil, 0, fmt.Errorf("read oracle of %s: no engine", dir)
}

// digest returns a checkpoint's digest of a set of blocks.
func digest(blocks map[uint64]struct{}) string {
	ids := make([]string, 0, len(blocks))
	for _, h := range slices.Sorted(maps.Keys(blocks)) {
		ids = append(ids, strconv.FormatUint(h, 10))
	}
	sum := sha256.Sum256([]byte(strings.Join(ids, "\n")))
	return hex.EncodeToString(sum[:])
}
