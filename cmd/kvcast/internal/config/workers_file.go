package config

import (
	"errors"
	"fmt"
	"io"
	"os"
	"strings"

	"go.yaml.in/yaml/v3"

	ingestconfig "github.com/kvcast/kvcast/ingest/config"
	"github.com/kvcast/kvcast/internal/discovery/kubernetes"
)

// CheckDiscovery returns the mistakes in the files of workers and in kubeconfig files, and warnings of the workers in the
// configuration and in the files. Those whose engines are asked are complete only when these have answered.
func (c *Config) CheckDiscovery() (warnings []string, err error) {
	var errs []error
	var sockets ingestconfig.SocketSet
	check := func(workers []ingestconfig.Worker, file string) {
		for _, w := range workers {
			if w.HTTP != "" {
				continue
			}
			for _, field := range ingestconfig.FieldErrors(sockets.Add(w)) {
				path := strings.TrimPrefix(field.Path(), "workers[0].")
				errs = append(errs, fmt.Errorf("%s: worker %q: %s: %s", file, w.Name, path, notAllowed(field.Value, field.Allowed)))
			}
			for _, warning := range w.Warnings() {
				warnings = append(warnings, fmt.Sprintf("worker %q: %s", w.Name, warning))
			}
		}
	}
	check(c.Ingest.Workers, "")
	for i, d := range c.Discovery {
		if d.File != "" {
			workers, err := ReadWorkers(d.File, c.Ingest.MaxWorkers)
			errs = append(errs, err)
			check(workers, d.File)
		}
		if file := d.Kubernetes.Kubeconfig; file != "" {
			if _, err := kubernetes.NewClient(file); err != nil {
				errs = append(errs, fmt.Errorf("discovery[%d]: %w", i, err))
			}
		}
	}
	return warnings, errors.Join(errs...)
}

// A file of workers may have bytesPerWorker for each worker that is allowed, and minWorkersBytes at least.
const bytesPerWorker, minWorkersBytes = 1 << 10, 1 << 20

// maxLoggedMistakes bounds the mistakes in the error of ReadWorkers, which becomes a log line.
const maxLoggedMistakes = 10

// readWorkersFile returns the text of a file of workers.
func readWorkersFile(file string, workers int) ([]byte, error) {
	f, err := os.Open(file)
	if err != nil {
		return nil, err
	}
	defer func() { _ = f.Close() }() // nothing is written
	most := max(bytesPerWorker*workers, minWorkersBytes)
	text, err := io.ReadAll(io.LimitReader(f, int64(most)+1))
	if err == nil && len(text) > most {
		err = fmt.Errorf("%s has more than %d KiB: want at most %d KiB for %d workers, which ingest.max_workers allows", file, most>>10, most>>10, workers)
	}
	return text, err
}

// ReadWorkers reads a file with at most the given number of workers. The file is a list as under the key workers of the configuration, or a
// mapping with that key alone. An empty file is an error, since it may be incompletely written; use [] for no workers.
func ReadWorkers(file string, most int) ([]ingestconfig.Worker, error) {
	data, err := readWorkersFile(file, most)
	if err != nil {
		return nil, fmt.Errorf("read workers: %w", err)
	}
	r := newReader()
	r.mostMistakes = maxLoggedMistakes
	r.config.Ingest.MaxWorkers = most
	isList := false
	r.document(file, data, func(n *yaml.Node) {
		workers := listOf(&r.config.Ingest.Workers, workerFields).atMost(most)
		n = resolve(n)
		if isList = n.Kind == yaml.SequenceNode; isList {
			r.origins["workers"] = r.at(n)
			workers.read(r, n, "workers")
			return
		}
		isList = n.Kind == yaml.MappingNode && len(n.Content) == 2 && resolve(n.Content[1]).Kind == yaml.SequenceNode
		mapping{{key: "workers", node: workers}}.read(r, n, "")
	})
	if !isList && len(r.mistakes) == 0 {
		r.wrong(origin{place: file}, "", "names no workers: want a list of them, by itself or under workers; [] if there are none")
	}
	r.validateIngest()
	if len(r.mistakes) > 0 {
		return nil, errors.New(strings.Join(r.messages(), "; "))
	}
	return r.config.Ingest.Workers, nil
}
