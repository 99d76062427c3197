package console

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"net/netip"
	"slices"
	"sync"
	"time"

	"google.golang.org/protobuf/proto"

	"github.com/kvcast/kvcast/internal/budget"
	kvcastv1 "github.com/kvcast/kvcast/proto/kvcast/v1"
	"github.com/kvcast/kvcast/server"
)

const (
	// pollInterval is the time between two answers of GetStatus and ListSubscribers.
	pollInterval = time.Second
	// pollTimeout bounds one poll, and writeTimeout one write to a page.
	pollTimeout  = 5 * time.Second
	writeTimeout = 10 * time.Second
)

// The methods whose answers are streamed.
const (
	getStatus       = kvcastv1.RouterEventService_GetStatus_FullMethodName
	listSubscribers = kvcastv1.RouterEventService_ListSubscribers_FullMethodName
	listWorkers     = kvcastv1.RouterEventService_ListWorkers_FullMethodName
)

// noRequest leaves a request empty.
func noRequest(proto.Message) error { return nil }

// workersEvery returns after how many polls ListWorkers is polled again. With a thousand workers, it is most of the cost.
func workersEvery(workers int) int {
	switch {
	case workers <= 64:
		return 1
	case workers <= 256:
		return 2
	}
	return 5
}

// The kinds of frames, in the order in which a page gets them.
const (
	frameAbout = iota
	frameStatus
	frameSubscribers
	frameWorkers

	numFrames
)

var frameNames = [numFrames]string{"about", "status", "subscribers", "workers"}

// frame is an event of the stream, as it is sent to all pages. A page that is slow gets the newest of each kind.
type frame struct {
	version uint64 // of the feed when it was set; 0: there is none yet
	text    []byte
}

// hub has the feed that all open pages share, while there are any.
type hub struct {
	cfg   Config
	tasks sync.WaitGroup // pages and feeds

	mu    sync.Mutex // guards all below
	pages []*page    // the oldest first
	feed  *feed      // nil while there are no pages
}

// page is an open page.
type page struct {
	*feed
	address netip.Prefix
	ended   chan struct{} // closed when another one takes its place
}

// feed polls the server until it is stopped.
type feed struct {
	cfg  Config
	stop context.CancelFunc

	mu      sync.Mutex // guards all below
	version uint64     // of the newest frame
	frames  [numFrames]frame
	changed chan struct{} // closed by the next frame

	// Only run uses these: the last answer of each kind, when it was given, and the number of workers in it.
	last    [numFrames][]byte
	polled  [numFrames]int64
	workers int
}

func newHub(cfg Config) *hub { return &hub{cfg: cfg} }

// join adds a page of an address; nil if there are too many pages. Then a new one takes the place of the oldest of the address with the most, unless its own
// would have as many.
func (h *hub) join(address netip.Prefix) *page {
	h.mu.Lock()
	defer h.mu.Unlock()
	if len(h.pages) == MaxPages && !h.displace(address) {
		return nil
	}
	h.tasks.Add(1)
	if h.feed == nil {
		ctx, cancel := context.WithCancel(context.Background())
		f := &feed{cfg: h.cfg, stop: cancel, changed: make(chan struct{})}
		h.feed = f
		h.tasks.Go(func() { f.run(ctx) })
	}
	p := &page{h.feed, address, make(chan struct{})}
	h.pages = append(h.pages, p)
	return p
}

// displace ends a page for a new one of an address, and reports whether there is one. The caller holds the lock.
func (h *hub) displace(address netip.Prefix) bool {
	victim := budget.Displaced(h.pages, func(p *page) netip.Prefix { return p.address }, address)
	if victim < 0 {
		return false
	}
	close(h.pages[victim].ended)
	h.pages = slices.Delete(h.pages, victim, victim+1)
	return true
}

// leave removes a page. The last page stops the feed.
func (h *hub) leave(p *page) {
	h.mu.Lock()
	defer h.mu.Unlock()
	if i := slices.Index(h.pages, p); i >= 0 {
		h.pages = slices.Delete(h.pages, i, i+1)
	}
	if len(h.pages) == 0 && h.feed == p.feed {
		h.feed.stop()
		h.feed = nil
	}
	h.tasks.Done()
}

func (h *hub) close() { h.tasks.Wait() }

