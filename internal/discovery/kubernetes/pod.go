package kubernetes

import (
	"cmp"
	"errors"
	"fmt"
	"net"
	"slices"
	"strconv"
	"strings"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/watch"

	"github.com/kvcast/kvcast/ingest/config"
	"github.com/kvcast/kvcast/internal/discovery"
	"github.com/kvcast/kvcast/internal/feed"
	"github.com/kvcast/kvcast/internal/wire"
)

// Prefix is the prefix of kvcast's annotations and labels. An annotation takes precedence over the label of the same key.
const Prefix = "kvcast.io/"

// Labels, annotations and container ports that other programs define. They are used where neither kvcast's annotation
// nor Engines has a value.
//
//   - llm-d: the label llm-d.ai/model and the container port kv-events in guides/precise-prefix-cache-routing of
//     github.com/llm-d/llm-d; llm-d.ai/engine-type, and the older inference.networking.k8s.io/engine-type of the
//     Gateway API inference extension, in pkg/epp/framework/plugins/datalayer/extractor/metrics/mapping_registry.go of
//     github.com/llm-d/llm-d-router.
//   - AIBrix: model.aibrix.ai/name (a label or an annotation), model.aibrix.ai/engine and model.aibrix.ai/port in
//     pkg/constants/model.go of github.com/vllm-project/aibrix; the container ports kv-events and kv-replay in its
//     docs/source/features/kv-event-sync.rst.
//   - vLLM production stack: the label model in _get_model_label of src/vllm_router/service_discovery.py and in
//     helm/templates/deployment-vllm-multi.yaml of github.com/vllm-project/production-stack.
const (
	eventPortName, replayPortName = "kv-events", "kv-replay"

	aibrixModel, aibrixEngine, aibrixPort = "model.aibrix.ai/name", "model.aibrix.ai/engine", "model.aibrix.ai/port"
	llmdModel, llmdEngine                 = "llm-d.ai/model", "llm-d.ai/engine-type"
	inferenceEngine                       = "inference.networking.k8s.io/engine-type"
	stackModel                            = "model"
)

// engineTypes are the engines by the values that the labels of other programs have.
var engineTypes = map[string]feed.Engine{
	"vllm": feed.EngineVLLM, "sglang": feed.EngineSGLang, "trtllm-serve": feed.EngineTRTLLM, "trtllm": feed.EngineTRTLLM,
}

// Engines has the settings of engines whose pods do not have annotations for them. Zero values mean what labels and ports
// of other programs say, and otherwise the default.
type Engines struct {
	discovery.Engines
	// DPSize is the number of dp ranks.
	DPSize int
	// HTTPPort is the port of requests, which is passed to routers in config.Worker.Endpoint. It is also config.Worker.HTTP,
	// where the engine is asked for its event ports.
	HTTPPort int
	// Labels are the keys of pods' labels that are passed to routers.
	Labels []string
}

// isReady reports whether a pod is ready and has an address.
func isReady(p *corev1.Pod) bool {
	return p.Status.PodIP != "" && slices.ContainsFunc(p.Status.Conditions, func(c corev1.PodCondition) bool {
		return c.Type == corev1.PodReady && c.Status == corev1.ConditionTrue
	})
}

// isEnding reports whether a pod is being deleted, or its containers have ended for good.
func isEnding(p *corev1.Pod) bool {
	return p.DeletionTimestamp != nil || p.Status.Phase == corev1.PodSucceeded || p.Status.Phase == corev1.PodFailed
}

// worker returns the worker of a pod, or an error that names each annotation that is not valid.
func (e Engines) worker(p *corev1.Pod) (config.Worker, error) {
	r := reader{pod: p}
	of := e.Engines
	if text, key := r.text("model"); key != "" {
		of.Model = text
		r.check(config.ValidModel(text), key, text, config.AllowedModel)
	} else if of.Model == "" {
		of.Model = cmp.Or(p.Labels[aibrixModel], p.Annotations[aibrixModel], p.Labels[llmdModel], p.Labels[stackModel])
	}
	if text, key := r.text("engine"); key != "" {
		var ok bool
		of.Engine, ok = config.ParseEngine(text)
		r.check(ok, key, text, config.AllowedEngines)
	} else if of.Engine == "" {
		of.Engine = engineTypes[cmp.Or(p.Labels[llmdEngine], p.Labels[inferenceEngine], p.Labels[aibrixEngine])]
	}
	of.BlockSize = uint32(r.number("block-size", 1, wire.MaxBlockSize, int(of.BlockSize), 0, 0))
	of.Port = r.number("event-port", 1, config.MaxPort, of.Port, containerPort(p, eventPortName), config.DefaultPort)
	of.ReplayPort = r.number("replay-port", 0, config.MaxPort, of.ReplayPort, containerPort(p, replayPortName), 0)
	httpPort := r.number("http-port", 0, config.MaxPort, e.HTTPPort, portLabel(p, aibrixPort), 0)
	dpSize := r.number("dp-size", 1, feed.MaxRanks, e.DPSize, 0, 1)

	firstRank := r.number("dp-start-rank", 0, feed.MaxRanks-1, 0, 0, 0)
	if last := feed.MaxRanks - dpSize; last >= 0 && firstRank < feed.MaxRanks {
		text, key := r.text("dp-start-rank")
		r.check(firstRank <= last, key, text, fmt.Sprintf("0 to %d with %d ranks", last, dpSize))
	}

	w := of.Worker(key(p).String(), p.Status.PodIP)
	w.Sources[0].FirstRank, w.Sources[0].DPSize = firstRank, dpSize
	if httpPort > 0 {
		w.Endpoint = net.JoinHostPort(p.Status.PodIP, strconv.Itoa(httpPort))
		if slices.Contains(config.HTTPEngines, cmp.Or(of.Engine, feed.EngineVLLM)) {
			w.HTTP = "http://" + w.Endpoint
		}
	}
	for _, label := range e.Labels {
		if text, ok := p.Labels[label]; ok {
			if w.Labels == nil {
				w.Labels = make(map[string]string)
			}
			w.Labels[label] = text
		}
	}
	if text, key := r.text("pools"); key != "" {
		w.Pools = strings.Split(text, ",")
		isInvalid := func(name string) bool { return !config.ValidName(name) }
		r.check(len(w.Pools) <= config.MaxPools && !slices.ContainsFunc(w.Pools, isInvalid), key, text,
			fmt.Sprintf("1 to %d names of pools, separated by commas", config.MaxPools))
	}
	if len(r.wrong) > 0 {
		return w, errors.New(strings.Join(r.wrong, "; "))
	}
	return w, nil
}

