package dynamo

import (
	"net/http"
	"strconv"

	"github.com/kvcast/kvcast/internal/core/index"
)

// workerID returns the id of a worker: that of its label, or of the configuration, or its name if that is a number.
func (h *handler) workerID(name string, labels map[string]string) (uint64, bool) {
	if value := labels[h.cfg.WorkerIDLabel]; h.cfg.WorkerIDLabel != "" && value != "" {
		if id, err := strconv.ParseUint(value, 10, 64); err == nil {
			return id, true
		}
	}
	if id, ok := h.cfg.WorkerIDs[name]; ok {
		return id, true
	}
	id, err := strconv.ParseUint(name, 10, 64)
	if err != nil && h.unknown.IsNew(name) {
		h.cfg.Logger.Warn("worker is left out of answers to Dynamo, because it has no id: set it under egress.dynamo.worker_ids, or as a label",
			"worker", name, "label", h.cfg.WorkerIDLabel)
	}
	return id, err == nil
}

// logShared logs once that two workers have one id.
func (h *handler) logShared(id uint64, a, b string) {
	if h.shared.IsNew(strconv.FormatUint(id, 10)) {
		h.cfg.Logger.Warn("two workers have one id, and answers to Dynamo have the longer prefix of both: give each an id of its own, under egress.dynamo.worker_ids or as a label",
			"id", id, "worker", a, "other", b, "label", h.cfg.WorkerIDLabel)
	}
}

func (h *handler) group(labels map[string]string) string {
	if value := labels[h.cfg.GroupLabel]; h.cfg.GroupLabel != "" && value != "" {
		return value
	}
	return DefaultGroup
}

// partition is the workers of a model and a routing group.
type partition struct {
	workers   int
	blockSize uint32 // of most of them
}

func (h *handler) partition(model, group string) (p partition) {
	sizes := make(map[uint32]int)
	h.index.EachWorker(model, func(labels map[string]string, blockSize uint32) {
		if h.group(labels) == group {
			p.workers++
			sizes[blockSize]++
		}
	})
	for size, n := range sizes {
		if size != 0 && (p.blockSize == 0 || n > sizes[p.blockSize] || n == sizes[p.blockSize] && size < p.blockSize) {
			p.blockSize = size
		}
	}
	return p
}

// workerInfo is an element of the answer of /workers.
type workerInfo struct {
	InstanceID   uint64                `json:"instance_id"`
	Source       string                `json:"source"`
	Status       string                `json:"status"`
	ModelName    string                `json:"model_name"`
	RoutingGroup string                `json:"routing_group"`
	BlockSize    uint32                `json:"block_size"`
	Endpoints    map[string]string     `json:"endpoints"` // by dp rank
	Listeners    map[string]rankStatus `json:"listeners"` // by dp rank
}

type rankStatus struct {
	Endpoint string `json:"endpoint"`
	Status   string `json:"status"`
	// LastError says why the rank's blocks may differ from the engine's.
	LastError string `json:"last_error,omitempty"`
}

// The statuses of workers and ranks. A rank whose blocks may differ from the engine's is pending.
const (
	statusActive  = "active"
	statusPending = "pending"
)

func (h *handler) workers(w http.ResponseWriter, r *http.Request) {
	all := []workerInfo{}
	params := r.URL.Query()
	workers, _ := h.index.Workers(func(_, model string) bool { return !params.Has("model_name") || model == params.Get("model_name") })
	for i := range workers {
		worker := &workers[i]
		if worker.Added.GetPool() {
			continue
		}
		labels := worker.Added.GetLabels()
		id, ok := h.workerID(worker.Name, labels)
		if !ok || params.Has("routing_group") && h.group(labels) != params.Get("routing_group") {
			continue
		}
		all = append(all, info(worker, id, h.group(labels)))
	}
	writeJSON(w, http.StatusOK, all)
}

func info(w *index.Worker, id uint64, group string) workerInfo {
	in := workerInfo{
		InstanceID: id, Source: "zmq", Status: statusActive, ModelName: w.Model, RoutingGroup: group, BlockSize: w.BlockSize,
		Endpoints: make(map[string]string), Listeners: make(map[string]rankStatus),
	}
	for _, r := range w.Ranks {
		rank := strconv.FormatUint(uint64(r.Rank), 10)
		s := rankStatus{Endpoint: w.Added.GetEndpoint(), Status: statusActive}
		for reason := range r.Reasons.All() {
			s.Status, s.LastError = statusPending, reason.String()
			in.Status = statusPending
		}
		in.Endpoints[rank], in.Listeners[rank] = s.Endpoint, s
	}
	return in
}
