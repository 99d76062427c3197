package kubernetes_test

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net/url"
	"strings"
	"syscall"
	"testing"
	"testing/synctest"
	"time"

	"github.com/google/go-cmp/cmp"
	"go.uber.org/goleak"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/types"
	utilruntime "k8s.io/apimachinery/pkg/util/runtime"
	"k8s.io/apimachinery/pkg/watch"

	"github.com/kvcast/kvcast/ingest/config"
	"github.com/kvcast/kvcast/internal/discovery"
	"github.com/kvcast/kvcast/internal/discovery/kubernetes"
	"github.com/kvcast/kvcast/internal/feed"
)

func TestMain(m *testing.M) {
	// One of client-go's handlers of errors sleeps until 1 ms after the start of the process, by a clock that is ahead of synctest's.
	utilruntime.ErrorHandlers = utilruntime.ErrorHandlers[:1] // which logs
	goleak.VerifyTestMain(m)
}

const namespace = "llm"

// readyPod returns a pod that is ready.
func readyPod(name, ip string, changes ...func(*corev1.Pod)) *corev1.Pod {
	p := &corev1.Pod{ObjectMeta: metav1.ObjectMeta{Namespace: namespace, Name: name, UID: types.UID("uid-" + name)}}
	p.Status = corev1.PodStatus{Phase: corev1.PodRunning, PodIP: ip, Conditions: []corev1.PodCondition{{Type: corev1.PodReady, Status: corev1.ConditionTrue}}}
	for _, change := range changes {
		change(p)
	}
	return p
}

func notReady(p *corev1.Pod) { p.Status.Conditions[0].Status = corev1.ConditionFalse }

func annotated(pairs ...string) func(*corev1.Pod) {
	return func(p *corev1.Pod) { p.Annotations = pairsOf(pairs) }
}

func labeled(pairs ...string) func(*corev1.Pod) {
	return func(p *corev1.Pod) { p.Labels = pairsOf(pairs) }
}

func pairsOf(pairs []string) map[string]string {
	m := make(map[string]string)
	for i := 0; i < len(pairs); i += 2 {
		m[pairs[i]] = pairs[i+1]
	}
	return m
}

func withPorts(names map[string]int32) func(*corev1.Pod) {
	return func(p *corev1.Pod) {
		c := corev1.Container{Name: "engine"}
		for name, port := range names {
			c.Ports = append(c.Ports, corev1.ContainerPort{Name: name, ContainerPort: port})
		}
		p.Spec.Containers = []corev1.Container{{Name: "proxy"}, c}
	}
}

