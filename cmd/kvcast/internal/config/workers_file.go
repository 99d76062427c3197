package config

import (
	"errors"
	"fmt"
	"os"
	"strings"

	"go.yaml.in/yaml/v3"

	ingestconfig "github.com/kvcast/kvcast/ingest/config"
)

// CheckWorkerFiles returns what is wrong with the files in which discovery finds workers.
func (c *Config) CheckWorkerFiles() error {
	var errs []error
	for _, d := range c.Discovery {
		if d.File != "" {
			_, err := ReadWorkers(d.File, c.Ingest.MaxWorkers)
			errs = append(errs, err)
		}
	}
	return errors.Join(errs...)
}

// ReadWorkers reads a file that lists workers, up to a limit: a list as in the configuration, or a mapping
// with that list under workers. An empty file is a mistake, since it may be incompletely written; a file for
// no workers has an empty list.
func ReadWorkers(file string, most int) ([]ingestconfig.Worker, error) {
	data, err := os.ReadFile(file)
	if err != nil {
		return nil, fmt.Errorf("read workers: %w", err)
	}
	r := newReader()
	r.config.Ingest.MaxWorkers = most
	isList := false
	r.document(file, data, func(f *fileReader, n *yaml.Node) {
		workers := listOf(&r.config.Ingest.Workers, workerFields)
		n = resolve(n)
		if isList = n.Kind == yaml.SequenceNode; isList {
			f.origins["workers"] = f.at(n)
			workers.read(f, n, "workers")
			return
		}
		isList = n.Kind == yaml.MappingNode && len(n.Content) == 2 && resolve(n.Content[1]).Kind == yaml.SequenceNode
		mapping{{key: "workers", node: workers}}.read(f, n, "")
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
