package config

import (
	"fmt"
	"strings"
	"time"

	ingestconfig "github.com/kvcast/kvcast/ingest/config"
	"github.com/kvcast/kvcast/internal/journal"
	"github.com/kvcast/kvcast/internal/journal/jetstream"
	"github.com/kvcast/kvcast/pipeline"
)

// Journal is where the journal is kept, and for how long.
type Journal struct {
	// Store is memory, file:DIR, or URLs of NATS servers, separated by commas.
	Store string
	// Sync is how often files are synced to the disk; 0: before each entry is acknowledged.
	Sync time.Duration
	// Stream and Replicas are those of NATS.
	Stream   string
	Replicas int
	// Credentials, CA, Cert and Key are files for the connection to NATS servers; empty: none.
	Credentials, CA, Cert, Key string
	// Retention bounds the entries that routers can resume from.
	Retention journal.Config
}

const (
	storeMemory     = "memory"
	storeFilePrefix = "file:"
	// defaultSync is the default of Journal.Sync.
	defaultSync        = time.Second
	minCheckpointBytes = 64 << 10
)

// Dir returns the directory of a journal in files; "" for any other.
func (j *Journal) Dir() string {
	dir, ok := strings.CutPrefix(j.Store, storeFilePrefix)
	if !ok {
		return ""
	}
	return dir
}

// Servers returns the URLs of the NATS servers; none for a journal in memory or files.
func (j *Journal) Servers() []string {
	if j.Store == storeMemory || j.Dir() != "" {
		return nil
	}
	return strings.Split(j.Store, ",")
}

// Durable reports whether the journal survives the process.
func (j *Journal) Durable() bool { return j.Store != storeMemory }

func isStore(s string) bool {
	if dir, ok := strings.CutPrefix(s, storeFilePrefix); ok {
		return dir != "" && ingestconfig.Printable(dir)
	}
	for _, url := range strings.Split(s, ",") {
		if s != storeMemory && !jetstream.IsServer(url) {
			return false
		}
	}
	return true
}

func (c *Config) journalFields() mapping {
	j := &c.Journal
	store := text(&j.Store, storeMemory, isStore, "memory, file:DIR, or nats://HOST:PORT (or tls://HOST:PORT), several separated by commas")
	store.namesSection = true
	parseSync := func(s string) (time.Duration, bool) {
		if s == "always" {
			return 0, true
		}
		d, err := time.ParseDuration(s)
		return d, err == nil && d >= jetstream.MinSyncInterval && d <= jetstream.MaxSyncInterval
	}
	formatSync := func(d time.Duration) string {
		if d == 0 {
			return "always"
		}
		return durationText(d)
	}
	return mapping{
		{"store", store,
			"Where the journal is: memory, which ends with the process; file:DIR, files of this server; or nats://HOST:PORT,..., NATS servers with JetStream. With file and nats, a restart continues where the server ended."},
		{"sync", newValue(&j.Sync, jetstream.DefaultSyncInterval, "always, or 100ms to 1h", parseSync, formatSync),
			"How often a journal in files is synced to the disk: always, or an interval of 100ms to 1h. A crash of the machine, not of the server, loses what is not synced."},
		{"checkpoint_bytes", size(&c.Pipeline.CheckpointBytes, pipeline.DefaultCheckpointBytes, minCheckpointBytes, maxBytes),
			"Size of entries after which checkpoints are written, at least 64KiB. A restart reads about as many bytes of entries."},
		{"stream", text(&j.Stream, jetstream.DefaultStream, jetstream.IsStream, "1 to 64 letters, digits, - or _"),
			"Name of the stream in NATS."},
		{"replicas", newReplicas(&j.Replicas),
			"Number of NATS servers that store the stream: 1, 3 or 5."},
		{"credentials", fileName(&j.Credentials, ingestconfig.Printable),
			"Credentials file for the NATS servers."},
		{"tls_ca", fileName(&j.CA, ingestconfig.Printable),
			"File of the CA certificates, in PEM, that the NATS servers are verified with."},
		{"tls_cert", fileName(&j.Cert, ingestconfig.Printable),
			"File of the client certificate for the NATS servers, in PEM."},
		{"tls_key", fileName(&j.Key, ingestconfig.Printable),
			"File of the client certificate's key, in PEM."},
		{"max_bytes", size(&j.Retention.MaxBytes, journal.DefaultMaxBytes, minBytes, maxBytes),
			"Memory for entries that subscribers can resume from. A journal in files or NATS keeps those entries there too."},
		{"max_age", duration(&j.Retention.MaxAge, journal.DefaultMaxAge, time.Second, unlimited),
			"Maximum age of a retained entry."},
	}
}

func newReplicas(to *int) *value {
	v := number(to, 1, 5)
	set := v.set
	v.want, v.set = "1, 3 or 5", func(s string) bool { return (s == "1" || s == "3" || s == "5") && set(s) }
	return v
}

// validateJournal requires that settings for NATS servers or for files are given with such a store.
func (r *reader) validateJournal() {
	j := &r.config.Journal
	if !r.config.Cluster.Ingest && len(j.Servers()) == 0 && !r.isWrong("journal.store") {
		r.wrongGiven("cluster.ingest", fmt.Sprintf("\"false\" is not allowed with the journal in %s: want a journal in NATS servers, set with --journal", j.Store))
	}
	if !r.config.Cluster.Serve && len(j.Servers()) == 0 && !r.isWrong("journal.store") {
		r.wrongGiven("cluster.serve", fmt.Sprintf("\"false\" is not allowed with the journal in %s: want a journal in NATS servers, set with --journal", j.Store))
	}
	if !r.config.Cluster.Serve && !r.config.Cluster.Ingest {
		r.wrongGiven("cluster.serve", notAllowed("false", "true where cluster.ingest is false"))
	}
	for _, f := range r.config.journalFields() {
		path, want := join("journal", f.key), ""
		switch f.key {
		case "sync":
			if j.Dir() == "" {
				want = "file:DIR"
			}
		case "checkpoint_bytes":
			if !j.Durable() {
				want = "file:DIR or NATS servers"
			}
		case "stream", "replicas", "credentials", "tls_ca", "tls_cert", "tls_key":
			if len(j.Servers()) == 0 {
				want = "NATS servers"
			}
		}
		v := f.node.(*value)
		if want != "" && v.text() != v.initial && !r.isWrong(path) && !r.isWrong("journal.store") {
			r.wrongGiven(path, fmt.Sprintf("%q is not allowed with the journal in %s: want a journal in %s, set with --journal", v.text(), j.Store, want))
		}
	}
}