// TestWorkersOfPods checks what a worker gets from its pod, and what from the settings.
func TestWorkersOfPods(t *testing.T) {
	settings := kubernetes.Engines{
		Engines: discovery.Engines{Port: 6000, ReplayPort: 6101, Engine: feed.EngineSGLang, Copies: config.CopiesCounted, Model: "m/m", BlockSize: 32, Pools: []string{"s"}},
		DPSize:  2, HTTPPort: 8000, Labels: []string{"llm-d.ai/role", "zone"},
	}
	others := []func(*corev1.Pod){
		labeled("llm-d.ai/model", "Qwen3-32B", "llm-d.ai/engine-type", "sglang", "llm-d.ai/role", "decode"),
		withPorts(map[string]int32{"kv-events": 5556, "kv-replay": 5559, "http": 8000}),
	}
	tests := []struct {
		name    string
		engines kubernetes.Engines
		pod     *corev1.Pod
		want    config.Worker
	}{
		{"defaults", kubernetes.Engines{}, readyPod("a", "10.0.0.1"), config.Worker{
			Name: "llm/a", Sources: []config.Source{{Connect: "tcp://10.0.0.1:5557", DPSize: 1}},
		}},
		{"IPv6", kubernetes.Engines{HTTPPort: 8000}, readyPod("a", "fd00::1"), config.Worker{
			Name: "llm/a", Endpoint: "[fd00::1]:8000", HTTP: "http://[fd00::1]:8000", Sources: []config.Source{{Connect: "tcp://[fd00::1]:5557", DPSize: 1}},
		}},
		{"settings", settings, readyPod("a", "10.0.0.1"), config.Worker{
			Name: "llm/a", Model: "m/m", BlockSize: 32, Pools: []string{"s"}, Endpoint: "10.0.0.1:8000", HTTP: "http://10.0.0.1:8000",
			Sources: []config.Source{{Engine: feed.EngineSGLang, Copies: config.CopiesCounted, Connect: "tcp://10.0.0.1:6000", Replay: "tcp://10.0.0.1:6101", DPSize: 2}},
		}},
		{"llm-d", kubernetes.Engines{Labels: []string{"llm-d.ai/role"}}, readyPod("a", "10.0.0.1", others...), config.Worker{
			Name: "llm/a", Model: "Qwen3-32B", Labels: map[string]string{"llm-d.ai/role": "decode"},
			Sources: []config.Source{{Engine: feed.EngineSGLang, Connect: "tcp://10.0.0.1:5556", Replay: "tcp://10.0.0.1:5559", DPSize: 1}},
		}},
		{"settings precede the labels and ports of others", settings, readyPod("a", "10.0.0.1", others...), config.Worker{
			Name: "llm/a", Model: "m/m", BlockSize: 32, Pools: []string{"s"}, Endpoint: "10.0.0.1:8000", HTTP: "http://10.0.0.1:8000", Labels: map[string]string{"llm-d.ai/role": "decode"},
			Sources: []config.Source{{Engine: feed.EngineSGLang, Copies: config.CopiesCounted, Connect: "tcp://10.0.0.1:6000", Replay: "tcp://10.0.0.1:6101", DPSize: 2}},
		}},
		{"AIBrix", kubernetes.Engines{}, readyPod("a", "10.0.0.1", annotated("model.aibrix.ai/name", "org/m"), labeled("model.aibrix.ai/engine", "vllm", "model.aibrix.ai/port", "8080", "model", "other")), config.Worker{
			Name: "llm/a", Model: "org/m", Endpoint: "10.0.0.1:8080", HTTP: "http://10.0.0.1:8080", Sources: []config.Source{{Engine: feed.EngineVLLM, Connect: "tcp://10.0.0.1:5557", DPSize: 1}},
		}},
		{"the production stack, with unknown values of others", kubernetes.Engines{}, readyPod("a", "10.0.0.1", labeled("model", "opt125m", "model.aibrix.ai/port", "http", "llm-d.ai/engine-type", "mine")), config.Worker{
			Name: "llm/a", Model: "opt125m", Sources: []config.Source{{Connect: "tcp://10.0.0.1:5557", DPSize: 1}},
		}},
		{"annotations precede the settings", settings, readyPod("a", "10.0.0.1", append(others, annotated(
			"kvcast.io/model", "", "kvcast.io/engine", "vllm", "kvcast.io/block-size", "64", "kvcast.io/event-port", "7000",
			"kvcast.io/replay-port", "0", "kvcast.io/http-port", "9000", "kvcast.io/dp-size", "8", "kvcast.io/dp-start-rank", "16", "kvcast.io/pools", "lm,llm/b"))...), config.Worker{
			Name: "llm/a", BlockSize: 64, Pools: []string{"lm", "llm/b"}, Endpoint: "10.0.0.1:9000", HTTP: "http://10.0.0.1:9000", Labels: map[string]string{"llm-d.ai/role": "decode"},
			Sources: []config.Source{{Engine: feed.EngineVLLM, Copies: config.CopiesCounted, Connect: "tcp://10.0.0.1:7000", FirstRank: 16, DPSize: 8}},
		}},
		{"kvcast's labels", settings, readyPod("a", "10.0.0.1", labeled("kvcast.io/event-port", "7000", "kvcast.io/dp-size", "3"), annotated("kvcast.io/dp-size", "4")), config.Worker{
			Name: "llm/a", Model: "m/m", BlockSize: 32, Pools: []string{"s"}, Endpoint: "10.0.0.1:8000", HTTP: "http://10.0.0.1:8000",
			Sources: []config.Source{{Engine: feed.EngineSGLang, Copies: config.CopiesCounted, Connect: "tcp://10.0.0.1:7000", Replay: "tcp://10.0.0.1:6101", DPSize: 4}},
		}},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				f := follow(t, newPodServer(t, tt.pod), &kubernetes.Source{Engines: tt.engines})
				got, err := f.Find(t.Context())
				if err != nil {
					t.Fatal(err)
				}
				if diff := cmp.Diff([]config.Worker{tt.want}, got); diff != "" {
					t.Errorf("(-want +got):\n%s", diff)
				}
				if err := (config.Config{Workers: got}).Validate(); err != nil {
					t.Error(err)
				}
			})
		})
	}
}

