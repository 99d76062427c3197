package main

import (
	"errors"
	"fmt"
	"os"
	"strings"

	"go.yaml.in/yaml/v3"

	ingestconfig "github.com/kvcast/kvcast/ingest/config"
)

// readWorkers reads the workers of a file of their own: a list in the form that
// the configuration has it, or a mapping with that list as its workers. An empty
// file is a mistake, as one is that somebody is writing; no workers are an empty
// list.
func readWorkers(file string, most int) ([]ingestconfig.Worker, error) {
	data, err := os.ReadFile(file)
	if err != nil {
		return nil, fmt.Errorf("read workers: %w", err)
	}
	r := &configReader{origins: make(origins)}
	r.config.Ingest.MaxWorkers = most
	r.workers(file, data)
	r.validateIngest()
	if told := r.told(); len(told) > 0 {
		return nil, errors.New(strings.Join(told, "; "))
	}
	return r.config.ingestConfig().Workers, nil
}

// workers reads a file of workers.
func (r *configReader) workers(file string, data []byte) {
	listed := false
	r.document(file, data, func(f *fileReader, n *yaml.Node) {
		list := func(n *yaml.Node, path string) {
			listed = resolved(n).Kind == yaml.SequenceNode
			f.list(f.worker)(n, path)
		}
		if resolved(n).Kind == yaml.SequenceNode {
			f.origins["workers"] = f.at(resolved(n))
			list(n, "workers")
			return
		}
		f.mapping(n, "", []field{{"workers", list}})
	})
	if !listed && len(r.mistakes) == 0 {
		r.wrong(origin{place: file}, "", "names no workers: want a list of them, alone or as workers in a mapping; [] where there are none")
	}
}
