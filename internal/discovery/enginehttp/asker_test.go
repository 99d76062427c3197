package enginehttp_test

import (
	"context"
	"errors"
	"log/slog"
	"net/http"
	"net/http/httptest"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/kvcast/kvcast/ingest/config"
	"github.com/kvcast/kvcast/internal/discovery"
	"github.com/kvcast/kvcast/internal/discovery/enginehttp"
	"github.com/kvcast/kvcast/internal/feed"
	"github.com/kvcast/kvcast/test/harness"
)

// workerChanges has what a watch adds and removes.
type workerChanges chan string

func (c workerChanges) AddWorker(_ context.Context, w config.Worker) error {
	c <- "add " + w.Name + " " + w.Sources[0].Connect
	return nil
}

func (c workerChanges) RemoveWorker(_ context.Context, name string, _ feed.RemoveReason) error {
	c <- "remove " + name
	return nil
}

// TestEnginesAreAskedUntilTheyAnswer follows an engine that is not ready at first, and then is no longer found, beside one
// that never answers and a worker without a URL.
func TestEnginesAreAskedUntilTheyAnswer(t *testing.T) {
	t.Parallel()
	ctx := harness.Context(t)
	var requests atomic.Int32
	engine := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		if requests.Add(1) == 1 {
			w.WriteHeader(http.StatusServiceUnavailable)
			return
		}
		_, _ = w.Write([]byte(`{"0": ` + vllm("tcp://*:6000", "null") + `}`))
	}))
	defer engine.Close()
	hanging := httptest.NewServer(http.HandlerFunc(func(_ http.ResponseWriter, r *http.Request) { <-r.Context().Done() }))
	defer hanging.Close()

	worker := func(name, url string) config.Worker {
		return config.Worker{Name: name, HTTP: url, Sources: []config.Source{{Engine: feed.EngineVLLM, Connect: "tcp://127.0.0.1:5557"}}}
	}
	var isGone atomic.Bool
	changed := make(chan func(), 1)
	asker := &enginehttp.Asker{
		Find: func(context.Context) ([]config.Worker, error) {
			found := []config.Worker{worker("plain", ""), worker("engine", engine.URL)}
			if isGone.Load() {
				found = []config.Worker{worker("plain", ""), worker("hanging", hanging.URL)}
			}
			return found, nil
		},
		Follow: func(ctx context.Context, call func()) { changed <- call; <-ctx.Done() },
	}
	var log strings.Builder
	changes := make(workerChanges, 10)
	watching, stop := context.WithCancel(ctx)
	done := make(chan error)
	go func() {
		done <- discovery.Watch{Name: "engines", Find: asker.FindAsked, Follow: asker.FollowAsked, Logger: slog.New(slog.NewTextHandler(&log, nil))}.Run(watching, changes)
	}()
	want := func(want ...string) {
		t.Helper()
		var got []string
		for range want {
			select {
			case change := <-changes:
				got = append(got, change)
			case <-ctx.Done():
				t.Fatalf("got %q, want %q", got, want)
			}
		}
		slices.Sort(got)
		if !slices.Equal(got, want) {
			t.Fatalf("got %q, want %q", got, want)
		}
	}
	want("add plain tcp://127.0.0.1:5557")
	want("add engine tcp://127.0.0.1:6000")
	isGone.Store(true)
	(<-changed)()
	want("remove engine")
	stop()
	if err := <-done; err != nil {
		t.Error(err)
	}
	const line = `msg="worker cannot be added" discovery=engines worker=engine error="ask engine at `
	if n := strings.Count(log.String(), line); n != 1 || !strings.Contains(log.String(), "GET /kv_event_sources: status 503 Service Unavailable; want 200") {
		t.Errorf("logged %d times:\n%s", n, log.String())
	}
}