// TestInvalidAnnotationsAreRejected checks the errors, and that the worker stays as it was before.
func TestInvalidAnnotationsAreRejected(t *testing.T) {
	tests := []struct{ key, text, want string }{
		{"event-port", "kv", `kvcast.io/event-port "kv" is not allowed: want 1 to 65535`},
		{"event-port", "0", `kvcast.io/event-port "0" is not allowed: want 1 to 65535`},
		{"replay-port", "65536", `kvcast.io/replay-port "65536" is not allowed: want 0 to 65535`},
		{"http-port", "-1", `kvcast.io/http-port "-1" is not allowed: want 0 to 65535`},
		{"dp-start-rank", "1024", `kvcast.io/dp-start-rank "1024" is not allowed: want 0 to 1023`},
		{"dp-start-rank", "-1", `kvcast.io/dp-start-rank "-1" is not allowed: want 0 to 1023`},
		{"dp-size", "1025", `kvcast.io/dp-size "1025" is not allowed: want 1 to 1024`},
		{"pools", "a,,b", `kvcast.io/pools "a,,b" is not allowed: want 1 to 16 names of pools, separated by commas`},
		{"pools", strings.Repeat("a,", 16) + "a", `kvcast.io/pools "` + strings.Repeat("a,", 16) + `a" is not allowed: want 1 to 16 names of pools, separated by commas`},
		{"block-size", "", `kvcast.io/block-size "" is not allowed: want 1 to 65536`},
		{"block-size", "65537", `kvcast.io/block-size "65537" is not allowed: want 1 to 65536`},
		{"engine", "llama", `kvcast.io/engine "llama" is not allowed: want vllm, sglang, trtllm, kvbm, llm-d-sim, lmcache, lmcache-coordinator, mooncake or workers`},
		{"model", "a\nb", `kvcast.io/model "a\nb" is not allowed: want at most 1024 bytes of UTF-8 without control or format characters`},
		{"model", strings.Repeat("m", 2000), `kvcast.io/model "` + strings.Repeat("m", 100) + `" is not allowed: want at most 1024 bytes of UTF-8 without control or format characters`},
	}
	for _, tt := range tests {
		t.Run(tt.key, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				client := newPodServer(t, readyPod("a", "10.0.0.1"), readyPod("b", "10.0.0.2", annotated("kvcast.io/"+tt.key, tt.text)))
				f := follow(t, client, &kubernetes.Source{})
				f.want(t, "llm/a tcp://10.0.0.1:5557", "llm/b: "+tt.want)
				f.update(readyPod("a", "10.0.0.1", annotated("kvcast.io/"+tt.key, tt.text)))
				f.want(t, "llm/a: "+tt.want, "llm/b: "+tt.want)
				f.update(readyPod("b", "10.0.0.2"))
				f.want(t, "llm/b tcp://10.0.0.2:5557", "llm/a: "+tt.want)
			})
		})
	}
}

// TestRanksBeyondTheHighestAreRejected checks a number of ranks that is allowed with other first ranks.
func TestRanksBeyondTheHighestAreRejected(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		pod := readyPod("a", "10.0.0.1", annotated("kvcast.io/dp-start-rank", "1020", "kvcast.io/dp-size", "5"))
		f := follow(t, newPodServer(t, pod), &kubernetes.Source{})
		f.want(t, `llm/a: kvcast.io/dp-start-rank "1020" is not allowed: want 0 to 1019 with 5 ranks`)
	})
}