// run polls the server until ctx ends.
func (f *feed) run(ctx context.Context) {
	if about, err := json.Marshal(f.cfg.About); err == nil {
		f.set(frameAbout, about)
	}
	ticker := time.NewTicker(pollInterval)
	defer ticker.Stop()
	for n := 0; ; n++ {
		f.poll(ctx, frameStatus, getStatus)
		f.poll(ctx, frameSubscribers, listSubscribers)
		if n%workersEvery(f.workers) == 0 {
			f.poll(ctx, frameWorkers, listWorkers)
		}
		select {
		case <-ticker.C:
		case <-ctx.Done():
			return
		}
	}
}

// poll calls a method, and makes its answer a frame: {"time": ..., "answer": ...}, in milliseconds since the Unix epoch, or
// with "error" in place of the answer. An answer that equals the last one makes no frame, except of the status: it also says
// when each method was last answered, "polled".
func (f *feed) poll(ctx context.Context, kind int, method string) {
	ctx, cancel := context.WithTimeout(ctx, pollTimeout)
	defer cancel()
	answer, err := f.cfg.Server.Call(ctx, method, server.Caller{Address: clientAddress("console"), Permitted: true}, noRequest)
	var text []byte
	if err == nil {
		if workers, ok := answer.(*kvcastv1.ListWorkersResponse); ok {
			f.workers = len(workers.GetWorkers())
		}
		text, err = encoding.Marshal(answer)
	}
	name := "answer"
	if err != nil {
		if text, err = json.Marshal(problemOf(err)); err != nil {
			return
		}
		name = "error"
	}
	f.polled[kind] = time.Now().UnixMilli()
	if kind != frameStatus && bytes.Equal(text, f.last[kind]) {
		return
	}
	f.last[kind] = text
	f.set(kind, fmt.Appendf(nil, `{"time":%d,"polled":{"workers":%d,"subscribers":%d},"%s":%s}`,
		f.polled[kind], f.polled[frameWorkers], f.polled[frameSubscribers], name, text))
}

// set sets the frame of a kind.
func (f *feed) set(kind int, data []byte) {
	text := fmt.Appendf(make([]byte, 0, len(data)+32), "event: %s\ndata: %s\n\n", frameNames[kind], data)
	f.mu.Lock()
	defer f.mu.Unlock()
	f.version++
	f.frames[kind] = frame{f.version, text}
	close(f.changed)
	f.changed = make(chan struct{})
}

// newer returns the frames that are newer than a version, the newest version, and a channel that is closed by the next frame.
func (f *feed) newer(than uint64) (all [][]byte, version uint64, changed <-chan struct{}) {
	f.mu.Lock()
	defer f.mu.Unlock()
	for _, frame := range f.frames {
		if frame.version > than {
			all = append(all, frame.text)
		}
	}
	return all, f.version, f.changed
}

// stream sends the frames of the feed to a page until it leaves, or does not read for writeTimeout.
func (c *Console) stream(w http.ResponseWriter, r *http.Request) {
	if !isJSON(r) {
		refuseContentType(w)
		return
	}
	control := http.NewResponseController(w)
	if _, err := c.cfg.Server.Call(r.Context(), getStatus, c.caller(r), noRequest); err != nil { // checks the caller
		writeStatus(w, err)
		return
	}
	err := control.SetReadDeadline(time.Now().Add(readTimeout))
	if err == nil {
		_, err = io.Copy(io.Discard, http.MaxBytesReader(w, r.Body, 1<<10))
	}
	if err == nil {
		err = control.SetReadDeadline(time.Time{})
	}
	if err != nil {
		writeError(w, http.StatusBadRequest, problem{Code: "invalid_argument", Message: "the request has a body that is slow or has more than 1 KiB: want {}"})
		return
	}
	p := c.hub.join(budget.ClientOf(r.RemoteAddr))
	if p == nil {
		writeError(w, http.StatusServiceUnavailable, problem{Code: "resource_exhausted",
			Message: fmt.Sprintf("%d pages are open, which is the limit; close one", MaxPages)})
		return
	}
	defer c.hub.leave(p)
	w.Header().Set("Content-Type", "text/event-stream")
	w.Header().Set("Cache-Control", "no-store")
	w.Header().Set("X-Accel-Buffering", "no") // a proxy must not keep the frames
	for version := uint64(0); ; {
		frames, newest, changed := p.newer(version)
		version = newest
		if err := control.SetWriteDeadline(time.Now().Add(writeTimeout)); err != nil {
			return
		}
		for _, text := range frames {
			if _, err := w.Write(text); err != nil {
				return
			}
		}
		if err := control.Flush(); err != nil {
			return
		}
		select {
		case <-changed:
		case <-p.ended:
			return
		case <-r.Context().Done():
			return
		}
	}
}