// TestChangedWorkerStaysUntilItsEngineAnswers changes the labels of a worker while its engine does not answer.
func TestChangedWorkerStaysUntilItsEngineAnswers(t *testing.T) {
	t.Parallel()
	ctx, cancel := context.WithCancel(harness.Context(t))
	var isHanging atomic.Bool
	engine := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if isHanging.Load() {
			<-r.Context().Done()
			return
		}
		_, _ = w.Write([]byte(`{"0": ` + vllm("tcp://*:6000", "null") + `}`))
	}))
	defer engine.Close()
	asker := &enginehttp.Asker{Find: func(context.Context) ([]config.Worker, error) {
		w := config.Worker{Name: "w", HTTP: engine.URL, Sources: []config.Source{{Engine: feed.EngineVLLM, Connect: "tcp://127.0.0.1:5557"}}}
		if isHanging.Load() {
			w.Labels = map[string]string{"zone": "a"}
		}
		return []config.Worker{w}, nil
	}}
	done := make(chan struct{})
	go func() { defer close(done); asker.FollowAsked(ctx, func() {}) }()
	defer func() { cancel(); <-done }()
	for _, hanging := range []bool{false, true} {
		isHanging.Store(hanging)
		found, err := asker.FindAsked(ctx)
		if err != nil || len(found) != 1 || found[0].Sources[0].Connect != "tcp://127.0.0.1:6000" || found[0].Labels != nil {
			t.Errorf("hanging %t: found %+v, error %v; want the worker as its engine has told it", hanging, found, err)
		}
	}
}

// TestEngineThatNoLongerTellsKeepsItsPorts has an engine whose server answers 404 from the second request on, as one may do
// that is starting.
func TestEngineThatNoLongerTellsKeepsItsPorts(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		asked := make(chan int)
		count := 0
		defer enginehttp.SetTransport(func(r *http.Request) (*http.Response, error) {
			answer := httptest.NewRecorder()
			if r.URL.Path == "/is_sleeping" {
				http.NotFound(answer, r)
				return answer.Result(), nil
			}
			if count++; count == 1 {
				_, _ = answer.WriteString(`{"0": ` + vllm("tcp://*:6000", "null") + `}`)
			} else {
				http.NotFound(answer, r)
				asked <- count
			}
			return answer.Result(), nil
		})()
		asker := &enginehttp.Asker{Find: func(context.Context) ([]config.Worker, error) {
			return []config.Worker{{Name: "w", HTTP: "http://engine:8000", Sources: []config.Source{{Engine: feed.EngineVLLM, Connect: "tcp://engine:5557"}}}}, nil
		}}
		ctx, cancel := context.WithCancel(t.Context())
		done := make(chan struct{})
		go func() { defer close(done); asker.FollowAsked(ctx, func() {}) }()
		defer func() { cancel(); <-done }()
		for range 3 {
			found, err := asker.FindAsked(ctx)
			if err != nil || len(found) != 1 || found[0].Sources[0].Connect != "tcp://engine:6000" {
				t.Errorf("found %+v, error %v; want the port that the engine has told", found, err)
			}
			<-asked
			synctest.Wait()
		}
	})
}

