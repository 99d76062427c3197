package serve

import (
	"cmp"
	"context"
	"fmt"
	"log/slog"
	"slices"

	"github.com/prometheus/client_golang/prometheus"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/labels"

	"github.com/kvcast/kvcast/cmd/kvcast/internal/config"
	ingestconfig "github.com/kvcast/kvcast/ingest/config"
	"github.com/kvcast/kvcast/internal/discovery"
	"github.com/kvcast/kvcast/internal/discovery/enginehttp"
	"github.com/kvcast/kvcast/internal/discovery/kubernetes"
)

// watches returns a watch for each DNS name, namespace and file of the configuration.
func watches(c *config.Config, log *slog.Logger, registry prometheus.Registerer) (all []discovery.Watch, err error) {
	if !c.Cluster.Ingest {
		return nil, nil
	}
	for i, d := range c.Discovery {
		w := discovery.Watch{Interval: d.Interval}
		switch {
		case d.File != "":
			w.Name = d.File // a worker missing in a file is removed at once
			w.Find = func(context.Context) ([]ingestconfig.Worker, error) {
				return config.ReadWorkers(d.File, c.Ingest.MaxWorkers)
			}
			all = append(all, w)
		case d.Kubernetes.Selector != "" || d.Kubernetes.Pool != "":
			pods, err := podWatches(d, c.Ingest.MaxWorkers, log)
			if err != nil {
				return nil, fmt.Errorf("discovery[%d]: %w", i, err)
			}
			all = append(all, pods...)
		default:
			w.Name, w.Grace = d.DNS, max(c.Ingest.Grace, 0)
			w.Find = discovery.DNS{Host: d.DNS, Engines: d.Engines}.Find
			all = append(all, w)
		}
	}
	// Configured workers are read from the start, unless their engines are to be asked first.
	var asked []ingestconfig.Worker
	c.Ingest.Workers = slices.DeleteFunc(c.Ingest.Workers, func(w ingestconfig.Worker) bool {
		if w.HTTP != "" {
			asked = append(asked, w)
		}
		return w.HTTP != ""
	})
	if len(asked) > 0 {
		all = append(all, discovery.Watch{
			Name: "workers with http", Find: func(context.Context) ([]ingestconfig.Worker, error) { return asked, nil },
		})
	}
	metrics := discovery.NewMetrics(registry)
	for i := range all {
		asker := &enginehttp.Asker{Find: all[i].Find, Follow: all[i].Follow, Logger: log.With("discovery", all[i].Name)}
		all[i].Find, all[i].Follow = asker.FindAsked, asker.FollowAsked
		all[i].Metrics, all[i].Logger = metrics, log
	}
	return all, nil
}

// podWatches returns a watch for each namespace, so that one that is forbidden does not affect the others.
func podWatches(d config.Discovery, maxWorkers int, log *slog.Logger) (all []discovery.Watch, err error) {
	client, err := kubernetes.NewClient(d.Kubernetes.Kubeconfig)
	if err != nil {
		return nil, err
	}
	namespaces := slices.Compact(slices.Sorted(slices.Values(d.Kubernetes.Namespaces)))
	switch {
	case len(namespaces) == 0:
		namespaces = []string{client.Namespace}
	case slices.Contains(namespaces, kubernetes.AllNamespaces):
		namespaces = []string{kubernetes.AllNamespaces}
	}
	for _, namespace := range namespaces {
		name := fmt.Sprintf("pods %s in %s", d.Kubernetes.Selector, namespace)
		if d.Kubernetes.Pool != "" {
			name = fmt.Sprintf("pods of the InferencePool %s in %s", d.Kubernetes.Pool, namespace)
		}
		if namespace == kubernetes.AllNamespaces {
			name, namespace = fmt.Sprintf("pods %s in all namespaces", d.Kubernetes.Selector), metav1.NamespaceAll
		}
		source := func(selector string, port int) *kubernetes.Source {
			return &kubernetes.Source{
				Client: client.Pods(namespace), Selector: selector, MaxWorkers: maxWorkers, Logger: log.With("discovery", name),
				Engines: kubernetes.Engines{
					Engines: d.Engines, HTTPPort: cmp.Or(d.Kubernetes.HTTPPort, port), DPSize: d.Kubernetes.DPSize, Labels: d.Kubernetes.Labels,
				},
			}
		}
		if d.Kubernetes.Pool == "" {
			s := source(d.Kubernetes.Selector, 0).Open()
			all = append(all, discovery.Watch{Name: name, Find: s.Find, Follow: s.Follow})
			continue
		}
		pool := (&kubernetes.Pool{
			Get: func(ctx context.Context) (kubernetes.PoolSpec, error) {
				return client.Pool(ctx, namespace, d.Kubernetes.Pool)
			},
			Source: func(spec kubernetes.PoolSpec) *kubernetes.Source {
				return source(labels.SelectorFromSet(spec.Labels).String(), spec.Port)
			},
			Logger: log.With("discovery", name),
		}).Open()
		all = append(all, discovery.Watch{Name: name, Find: pool.Find, Follow: pool.Follow})
	}
	return all, nil
}
