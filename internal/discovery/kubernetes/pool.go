package kubernetes

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"sync"
	"time"

	"k8s.io/apimachinery/pkg/labels"

	"github.com/kvcast/kvcast/ingest/config"
)

// PoolSpec is what an InferencePool of the Gateway API Inference Extension, version v1, says of its pods.
type PoolSpec struct {
	// Labels select the pods.
	Labels map[string]string
	// Port is the first port of requests; 0: none.
	Port int
}

func (s PoolSpec) equal(o PoolSpec) bool { return s.Port == o.Port && maps.Equal(s.Labels, o.Labels) }

// poolPath is the path of the InferencePools of a namespace at an API server.
const poolPath = "/apis/inference.networking.k8s.io/v1/namespaces/%s/inferencepools/%s"

// maxPoolBytes bounds the object of a pool.
const maxPoolBytes = 1 << 20

// Pool reads an InferencePool.
func (c *Client) Pool(ctx context.Context, namespace, name string) (PoolSpec, error) {
	b, err := c.rest.Get().AbsPath(fmt.Sprintf(poolPath, namespace, name)).SetHeader("Accept", "application/json").Do(ctx).Raw()
	if err != nil {
		return PoolSpec{}, fmt.Errorf("read InferencePool %s/%s (inference.networking.k8s.io/v1): %w", namespace, name, err)
	}
	spec, err := parsePool(b)
	if err != nil {
		return PoolSpec{}, fmt.Errorf("InferencePool %s/%s: %w", namespace, name, err)
	}
	return spec, nil
}

func parsePool(b []byte) (PoolSpec, error) {
	var object struct {
		Spec struct {
			Selector    struct{ MatchLabels map[string]string }
			TargetPorts []struct{ Number int }
		}
	}
	if len(b) > maxPoolBytes {
		return PoolSpec{}, fmt.Errorf("%d bytes are too many: want at most %d", len(b), maxPoolBytes)
	}
	if err := json.Unmarshal(b, &object); err != nil {
		return PoolSpec{}, fmt.Errorf("decode: %w", err)
	}
	spec := PoolSpec{Labels: object.Spec.Selector.MatchLabels}
	if len(spec.Labels) == 0 {
		return PoolSpec{}, fmt.Errorf("spec.selector.matchLabels is empty: want the labels of the pods")
	}
	if _, err := labels.ValidatedSelectorFromSet(spec.Labels); err != nil {
		return PoolSpec{}, fmt.Errorf("spec.selector.matchLabels: %w", err)
	}
	if ports := object.Spec.TargetPorts; len(ports) > 0 {
		if spec.Port = ports[0].Number; spec.Port < 1 || spec.Port > 65535 {
			return PoolSpec{}, fmt.Errorf("spec.targetPorts[0].number: %d is not allowed: want 1 to 65535", spec.Port)
		}
	}
	return spec, nil
}

// DefaultPoolInterval is the default of Pool.Interval.
const DefaultPoolInterval = 10 * time.Second

// Pool finds the engines among the pods of an InferencePool. Follow must run while Find is called. If the pool cannot be read any more, or is deleted, what
// it said last holds.
type Pool struct {
	// Get reads the pool: Client.Pool.
	Get func(context.Context) (PoolSpec, error)
	// Source returns the source of the pods that a pool selects, without Open.
	Source func(PoolSpec) *Source
	// Interval is the time between two reads of the pool; 0 means DefaultPoolInterval.
	Interval time.Duration
	// Logger is optional.
	Logger *slog.Logger

	mu       sync.Mutex      // guards all below
	source   *Source         // of the last spec; nil: none was read
	followed context.Context // ends when the source is replaced
	err      error           // of the last read
	read     chan struct{}   // closed after the first read
}

// Open prepares the Pool for Follow and Find, and returns it.
func (p *Pool) Open() *Pool {
	p.Interval = cmp.Or(p.Interval, DefaultPoolInterval)
	if p.Logger == nil {
		p.Logger = slog.New(slog.DiscardHandler)
	}
	p.read = make(chan struct{})
	return p
}

// Follow keeps what Find returns up to date until ctx is done. It calls changed after each change.
func (p *Pool) Follow(ctx context.Context, changed func()) {
	var last PoolSpec
	end := func() {} // ends the source and waits for it
	defer func() { end() }()
	for first := true; ; first = false {
		spec, err := p.Get(ctx)
		if ctx.Err() != nil {
			return
		}
		if err == nil && (p.current() == nil || !spec.equal(last)) {
			end()
			last, end = spec, p.follow(ctx, spec, changed)
		}
		if p.note(err, first) {
			changed()
		}
		select {
		case <-time.After(p.Interval):
		case <-ctx.Done():
			return
		}
	}
}

// follow replaces the source by one for a spec, which is followed until end is called. end waits until it has ended.
func (p *Pool) follow(ctx context.Context, spec PoolSpec, changed func()) (end func()) {
	source := p.Source(spec).Open()
	ctx, cancel := context.WithCancel(ctx)
	done := make(chan struct{})
	go func() {
		defer close(done)
		source.Follow(ctx, changed)
	}()
	p.mu.Lock()
	defer p.mu.Unlock()
	p.source, p.followed = source, ctx
	return func() {
		cancel()
		<-done
	}
}

func (p *Pool) current() *Source {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.source
}

// note notes the result of a read, and reports whether Find may return something else now.
func (p *Pool) note(err error, first bool) (changed bool) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if first {
		close(p.read)
	}
	if err != nil && p.err == nil && p.source != nil {
		p.Logger.Warn("the pool cannot be read: its pods are found as before", "error", err)
	}
	changed = (err == nil) != (p.err == nil) && p.source == nil || first
	p.err = err
	return changed
}

// Find returns the workers of the pool, as Source.Find does. It waits for the first read of the pool.
func (p *Pool) Find(ctx context.Context) ([]config.Worker, error) {
	select {
	case <-p.read:
	case <-ctx.Done():
		return nil, ctx.Err()
	}
	p.mu.Lock()
	source, followed, err := p.source, p.followed, p.err
	p.mu.Unlock()
	if source == nil {
		return nil, err
	}
	// A source that is replaced before its first list would never answer. There is another call soon, since the next one calls changed.
	finding, cancel := context.WithCancel(ctx)
	defer cancel()
	defer context.AfterFunc(followed, cancel)()
	workers, err := source.Find(finding)
	if err != nil && ctx.Err() == nil && followed.Err() != nil {
		return nil, errors.New("the pool has changed, and its pods are not listed yet")
	}
	return workers, err
}