// TestPodsAreFollowed checks that a worker is what its pod was when it was last ready, until the pod ends.
func TestPodsAreFollowed(t *testing.T) {
	another := func(p *corev1.Pod) { p.UID = "another" }
	deleting := func(p *corev1.Pod) {
		p.DeletionTimestamp, p.Finalizers = &metav1.Time{Time: time.Now()}, []string{"kvcast.io/test"}
	}
	phase := func(phase corev1.PodPhase) func(*corev1.Pod) { return func(p *corev1.Pod) { p.Status.Phase = phase } }
	const a = "llm/a tcp://10.0.0.1:5557"
	type step struct {
		pod  *corev1.Pod // nil: deleted
		want []string
	}
	tests := []struct {
		name  string
		steps []step
	}{
		{"ready, deleted", []step{{readyPod("a", "10.0.0.1"), []string{a}}, {nil, nil}}},
		{"never ready", []step{{readyPod("a", "", notReady, phase(corev1.PodPending)), nil}, {readyPod("a", "10.0.0.1", notReady), nil}, {nil, nil}}},
		{"ready without an address", []step{{readyPod("a", ""), nil}, {readyPod("a", "10.0.0.1"), []string{a}}}},
		{"without conditions", []step{{readyPod("a", "10.0.0.1", func(p *corev1.Pod) { p.Status.Conditions = nil }), nil}}},
		{"ready later", []step{{readyPod("a", "10.0.0.1", notReady), nil}, {readyPod("a", "10.0.0.1"), []string{a}}}},
		{"not ready any more", []step{
			{readyPod("a", "10.0.0.1"), []string{a}},
			{readyPod("a", "10.0.0.1", notReady), []string{a}},
			{readyPod("a", "", notReady, annotated("kvcast.io/dp-size", "2")), []string{a}},
			{readyPod("a", "10.0.0.9"), []string{"llm/a tcp://10.0.0.9:5557"}},
		}},
		{"being deleted", []step{{readyPod("a", "10.0.0.1"), []string{a}}, {readyPod("a", "10.0.0.1", deleting), nil}, {nil, nil}}},
		{"failed", []step{{readyPod("a", "10.0.0.1"), []string{a}}, {readyPod("a", "10.0.0.1", notReady, phase(corev1.PodFailed)), nil}}},
		{"succeeded", []step{{readyPod("a", "10.0.0.1"), []string{a}}, {readyPod("a", "10.0.0.1", phase(corev1.PodSucceeded)), nil}}},
		{"replaced by a pod of the same name", []step{
			{readyPod("a", "10.0.0.1"), []string{a}},
			{readyPod("a", "10.0.0.2", another, notReady), nil},
			{readyPod("a", "10.0.0.2", another), []string{"llm/a tcp://10.0.0.2:5557"}},
		}},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				f := follow(t, newPodServer(t), &kubernetes.Source{})
				f.want(t)
				for i, s := range tt.steps {
					switch {
					case s.pod == nil:
						f.delete("a")
					case i == 0:
						f.create(s.pod)
					default:
						f.update(s.pod)
					}
					f.want(t, s.want...)
				}
			})
		})
	}
}

// TestPodsOfNamespacesDoNotClash checks that pods of the same name are different workers.
func TestPodsOfNamespacesDoNotClash(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		client := newPodServer(t, readyPod("a", "10.0.0.1"), readyPod("a", "10.0.0.2", func(p *corev1.Pod) { p.Namespace = "other" }))
		f := follow(t, client, &kubernetes.Source{Client: client.pods(metav1.NamespaceAll)})
		f.want(t, "llm/a tcp://10.0.0.1:5557", "other/a tcp://10.0.0.2:5557")
	})
}

// TestOldestPodsAreWorkers checks that pods beyond the maximum do not replace others.
func TestOldestPodsAreWorkers(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		now := time.Now()
		aged := func(age int) func(*corev1.Pod) {
			return func(p *corev1.Pod) { p.CreationTimestamp.Time = now.Add(-time.Duration(age) * time.Hour) }
		}
		var log strings.Builder
		client := newPodServer(t, readyPod("b", "10.0.0.2", aged(2)), readyPod("c", "10.0.0.3", aged(3)))
		f := follow(t, client, &kubernetes.Source{MaxWorkers: 2, Logger: slog.New(slog.NewTextHandler(&log, nil))})
		f.want(t, "llm/c tcp://10.0.0.3:5557", "llm/b tcp://10.0.0.2:5557")
		f.create(readyPod("a", "10.0.0.1", aged(1)))
		for range 3 {
			f.want(t, "llm/c tcp://10.0.0.3:5557", "llm/b tcp://10.0.0.2:5557")
		}
		if n := strings.Count(log.String(), "more pods than workers"); n != 1 || !strings.Contains(log.String(), "pods=3 max_workers=2") {
			t.Errorf("logged %d times:\n%s", n, log.String())
		}
		f.delete("c")
		f.want(t, "llm/b tcp://10.0.0.2:5557", "llm/a tcp://10.0.0.1:5557")
	})
}

