package main

import (
	"errors"
	"fmt"
	"regexp"
	"slices"
	"strconv"
	"strings"

	"github.com/kvcast/kvcast/ingest"
)

// ingestConfig reads what --worker and --bind say.
func (c *serveCmd) ingestConfig() (ingest.Config, error) {
	cfg := ingest.Config{MaxWorkers: c.MaxWorkers}
	for _, text := range c.Worker {
		w, err := parseWorker(text)
		if err != nil {
			return cfg, usageError{fmt.Errorf("--worker %s: %w", text, err)}
		}
		cfg.Workers = append(cfg.Workers, w)
	}
	for _, text := range c.Bind {
		l, err := parseListener(text)
		if err != nil {
			return cfg, usageError{fmt.Errorf("--bind %s: %w", text, err)}
		}
		cfg.Listeners = append(cfg.Listeners, l)
	}
	if err := cfg.Validate(); err != nil {
		return cfg, usageError{c.inFlags(err)}
	}
	return cfg, nil
}

// flagKeys are the names that the fields of a worker, a source and a listener
// have in flags.
var flagKeys = map[string]string{
	"Name": "name", "Model": "model", "Endpoint": "endpoint", "Engine": "engine", "Connect": "connect", "Replay": "replay",
	"DPSize": "dp_size", "Bind": "endpoint", "Topics": "topic", "Worker": "worker",
}

var flagField = regexp.MustCompile(`^(Workers|Listeners)\[(\d+)\]\.(?:Sources\[\d+\]\.)?([A-Za-z]+)`)

// inFlags says of the first field that is wrong what the config's own error says,
// in the words of the command line.
func (c *serveCmd) inFlags(err error) error {
	var field *ingest.FieldError
	if !errors.As(err, &field) {
		return err
	}
	m := flagField.FindStringSubmatch(field.Field)
	if m == nil {
		return err
	}
	flag, texts := "--worker", c.Worker
	if m[1] == "Listeners" {
		flag, texts = "--bind", c.Bind
	}
	i, _ := strconv.Atoi(m[2]) // digits, as the pattern has it
	return fmt.Errorf("%s %s: %s %q is not allowed: want %s", flag, texts[i], flagKeys[m[3]], fmt.Sprint(field.Value), field.Allowed)
}

func parseWorker(text string) (ingest.WorkerConfig, error) {
	var w ingest.WorkerConfig
	var s ingest.SourceConfig
	err := parsePairs(text, map[string]func(string) error{
		"name":     into(&w.Name),
		"model":    into(&w.Model),
		"endpoint": into(&w.Endpoint),
		"connect":  into(&s.Connect),
		"replay":   into(&s.Replay),
		"topic":    into(&s.Topic),
		"engine":   into((*string)(&s.Engine)),
		"block_size": func(v string) error {
			n, err := strconv.ParseUint(v, 10, 32)
			w.BlockSize = uint32(n)
			return err
		},
		"dp_size": func(v string) (err error) { s.DPSize, err = strconv.Atoi(v); return err },
	})
	w.Sources = []ingest.SourceConfig{s}
	return w, err
}

func parseListener(text string) (ingest.ListenerConfig, error) {
	endpoint, rest, more := strings.Cut(text, ",")
	l := ingest.ListenerConfig{Bind: endpoint}
	if !more {
		return l, nil
	}
	topic := ""
	err := parsePairs(rest, map[string]func(string) error{
		"engine": into((*string)(&l.Engine)),
		"worker": into(&l.Worker),
		"topic":  into(&topic),
	})
	if topic != "" {
		l.Topics = []string{topic}
	}
	return l, err
}

func into(s *string) func(string) error {
	return func(v string) error { *s = v; return nil }
}

// parsePairs reads key=value pairs between commas.
func parsePairs(text string, keys map[string]func(string) error) error {
	seen := make(map[string]bool)
	for pair := range strings.SplitSeq(text, ",") {
		key, value, ok := strings.Cut(pair, "=")
		set := keys[key]
		if seen[key] {
			return fmt.Errorf("%q is not allowed: %s is given twice", pair, key)
		}
		seen[key] = true
		if !ok || set == nil {
			return fmt.Errorf("%q is not allowed: want KEY=VALUE with a key among %s", pair, strings.Join(sortedKeys(keys), ", "))
		}
		if err := set(value); err != nil {
			return fmt.Errorf("%s: %q is not allowed: want a whole number", key, value)
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

// byteSize is a number of bytes, written such as 64MiB.
type byteSize int64

var byteUnits = []struct {
	suffix string
	bytes  int64
}{
	{"KiB", 1 << 10}, {"MiB", 1 << 20}, {"GiB", 1 << 30}, {"B", 1}, {"", 1},
}

// UnmarshalText implements encoding.TextUnmarshaler.
func (b *byteSize) UnmarshalText(text []byte) error {
	const least, most = 1 << 20, 1 << 40
	for _, unit := range byteUnits {
		digits, ok := strings.CutSuffix(string(text), unit.suffix)
		if !ok {
			continue
		}
		n, err := strconv.ParseInt(digits, 10, 64)
		if err == nil && n >= 0 && n <= most/unit.bytes && n*unit.bytes >= least {
			*b = byteSize(n * unit.bytes)
			return nil
		}
		break
	}
	return fmt.Errorf("%q is not allowed: want 1MiB to 1024GiB, such as 64MiB", text)
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
