package serve

import (
	"context"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/kvcast/kvcast/ingest"
)

func TestStartWaitsForEngines(t *testing.T) {
	const connecting, catchingUp, live = ingest.SourceConnecting, ingest.SourceCatchingUp, ingest.SourceLive
	type sources = []ingest.SourceState
	type step struct {
		at  time.Duration
		are sources
	}
	const (
		never         = time.Hour
		discoveryWait = 5 * time.Minute
	)
	for _, tt := range []struct {
		name       string
		wait       time.Duration
		discovered time.Duration
		steps      []step // from the first, which is at 0
		want       time.Duration
		gaveUp     unread
	}{
		{"no engines", 5 * time.Second, 0, nil, 0, unread{}},
		{"all are live", 5 * time.Second, 0, []step{{0, sources{live, live}}}, 0, unread{}},
		{"one is silent, one is being repaired", 5 * time.Second, 0, []step{{0, sources{ingest.SourceSuspect, ingest.SourceRepairing}}}, 0, unread{}},
		{"they become live", 5 * time.Second, 0, []step{{0, sources{connecting, connecting}}, {time.Second, sources{live, catchingUp}}, {3 * time.Second, sources{live, live}}}, 3 * time.Second, unread{}},
		{"an engine is unreachable", 5 * time.Second, 0, []step{{0, sources{connecting, live}}}, 5 * time.Second, unread{connecting: 1}},
		{"catching up takes longer than the wait", 5 * time.Second, 0, []step{{0, sources{catchingUp, connecting}}, {9 * time.Second, sources{live, connecting}}}, 9 * time.Second, unread{connecting: 1}},
		{"catching up does not end", 5 * time.Second, 0, []step{{0, sources{catchingUp}}}, catchUpTimeout, unread{catchingUp: 1}},
		{"no wait", 0, 0, []step{{0, sources{catchingUp, connecting}}}, 0, unread{connecting: 1, catchingUp: 1}},
		{"discovery finds some", 5 * time.Second, 2 * time.Second, []step{{0, nil}, {time.Second, sources{catchingUp}}, {4 * time.Second, sources{live}}}, 4 * time.Second, unread{}},
		{"discovery works late", 5 * time.Second, 100 * time.Second, []step{{0, nil}, {99 * time.Second, sources{connecting}}}, 105 * time.Second, unread{connecting: 1}},
		{"discovery takes too long", 5 * time.Second, never, []step{{0, sources{live}}}, discoveryWait, unread{undiscovered: true}},
		{"discovery takes too long, and no wait", 0, never, []step{{0, sources{connecting}}}, discoveryWait, unread{undiscovered: true, connecting: 1}},
	} {
		t.Run(tt.name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				ctx, cancel := context.WithCancel(t.Context())
				defer cancel()
				var now atomic.Pointer[sources]
				began, discovered := time.Now(), make(chan struct{})
				now.Store(&sources{})
				for _, s := range tt.steps {
					if s.at == 0 {
						now.Store(&s.are)
						continue
					}
					time.AfterFunc(s.at, func() { now.Store(&s.are) })
				}
				if tt.discovered == 0 {
					close(discovered)
				} else {
					time.AfterFunc(tt.discovered, func() { close(discovered) })
				}
				gaveUp, ok := startup{wait: tt.wait, discovered: discovered, discoveryWait: discoveryWait, sources: func() (all []ingest.SourceStatus) {
					for _, s := range *now.Load() {
						all = append(all, ingest.SourceStatus{State: s})
					}
					return all
				}}.run(ctx)
				if took := time.Since(began); took < tt.want || took > tt.want+2*startPollInterval || gaveUp != tt.gaveUp || !ok {
					t.Errorf("served after %v without %+v (%v); want %v and %+v", took, gaveUp, ok, tt.want, tt.gaveUp)
				}
			})
		})
	}
}

func TestStartEndsWithItsContext(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		for _, discovered := range []chan struct{}{make(chan struct{}), nil} {
			if discovered != nil {
				close(discovered)
			}
			ctx, cancel := context.WithTimeout(t.Context(), time.Second)
			defer cancel()
			_, ok := startup{wait: time.Minute, discovered: discovered, sources: func() []ingest.SourceStatus {
				return []ingest.SourceStatus{{State: ingest.SourceConnecting}}
			}}.run(ctx)
			if ok {
				t.Error("got true after the context ended")
			}
		}
	})
}
