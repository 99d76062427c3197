package enginehttp_test

import (
	"context"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"runtime"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/kvcast/kvcast/ingest/config"
	"github.com/kvcast/kvcast/internal/core/testclass"
	"github.com/kvcast/kvcast/internal/discovery/enginehttp"
	"github.com/kvcast/kvcast/internal/feed"
)

// TestSlowEnginesDelayNoOther asks an engine beside many that never answer.
func TestSlowEnginesDelayNoOther(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		defer enginehttp.SetTransport(func(r *http.Request) (*http.Response, error) {
			if r.URL.Hostname() != "honest" {
				<-r.Context().Done()
				return nil, r.Context().Err()
			}
			answer := httptest.NewRecorder()
			if r.URL.Path == "/kv_event_sources" {
				_, _ = answer.WriteString(`{"0": ` + vllm("tcp://*:6000", "null") + `}`)
			} else {
				http.NotFound(answer, r)
			}
			return answer.Result(), nil
		})()
		asker := &enginehttp.Asker{Find: func(context.Context) (all []config.Worker, _ error) {
			for i := range 200 {
				all = append(all, config.Worker{Name: fmt.Sprint(i), HTTP: fmt.Sprintf("http://slow-%d:8000", i), Sources: []config.Source{{Engine: feed.EngineVLLM}}})
			}
			return append(all, config.Worker{Name: "honest", HTTP: "http://honest:8000", Sources: []config.Source{{Engine: feed.EngineVLLM, Connect: "tcp://honest:5557"}}}), nil
		}}
		ctx, cancel := context.WithCancel(t.Context())
		done := make(chan struct{})
		go func() { defer close(done); asker.FollowAsked(ctx, func() {}) }()
		defer func() { cancel(); <-done }()
		began := time.Now()
		found, _ := asker.FindAsked(ctx) // the error is of the others
		if took := time.Since(began); len(found) != 1 || took > 0 {
			t.Errorf("found %d workers after %v, want the one whose engine answers at once", len(found), took)
		}
	})
}

// TestAnswersTakeNoMoreMemoryThanTheirText decodes answers that are as large as they may be, of many small values.
func TestAnswersTakeNoMoreMemoryThanTheirText(t *testing.T) {
	testclass.WithoutRace(t)
	const size = 4<<20 - 100
	var ranks strings.Builder
	for i := 0; ranks.Len() < size-10; i++ {
		fmt.Fprintf(&ranks, `,"%d":{}`, i)
	}
	for name, body := range map[string]string{
		"ranks": "{" + ranks.String()[1:] + "}",
		"lists": `{"x":` + strings.Repeat("[", 1000) + strings.Repeat("],[", size/3-2000) + "]", // no JSON
		"array": `{"kv_events":[` + strings.Repeat("{},", size/3-10) + "{}]}",
	} {
		for _, engine := range []feed.Engine{feed.EngineVLLM, feed.EngineSGLang} {
			t.Run(name+" of "+string(engine), func(t *testing.T) {
				defer enginehttp.SetTransport(func(r *http.Request) (*http.Response, error) {
					return &http.Response{StatusCode: http.StatusOK, Request: r, Body: io.NopCloser(strings.NewReader(body))}, nil
				})()
				var before, after runtime.MemStats
				runtime.ReadMemStats(&before)
				w := config.Worker{Name: "w", HTTP: "http://engine:8000", Sources: []config.Source{{Engine: engine, Connect: "tcp://engine:5557"}}}
				if _, reported, err := enginehttp.Ask(t.Context(), w); reported || err == nil && engine == feed.EngineVLLM {
					t.Errorf("reported %t, error %v", reported, err)
				}
				runtime.ReadMemStats(&after)
				// Reading it takes six times its size, since a buffer grows.
				if bytes := after.TotalAlloc - before.TotalAlloc; bytes > 10*uint64(len(body)) {
					t.Errorf("%d MiB allocated for %d MiB", bytes>>20, len(body)>>20)
				}
			})
		}
	}
}
