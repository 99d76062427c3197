package console_test

import (
	"bufio"
	"context"
	"encoding/json"
	"fmt"
	"net"
	"net/http"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/grpc/test/bufconn"
	"google.golang.org/protobuf/proto"

	"github.com/kvcast/kvcast/internal/console"
	kvcastv1 "github.com/kvcast/kvcast/proto/kvcast/v1"
	"github.com/kvcast/kvcast/server"
)

// scripted answers calls with the number of workers and the error that a test sets.
type scripted struct {
	mu      sync.Mutex // guards all below
	polls   map[string]int
	workers int
	err     error
}

func (s *scripted) Call(_ context.Context, method string, _ server.Caller, _ func(proto.Message) error) (proto.Message, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	_, name, _ := strings.Cut(method[1:], "/")
	s.polls[name]++
	switch name {
	case "ListWorkers":
		all := &kvcastv1.ListWorkersResponse{}
		for i := range s.workers {
			all.Workers = append(all.Workers, &kvcastv1.WorkerStatus{Name: fmt.Sprint(i)})
		}
		return all, s.err
	case "ListSubscribers":
		return &kvcastv1.ListSubscribersResponse{}, nil
	}
	return &kvcastv1.GetStatusResponse{Version: "v1"}, nil
}

func (s *scripted) set(workers int, err error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.workers, s.err = workers, err
}

// count returns how often a method was called since the last count.
func (s *scripted) count(name string) int {
	s.mu.Lock()
	defer s.mu.Unlock()
	n := s.polls[name]
	s.polls[name] = 0
	return n
}

// page is an open page.
type page struct {
	leave  func()
	mu     sync.Mutex // guards frames
	frames []string   // names and data
}

// take returns the frames since the last call that have a name.
func (p *page) take(name string) (all []string) {
	p.mu.Lock()
	defer p.mu.Unlock()
	for _, f := range p.frames {
		if data, ok := strings.CutPrefix(f, name+" "); ok {
			all = append(all, data)
		}
	}
	p.frames = nil
	return all
}

// world is a console in memory.
type world struct {
	t        *testing.T
	server   *scripted
	listener *bufconn.Listener
}

// inMemory runs a test with a console whose clock and connections are the test's.
func inMemory(t *testing.T, test func(world)) {
	t.Helper()
	synctest.Test(t, func(t *testing.T) {
		w := world{t, &scripted{polls: make(map[string]int)}, bufconn.Listen(1 << 20)}
		c := console.New(console.Config{Server: w.server, About: console.About{GRPC: "[::]:50051"}})
		s := &http.Server{Handler: c, ReadHeaderTimeout: time.Minute}
		served := make(chan error, 1)
		go func() { served <- s.Serve(w.listener) }()
		test(w)
		if err := s.Close(); err != nil {
			t.Error(err)
		}
		c.Close()
		<-served
	})
}

// open opens a page.
func (w world) open() (*page, int) {
	w.t.Helper()
	transport := &http.Transport{DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) { return w.listener.DialContext(ctx) }}
	ctx, cancel := context.WithCancel(w.t.Context())
	r := request(w.t, http.MethodPost, "http://localhost/console/stream", "{}").WithContext(ctx)
	response, err := transport.RoundTrip(r) //nolint:bodyclose // the goroutine below closes it
	if err != nil {
		w.t.Fatal(err)
	}
	p := new(page)
	done := make(chan struct{})
	go func() {
		defer close(done)
		defer func() { _ = response.Body.Close() }()
		lines := bufio.NewScanner(response.Body)
		lines.Buffer(nil, 1<<20)
		name := ""
		for lines.Scan() {
			if event, ok := strings.CutPrefix(lines.Text(), "event: "); ok {
				name = event
			}
			if data, ok := strings.CutPrefix(lines.Text(), "data: "); ok {
				p.mu.Lock()
				p.frames = append(p.frames, name+" "+data)
				p.mu.Unlock()
			}
		}
	}()
	p.leave = func() { cancel(); <-done; transport.CloseIdleConnections() }
	return p, response.StatusCode
}

func pass(d time.Duration) {
	time.Sleep(d)
	synctest.Wait()
}

