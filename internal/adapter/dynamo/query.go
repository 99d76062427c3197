package dynamo

import (
	"encoding/json"
	"net/http"
	"strconv"
	"sync"

	"github.com/kvcast/kvcast/internal/core/index"
	"github.com/kvcast/kvcast/internal/core/kvblock"
)

// workerKey is a dp rank of a worker.
type workerKey struct {
	WorkerID uint64 `json:"worker_id"`
	DPRank   uint32 `json:"dp_rank"`
}

// tierNames are the names of the tiers after the first, device.
var tierNames = [kvblock.NumTiers]string{1: "host_pinned", 2: "disk", 3: "external"}

// overlap is what a dp rank holds of a prompt. walk is index.Match.Walk.
type overlap struct {
	workerKey
	walk      [kvblock.NumTiers]int
	blockSize uint32
}

// overlaps has the matches of a request.
type overlaps struct {
	all       []overlap
	blockSize uint32 // of the partition
}

// tokens returns how many tokens of the prompt the rank holds in a tier and those before it, as index.Match.Walk counts them.
func (o *overlap) tokens(tier int) uint64 { return uint64(o.walk[tier]) * uint64(o.blockSize) }

// found is the memory of a match, for reuse.
var found = sync.Pool{New: func() any { return new(index.Matches) }}

// maxReusedBlocks bounds the prompts whose memory is kept for reuse.
const maxReusedBlocks = 16 << 10

// match finds the prefixes of a prompt that the workers of a model and a routing group hold.
func (h *handler) match(q *queryRequest, p index.Prompt, blocks int) (overlaps, error) {
	if *q.ModelName == "" { // all models, to the index
		return overlaps{}, noIndexer(q)
	}
	m := found.Get().(*index.Matches)
	if blocks <= maxReusedBlocks {
		defer found.Put(m)
	}
	h.index.Match(&index.Query{Model: *q.ModelName, Prompts: []index.Prompt{p}, Walk: true}, m)
	var result overlaps
	seen, names := make(map[workerKey]bool, len(m.Prompts[0])), make(map[uint64]string)
	for i := range m.Prompts[0] {
		f := &m.Prompts[0][i]
		id, ok := h.workerID(f.Worker, f.Labels)
		if !ok || h.group(f.Labels) != q.group() {
			continue
		}
		if other, ok := names[id]; ok && other != f.Worker {
			h.logShared(id, other, f.Worker)
		}
		names[id] = f.Worker
		key := workerKey{id, f.Rank}
		if seen[key] { // two workers with one id: the first has the longer prefix
			continue
		}
		seen[key] = true
		result.all = append(result.all, overlap{key, f.Walk, f.BlockSize})
		result.blockSize = f.BlockSize
	}
	if len(result.all) > 0 {
		return result, nil
	}
	part := h.partition(*q.ModelName, q.group())
	if part.workers == 0 {
		return overlaps{}, noIndexer(q)
	}
	result.blockSize = part.blockSize
	return result, nil
}

// noIndexer returns the error for a model and a routing group without workers. It has the beginnings of their names, since answers
// are not counted like bodies, and can have six bytes for one of a body.
func noIndexer(q *queryRequest) error {
	return failf(http.StatusNotFound, "no indexer for model=%.256s routing_group=%.256s", *q.ModelName, q.group())
}

func (h *handler) query(w http.ResponseWriter, r *http.Request) {
	q, err := readQuery(r, "token_ids")
	if err != nil {
		writeFailure(w, err)
		return
	}
	result, err := h.match(q, index.Prompt{TokenIDs: *q.TokenIDs, LoRA: text(q.LoRAName), Salt: text(q.CacheSalt)}, len(*q.TokenIDs))
	if err != nil {
		writeFailure(w, err)
		return
	}
	writeJSON(w, http.StatusOK, result.scores())
}

func (h *handler) queryByHash(w http.ResponseWriter, r *http.Request) {
	result, err := h.matchHashes(r)
	if err != nil {
		writeFailure(w, err)
		return
	}
	writeJSON(w, http.StatusOK, result.scores())
}

func (h *handler) queryTieredByHash(w http.ResponseWriter, r *http.Request) {
	result, err := h.matchHashes(r)
	if err != nil {
		writeFailure(w, err)
		return
	}
	writeJSON(w, http.StatusOK, result.tiered())
}