// TestSleepingEnginesAreNotFound has an engine that is sent to sleep and woken up, one that cannot be sent to sleep, and one that does not tell.
// An error means that it goes on sleeping.
func TestSleepingEnginesAreNotFound(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var isAsleep, fails atomic.Bool
		var mu sync.Mutex // guards asked
		asked := make(map[string]int)
		defer enginehttp.SetTransport(func(r *http.Request) (*http.Response, error) {
			answer := httptest.NewRecorder()
			switch {
			case r.URL.Path == "/kv_event_sources":
				mu.Lock()
				asked[r.URL.Host]++
				mu.Unlock()
				_, _ = answer.WriteString(`{"0": ` + vllm("tcp://*:6000", "null") + `}`)
			case r.URL.Host == "sleepy:8000" && fails.Load():
				answer.WriteHeader(http.StatusServiceUnavailable)
			case r.URL.Host == "sleepy:8000":
				_, _ = answer.WriteString(`{"is_sleeping": ` + strconv.FormatBool(isAsleep.Load()) + `}`)
			case r.URL.Host == "odd:8000":
				_, _ = answer.WriteString(`{"is_sleeping": null}`)
			default:
				http.NotFound(answer, r)
			}
			return answer.Result(), nil
		})()
		worker := func(name string, engine feed.Engine) config.Worker {
			return config.Worker{Name: name, HTTP: "http://" + name + ":8000", Sources: []config.Source{{Engine: engine, Connect: "tcp://" + name + ":5557"}}}
		}
		var log strings.Builder
		var changes atomic.Int32
		asker := &enginehttp.Asker{
			Find: func(context.Context) ([]config.Worker, error) {
				return []config.Worker{worker("sleepy", feed.EngineVLLM), worker("odd", feed.EngineVLLM), worker("plain", feed.EngineVLLM)}, nil
			},
			Logger: slog.New(slog.NewTextHandler(&log, nil)),
		}
		ctx, cancel := context.WithCancel(t.Context())
		done := make(chan struct{})
		go func() { defer close(done); asker.FollowAsked(ctx, func() { changes.Add(1) }) }()
		defer func() { cancel(); <-done }()
		if _, err := asker.FindAsked(ctx); err != nil { // the first that answers
			t.Fatal(err)
		}
		synctest.Wait()
		for step, want := range []string{"sleepy odd plain", "odd plain", "odd plain", "sleepy odd plain"} {
			isAsleep.Store(want == "odd plain")
			fails.Store(step == 2)
			if step > 0 {
				time.Sleep(enginehttp.SleepInterval) // of the test's own clock
				synctest.Wait()
			}
			found, err := asker.FindAsked(ctx)
			var names []string
			for _, w := range found {
				names = append(names, w.Name)
			}
			if got := strings.Join(names, " "); got != want || err != nil {
				t.Errorf("step %d: found %q, error %v; want %q", step, got, err, want)
			}
		}
		if n := changes.Load(); n != 5 || strings.Count(log.String(), "engine sleeps") != 1 || strings.Count(log.String(), "engine has woken up") != 1 {
			t.Errorf("%d changes, want 3 answers, a sleep and its end:\n%s", n, log.String())
		}
		if asked["sleepy:8000"] != 4 || asked["plain:8000"] != 1 {
			t.Errorf("asked %v times in %v, want the engine that can sleep every %v", asked, 3*enginehttp.SleepInterval, enginehttp.SleepInterval)
		}
	})
}

// TestFirstPollIsBounded has an engine that never answers.
func TestFirstPollIsBounded(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		defer enginehttp.SetTransport(func(r *http.Request) (*http.Response, error) {
			<-r.Context().Done()
			return nil, r.Context().Err()
		})()
		const engines = 100
		asker := &enginehttp.Asker{Find: func(context.Context) (all []config.Worker, _ error) {
			all = append(all, config.Worker{Name: "plain"})
			for i := range engines {
				all = append(all, config.Worker{Name: strconv.Itoa(i), HTTP: "http://engine:8000", Sources: []config.Source{{Engine: feed.EngineVLLM}}})
			}
			return all, nil
		}}
		ctx, cancel := context.WithCancel(t.Context())
		done := make(chan struct{})
		go func() { defer close(done); asker.FollowAsked(ctx, func() {}) }()
		defer func() { cancel(); <-done }()
		began := time.Now()
		found, err := asker.FindAsked(ctx)
		var rejected discovery.Rejected
		if took := time.Since(began); took > enginehttp.Timeout || len(found) != 1 || err != nil && !errors.As(err, &rejected) {
			t.Errorf("found %d workers after %v, error %v; want the one without http within %v", len(found), took, err, enginehttp.Timeout)
		}
	})
}