// TestOutageOfTheAPIServer checks the errors of Find while requests fail, and that pods deleted meanwhile are noticed.
func TestOutageOfTheAPIServer(t *testing.T) {
	refused := &url.Error{Op: "Get", URL: "https://10.96.0.1:443/api/v1/namespaces/llm/pods?watch=true", Err: errors.New("connection refused")}
	forbidden := apierrors.NewForbidden(schema.GroupResource{Resource: "pods"}, "", errors.New("no role"))
	tests := []struct {
		name string
		err  error
		want string
	}{
		{"unreachable", refused, "list pods at API server https://10.96.0.1:443: connection refused"},
		{"forbidden", forbidden, "list pods: pods is forbidden: no role; want a role with get, list and watch of pods"},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				client := newPodServer(t, readyPod("a", "10.0.0.1"))
				client.listError.Store(&tt.err)
				var log strings.Builder
				f := follow(t, client, &kubernetes.Source{Logger: slog.New(slog.NewTextHandler(&log, nil))})
				if _, err := f.Find(t.Context()); err == nil || err.Error() != tt.want {
					t.Errorf("error %v, want %s", err, tt.want)
				}
				synctest.Wait()
				client.listError.Store(nil)
				for _, err := f.Find(t.Context()); err != nil; _, err = f.Find(t.Context()) {
					<-f.changed
				}
				f.want(t, "llm/a tcp://10.0.0.1:5557")
				if log.Len() > 0 {
					t.Errorf("client-go logged above debug level:\n%s", log.String())
				}
			})
		})
	}
}

// refusedPods are pods of an API server that refuses connections.
type refusedPods struct{}

var errRefused = &url.Error{Op: "Get", URL: "https://10.96.0.1:443", Err: syscall.ECONNREFUSED}

func (refusedPods) List(context.Context, metav1.ListOptions) (*corev1.PodList, error) {
	return nil, errRefused
}

func (refusedPods) Watch(context.Context, metav1.ListOptions) (watch.Interface, error) {
	return nil, errRefused
}

// TestFollowEndsDuringAnOutage ends Follow at different times between two attempts to reach the API server.
func TestFollowEndsDuringAnOutage(t *testing.T) {
	for after := time.Minute; after < 2*time.Minute; after += 3 * time.Second {
		synctest.Test(t, func(t *testing.T) {
			s := (&kubernetes.Source{Client: refusedPods{}}).Open()
			ctx, cancel := context.WithCancel(t.Context())
			ended := make(chan struct{})
			go func() {
				defer close(ended)
				s.Follow(ctx, func() {})
			}()
			<-time.After(after)
			cancel()
			cancelled := time.Now()
			if <-ended; time.Since(cancelled) > 0 {
				t.Errorf("Follow went on for %v", time.Since(cancelled))
			}
		})
	}
}

// TestFindWaitsForTheFirstList checks that Find does not report that there are no pods, and ends with its context.
func TestFindWaitsForTheFirstList(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := (&kubernetes.Source{Client: newPodServer(t).pods(namespace)}).Open()
		ctx, cancel := context.WithTimeout(t.Context(), time.Second)
		defer cancel()
		if _, err := s.Find(ctx); !errors.Is(err, context.DeadlineExceeded) {
			t.Errorf("error %v", err)
		}
	})
}

// followed is a source that is followed, and its API server.
type followed struct {
	*kubernetes.Source
	client  *podServer
	changed chan struct{} // has an element after a change
}

// follow follows a source until the test ends.
func follow(t *testing.T, client *podServer, s *kubernetes.Source) followed {
	t.Helper()
	if s.Client == nil {
		s.Client = client.pods(namespace)
	}
	s.Open()
	ctx, cancel := context.WithCancel(t.Context())
	done, changed := make(chan struct{}), make(chan struct{}, 1)
	go func() {
		defer close(done)
		s.Follow(ctx, func() {
			select {
			case changed <- struct{}{}:
			default:
			}
		})
	}()
	t.Cleanup(func() { cancel(); <-done })
	return followed{s, client, changed}
}

// want checks the workers and the rejected ones when all changes have been processed.
func (f followed) want(t *testing.T, want ...string) {
	t.Helper()
	synctest.Wait()
	workers, err := f.Find(t.Context())
	var got []string
	for _, w := range workers {
		got = append(got, w.Name+" "+w.Sources[0].Connect)
	}
	var rejected discovery.Rejected
	if errors.As(err, &rejected) {
		got = append(got, strings.Split(rejected.Error(), "; ")...)
	} else if err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("(-want +got):\n%s", diff)
	}
}

func (f followed) create(p *corev1.Pod) { f.client.source.Add(p.DeepCopy()) }
func (f followed) update(p *corev1.Pod) { f.client.source.Modify(p.DeepCopy()) }

func (f followed) delete(name string) {
	for _, object := range f.client.source.Items {
		if p := object.(*corev1.Pod); p.Name == name {
			f.client.source.Delete(p.DeepCopy())
		}
	}
}

func check(t *testing.T, verb string, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(fmt.Errorf("%s pod: %w", verb, err))
	}
}