// maxKept bounds the text of an annotation or a label that trimmed keeps: more than any may have.
const maxKept = 2 << 10

// trimmed returns a pod with what the store and client-go use alone. The rest may be a megabyte.
func (e Engines) trimmed(p *corev1.Pod) *corev1.Pod {
	keys := []string{
		aibrixModel, aibrixEngine, aibrixPort, llmdModel, llmdEngine, inferenceEngine, stackModel, metav1.InitialEventsAnnotationKey,
	}
	for _, name := range []string{"model", "engine", "block-size", "event-port", "replay-port", "http-port", "dp-size", "dp-start-rank", "pools"} {
		keys = append(keys, Prefix+name)
	}
	keys = append(keys, e.Labels...)
	keep := func(from map[string]string) map[string]string {
		kept := make(map[string]string)
		for _, key := range keys {
			if text, ok := from[key]; ok {
				kept[key] = strings.Clone(text[:min(len(text), maxKept)])
			}
		}
		return kept
	}
	kept := &corev1.Pod{TypeMeta: p.TypeMeta, ObjectMeta: metav1.ObjectMeta{
		Namespace: p.Namespace, Name: p.Name, UID: p.UID, ResourceVersion: p.ResourceVersion,
		CreationTimestamp: p.CreationTimestamp, DeletionTimestamp: p.DeletionTimestamp,
		Annotations: keep(p.Annotations), Labels: keep(p.Labels),
	}, Status: corev1.PodStatus{Phase: p.Status.Phase, PodIP: p.Status.PodIP}}
	for _, name := range []string{eventPortName, replayPortName} {
		if port := containerPort(p, name); port != 0 {
			kept.Spec.Containers = append(kept.Spec.Containers, corev1.Container{Ports: []corev1.ContainerPort{{Name: name, ContainerPort: int32(port)}}})
		}
	}
	if isReady(p) {
		kept.Status.Conditions = []corev1.PodCondition{{Type: corev1.PodReady, Status: corev1.ConditionTrue}}
	}
	return kept
}

// trimmedWatch returns a watch whose pods are trimmed.
func (e Engines) trimmedWatch(w watch.Interface) watch.Interface {
	return drainedWatch{watch.Filter(w, func(event watch.Event) (watch.Event, bool) {
		if p, ok := event.Object.(*corev1.Pod); ok {
			event.Object = e.trimmed(p)
		}
		return event, true
	})}
}

// drainedWatch is a filtered watch whose goroutine ends after Stop. Without it, the goroutine waits until its next event is received.
type drainedWatch struct{ watch.Interface }

// Stop implements watch.Interface.
func (w drainedWatch) Stop() {
	w.Interface.Stop()
	go func() {
		for range w.ResultChan() { // which the filter closes
		}
	}()
}

// reader reads kvcast's annotations of a pod, and collects what is not valid.
type reader struct {
	pod   *corev1.Pod
	wrong []string
}

// text returns the annotation with a name, or the label, and its key; none if there is neither.
func (r *reader) text(name string) (text, key string) {
	for _, of := range []map[string]string{r.pod.Annotations, r.pod.Labels} {
		if text, ok := of[Prefix+name]; ok {
			return text, Prefix + name
		}
	}
	return "", ""
}

// check records that the text of a key is not valid.
func (r *reader) check(ok bool, key, text, allowed string) {
	const maxShown = 100 // bytes of a text in the log
	if !ok {
		r.wrong = append(r.wrong, fmt.Sprintf("%s %.*q is not allowed: want %s", key, maxShown, text, allowed))
	}
}

// number returns the number of an annotation, or the first of the others that is not 0.
func (r *reader) number(name string, least, most, setting, byOthers, byDefault int) int {
	text, key := r.text(name)
	if key == "" {
		return cmp.Or(setting, byOthers, byDefault)
	}
	n, err := strconv.Atoi(text)
	r.check(err == nil && n >= least && n <= most, key, text, fmt.Sprintf("%d to %d", least, most))
	return n
}

// containerPort returns the container port with a name; 0 if there is none.
func containerPort(p *corev1.Pod, name string) int {
	for _, c := range p.Spec.Containers {
		for _, port := range c.Ports {
			if port.Name == name {
				return int(port.ContainerPort)
			}
		}
	}
	return 0
}

// portLabel returns the port in a label; 0 if there is none.
func portLabel(p *corev1.Pod, label string) int {
	n, err := strconv.ParseUint(p.Labels[label], 10, 16)
	if err != nil {
		return 0
	}
	return int(n)
}
