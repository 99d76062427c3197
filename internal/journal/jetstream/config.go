package jetstream

import (
	"cmp"
	"crypto/rand"
	"log/slog"
	"regexp"
	"time"

	"github.com/kvcast/kvcast/internal/journal"
)

// Defaults of Config.
const (
	DefaultStream       = "kvcast"
	DefaultSyncInterval = time.Second
	DefaultInFlight     = 512
)

// Bounds of Config.SyncInterval.
const (
	MinSyncInterval = 100 * time.Millisecond
	MaxSyncInterval = time.Hour
)

// Config configures a journal. Exactly one of Dir and Servers is set; all else has defaults. The caller has checked the values: package
// cmd/kvcast/internal/config does.
type Config struct {
	// Dir is the directory of the embedded nats-server's files. It is created if it does not exist. One process uses it at a time.
	Dir string
	// Servers are the URLs of an existing nats-server or cluster with JetStream, such as nats://host:4222 or tls://host:4222.
	Servers []string

	// Stream names the JetStream stream: 1 to 64 letters, digits, hyphens and underscores; default DefaultStream. A
	// nats-server may have several, one a kvcast.
	Stream string
	// Retention bounds the entries that Read can return, in memory, and those that the stream keeps. Its fields Epoch and After are ignored.
	Retention journal.Config
	// InFlight bounds the appends that are not acknowledged yet: 1 to 8192; default DefaultInFlight. It is below the 10,000 messages that
	// nats-server queues for a stream before it discards some.
	InFlight int

	// SyncAlways makes the embedded nats-server sync each entry to the disk before it acknowledges it.
	SyncAlways bool
	// SyncInterval is how often the embedded nats-server syncs to the disk without SyncAlways: 100 ms to 1 h; default
	// DefaultSyncInterval. A crash of the machine, not of the process, loses what was not synced.
	SyncInterval time.Duration

	// Credentials is a NATS credentials file for Servers.
	Credentials string
	// TLSCA is a file of CA certificates that Servers are verified with.
	TLSCA string
	// TLSCert and TLSKey are files of the client's certificate and key.
	TLSCert, TLSKey string
	// Follow is for a process that appends nothing to a stream of Servers. Append returns an error, and the journal changes
	// nothing on the servers.
	Follow bool
	// Instance names this process among those that use the stream of Servers: 1 to 64 letters, digits, hyphens and
	// underscores. No two processes may have the same name, nor one after the other; default: random.
	Instance string
	// Owned is called with each record of an owner in a stream of Servers, in order, before the entry is
	// visible, which waits for it. It must not call the journal's methods that wait. Default: nothing.
	Owned func(journal.Source, Owner)
	// Replicas is the number of Servers that store the stream: 1, 3 or 5; 0 means 1 for a new stream, and no change of an existing one.
	Replicas int

	// Log gets the journal's log lines, and those of the embedded nats-server at the levels Debug and Warn; default slog.Default().
	Log *slog.Logger
}

var (
	streamName = regexp.MustCompile(`^[A-Za-z0-9_-]{1,64}$`)
	serverURL  = regexp.MustCompile(`^(nats|tls)://[^\s,/]+$`)
)

// IsStream reports whether Config.Stream may have a name.
func IsStream(name string) bool { return streamName.MatchString(name) }

// IsServer reports whether a text has the form of one of Config.Servers.
func IsServer(url string) bool { return serverURL.MatchString(url) }

func (c Config) withDefaults() Config {
	c.Stream = cmp.Or(c.Stream, DefaultStream)
	c.Instance = cmp.Or(c.Instance, rand.Text())
	c.InFlight = cmp.Or(c.InFlight, DefaultInFlight)
	c.SyncInterval = cmp.Or(c.SyncInterval, DefaultSyncInterval)
	if c.Owned == nil {
		c.Owned = func(journal.Source, Owner) {}
	}
	c.Log = cmp.Or(c.Log, slog.Default())
	return c
}