// TestPagesShareOnePoll also covers that nobody polls without pages.
func TestPagesShareOnePoll(t *testing.T) {
	t.Parallel()
	inMemory(t, func(w world) {
		w.server.set(3, nil)
		pass(time.Hour)
		if n := w.server.count("GetStatus"); n != 0 {
			t.Errorf("got %d polls without a page", n)
		}
		var pages []*page
		for range 10 {
			p, _ := w.open()
			pages = append(pages, p)
		}
		synctest.Wait()
		w.server.count("GetStatus")
		w.server.count("ListWorkers")
		pass(60 * time.Second)
		if status, workers := w.server.count("GetStatus"), w.server.count("ListWorkers"); status != 60 || workers != 60 {
			t.Errorf("got %d polls of the status and %d of workers in a minute, want 60 of each for all pages", status, workers)
		}
		for i, p := range pages {
			if got := len(p.take("status")); got != 61 {
				t.Errorf("page %d got %d frames, want 61", i, got)
			}
			p.leave()
		}
		synctest.Wait()
		w.server.count("GetStatus")
		pass(time.Hour)
		if n := w.server.count("GetStatus"); n != 0 {
			t.Errorf("got %d polls after the last page", n)
		}
	})
}

func TestManyWorkersArePolledLess(t *testing.T) {
	t.Parallel()
	inMemory(t, func(w world) {
		for _, test := range []struct{ workers, want int }{{64, 60}, {256, 30}, {1000, 12}} {
			w.server.set(test.workers, nil)
			p, _ := w.open()
			pass(10 * time.Second)
			w.server.count("ListWorkers")
			pass(time.Minute)
			if got := w.server.count("ListWorkers"); got != test.want {
				t.Errorf("%d workers: got %d polls in a minute, want %d", test.workers, got, test.want)
			}
			p.leave()
		}
	})
}

// frameOf decodes a frame of workers.
func frameOf(t *testing.T, data string) (f struct {
	Time   int64
	Polled struct{ Workers int64 }
	Answer struct{ Workers []struct{ Name string } }
	Error  struct{ Code, Message string }
}) {
	t.Helper()
	if err := json.Unmarshal([]byte(data), &f); err != nil {
		t.Fatal(err)
	}
	return f
}

func TestEqualAnswersAreSentOnce(t *testing.T) {
	t.Parallel()
	inMemory(t, func(w world) {
		w.server.set(2, nil)
		p, _ := w.open()
		pass(10 * time.Second)
		p.mu.Lock()
		frames := append([]string(nil), p.frames...)
		p.mu.Unlock()
		if got := p.take("workers"); len(got) != 1 || len(frameOf(t, got[0]).Answer.Workers) != 2 {
			t.Errorf("got frames %q, want one with two workers", got)
		}
		last, _ := strings.CutPrefix(frames[len(frames)-1], "status ")
		if age := time.Now().UnixMilli() - frameOf(t, last).Polled.Workers; age < 0 || age > 2000 {
			t.Errorf("the status says that workers were polled %d ms ago", age)
		}
		w.server.set(3, nil)
		pass(2 * time.Second)
		if got := p.take("workers"); len(got) != 1 || len(frameOf(t, got[0]).Answer.Workers) != 3 {
			t.Errorf("got frames %q, want one with three workers", got)
		}
		late, _ := w.open()
		synctest.Wait()
		if got := late.take("workers"); len(got) != 1 || len(frameOf(t, got[0]).Answer.Workers) != 3 {
			t.Errorf("a later page got frames %q, want the last", got)
		}
		late.leave()
		p.leave()
	})
}

func TestErrorsAreShown(t *testing.T) {
	t.Parallel()
	inMemory(t, func(w world) {
		w.server.set(2, nil)
		p, _ := w.open()
		pass(2 * time.Second)
		p.take("workers")
		w.server.set(2, status.Error(codes.ResourceExhausted, "too many workers"))
		pass(2 * time.Second)
		if got := p.take("workers"); len(got) != 1 || frameOf(t, got[0]).Error.Code != "resource_exhausted" || frameOf(t, got[0]).Error.Message != "too many workers" {
			t.Errorf("got frames %q, want one with the error", got)
		}
		w.server.set(2, nil)
		pass(2 * time.Second)
		if got := p.take("workers"); len(got) != 1 || len(frameOf(t, got[0]).Answer.Workers) != 2 {
			t.Errorf("after the error: got frames %q, want the answer again", got)
		}
		p.leave()
	})
}

func TestPagesAreBounded(t *testing.T) {
	t.Parallel()
	inMemory(t, func(w world) {
		var pages []*page
		for range console.MaxPages {
			p, code := w.open()
			if code != http.StatusOK {
				t.Fatalf("page %d: got %d", len(pages), code)
			}
			pages = append(pages, p)
		}
		refused, code := w.open()
		if code != http.StatusServiceUnavailable {
			t.Errorf("one page more: got %d", code)
		}
		refused.leave()
		pages[0].leave()
		synctest.Wait()
		again, code := w.open()
		if code != http.StatusOK {
			t.Errorf("after a page was closed: got %d", code)
		}
		again.leave()
		for _, p := range pages[1:] {
			p.leave()
		}
	})
}