func (h *handler) matchHashes(r *http.Request) (overlaps, error) {
	q, err := readQuery(r, "block_hashes")
	if err != nil {
		return overlaps{}, err
	}
	if q.CacheSalt != nil {
		return overlaps{}, failf(http.StatusBadRequest, "cache_salt is not allowed with block_hashes, which already depend on it")
	}
	hashes := make([]uint64, len(*q.BlockHashes))
	for i, hash := range *q.BlockHashes {
		hashes[i] = uint64(hash)
	}
	return h.match(q, index.Prompt{TokensHashes: hashes}, len(hashes))
}

// scoreResponse is the answer of /query and /query_by_hash, in tokens. Frequencies are empty, as without the expiration
// of blocks.
type scoreResponse struct {
	Scores      map[string]map[string]uint64 `json:"scores"` // in the device tier, by worker id and dp rank
	Frequencies []int                        `json:"frequencies"`
	Instances   map[string]*instance         `json:"instances"` // by worker id
}

// instance is the longest prefix of all ranks of a worker. A tier counts with those before it.
type instance struct {
	LongestMatched uint64            `json:"longest_matched"`
	GPU            uint64            `json:"gpu"`
	DP             map[string]uint64 `json:"dp"` // device tier, by dp rank
	CPU            uint64            `json:"cpu"`
	Disk           uint64            `json:"disk"` // and external
}

func (o *overlaps) scores() scoreResponse {
	s := scoreResponse{Scores: make(map[string]map[string]uint64), Frequencies: []int{}, Instances: make(map[string]*instance)}
	for i := range o.all {
		f := &o.all[i]
		id, rank := strconv.FormatUint(f.WorkerID, 10), strconv.FormatUint(uint64(f.DPRank), 10)
		if f.walk[0] > 0 {
			if s.Scores[id] == nil {
				s.Scores[id] = make(map[string]uint64)
			}
			s.Scores[id][rank] = f.tokens(0)
		}
		in := s.Instances[id]
		if in == nil {
			in = &instance{DP: make(map[string]uint64)}
			s.Instances[id] = in
		}
		in.DP[rank] = f.tokens(0)
		in.GPU, in.CPU, in.Disk = max(in.GPU, f.tokens(0)), max(in.CPU, f.tokens(1)), max(in.Disk, f.tokens(kvblock.NumTiers-1))
		in.LongestMatched = max(in.LongestMatched, in.Disk)
	}
	return s
}

// tieredResponse is the answer of /query_tiered_by_hash, in blocks.
type tieredResponse struct {
	BlockSize uint32       `json:"block_size"`
	Tiered    tieredScores `json:"tiered"`
}

type tieredScores struct {
	Device struct {
		Scores      []pair `json:"scores"`
		Frequencies []int  `json:"frequencies"`
	} `json:"device"`
	LowerTier []pair `json:"lower_tier"` // of a tier's name and its hits
}

// hits are the blocks of a tier beyond those of the tiers before it.
type hits struct {
	Hits []pair `json:"hits"`
}

// pair is a list of two different elements.
type pair struct{ first, second any }

func (p pair) MarshalJSON() ([]byte, error) { return json.Marshal([2]any{p.first, p.second}) }

func (o *overlaps) tiered() tieredResponse {
	response := tieredResponse{BlockSize: o.blockSize}
	device := &response.Tiered.Device
	device.Scores, device.Frequencies, response.Tiered.LowerTier = []pair{}, []int{}, []pair{}
	for i := range o.all {
		if f := &o.all[i]; f.walk[0] > 0 {
			device.Scores = append(device.Scores, pair{f.workerKey, f.walk[0]})
		}
	}
	for tier := 1; tier < kvblock.NumTiers; tier++ {
		var in hits
		for i := range o.all {
			if f := &o.all[i]; f.walk[tier] > f.walk[tier-1] {
				in.Hits = append(in.Hits, pair{f.workerKey, f.walk[tier] - f.walk[tier-1]})
			}
		}
		if len(in.Hits) > 0 {
			response.Tiered.LowerTier = append(response.Tiered.LowerTier, pair{tierNames[tier], in})
		}
	}
	return response
}
