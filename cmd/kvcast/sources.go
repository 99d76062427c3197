package main

import (
	"cmp"
	"fmt"
	"maps"
	"slices"
	"strconv"
	"strings"

	ingestconfig "github.com/kvcast/kvcast/ingest/config"
)

// ingestConfig is what ingest reads. There, zero stands for the default, and
// something negative for none.
func (c config) ingestConfig() ingestconfig.Config {
	cfg := ingestconfig.Config{
		MaxWorkers: c.Ingest.MaxWorkers, MaxSources: c.Ingest.MaxSources, MaxRanks: c.Ingest.MaxRanks, WorkerBytes: int64(c.Ingest.WorkerBytes), SaltBytes: int64(c.Ingest.SaltBytes),
		ReceiveBufferBytes: int64(c.Ingest.ReceiveBufferBytes), ReorderBufferBytes: int64(c.Ingest.ReorderBufferBytes),
		Silence: cmp.Or(c.Ingest.Silence, -1), Grace: cmp.Or(c.Ingest.Grace, -1),
	}
	for _, w := range c.Workers {
		worker := ingestconfig.Worker{Name: w.Name, Model: w.Model, BlockSize: w.BlockSize, Endpoint: w.Endpoint, Consolidate: w.Consolidate, Labels: maps.Clone(w.Labels)}
		for _, s := range w.Sources {
			worker.Sources = append(worker.Sources, ingestconfig.Source{
				Engine: s.Engine, Connect: s.Connect, Replay: s.Replay, DPSize: s.DPSize, Topic: s.Topic, Copies: s.Copies,
			})
		}
		cfg.Workers = append(cfg.Workers, worker)
	}
	for _, l := range c.Listeners {
		cfg.Listeners = append(cfg.Listeners, ingestconfig.Listener{
			Bind: l.Bind, Engine: l.Engine, Copies: l.Copies, Topics: l.Topics, ReplayHosts: l.ReplayHosts, Worker: l.Worker, ReplayPort: cmp.Or(l.ReplayPort, -1),
		})
	}
	return cfg
}

// addWorker adds the worker that a --worker describes.
func (r *configReader) addWorker(at origin, text string) {
	w, s := defaultWorker(), defaultSource()
	if err := parsePairs(text, append(w.settings(), s.settings()...)); err != nil {
		r.wrong(at, "", err.Error())
		return
	}
	w.Sources = []sourceConfig{s}
	r.origins[fmt.Sprintf("workers[%d]", len(r.config.Workers))] = at
	r.config.Workers = append(r.config.Workers, w)
}

// addListener adds the listener that a --bind describes: an endpoint, and what
// else there is to say of it.
func (r *configReader) addListener(at origin, endpoint string) {
	l := defaultListener()
	topic, replayHost := "", ""
	pairs := "bind=" + endpoint
	settings := append(l.settings(), text("topic", &topic, printable, "a pattern such as kv@*"),
		text("replay_host", &replayHost, printable, "a host such as 10.0.0.0/8"))
	if err := parsePairs(pairs, settings); err != nil {
		r.wrong(at, "", err.Error())
		return
	}
	if topic != "" {
		l.Topics = []string{topic}
	}
	if replayHost != "" {
		l.ReplayHosts = []string{replayHost}
	}
	r.origins[fmt.Sprintf("listeners[%d]", len(r.config.Listeners))] = at
	r.config.Listeners = append(r.config.Listeners, l)
}

// parsePairs reads key=value pairs between commas.
func parsePairs(text string, settings []setting) error {
	byKey := make(map[string]setting)
	for _, s := range settings {
		if !s.fixed {
			byKey[s.key] = s
		}
	}
	seen := make(map[string]bool)
	for pair := range strings.SplitSeq(text, ",") {
		key, value, ok := strings.Cut(pair, "=")
		if seen[key] {
			return fmt.Errorf("%q is not allowed: %s is given twice", pair, key)
		}
		seen[key] = true
		s, known := byKey[key]
		if !ok || !known {
			return fmt.Errorf("%q is not allowed: want KEY=VALUE with a key among %s", pair, strings.Join(sortedKeys(byKey), ", "))
		}
		if err := s.set(value); err != nil {
			return fmt.Errorf("%s %w", key, err)
		}
	}
	return nil
}

func sortedKeys[V any](m map[string]V) []string {
	keys := make([]string, 0, len(m))
	for k := range m {
		keys = append(keys, k)
	}
	slices.Sort(keys)
	return keys
}

// portAfter returns a tcp endpoint with a port that is n higher; a port left
// open (* or 0), and any other endpoint when n is 0, stays as it is.
func portAfter(endpoint string, n int) (string, error) {
	i := strings.LastIndexByte(endpoint, ':')
	port := endpoint[i+1:]
	if n == 0 || port == "*" || port == "0" {
		return endpoint, nil
	}
	first, err := strconv.ParseUint(port, 10, 16)
	if !strings.HasPrefix(endpoint, "tcp://") || err != nil || int(first)+n > 65535 {
		return "", fmt.Errorf("%q is not allowed for several engines: want tcp://HOST:PORT whose port has %d more above it", endpoint, n)
	}
	return fmt.Sprintf("%s%d", endpoint[:i+1], int(first)+n), nil
}
