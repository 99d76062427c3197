package jetstream

import (
	"context"
	"time"

	"github.com/kvcast/kvcast/internal/journal/jetstream/internal/checkpoints"
	"github.com/kvcast/kvcast/internal/journal/jetstream/internal/client"
	"github.com/kvcast/kvcast/internal/journal/jetstream/internal/entry"
	"github.com/kvcast/kvcast/internal/journal/jetstream/internal/kv"
)

// What is stored.
type (
	// Entry is an entry as Load reads it.
	Entry = entry.Entry
	// Owner is who owns a worker.
	Owner = entry.Owner
	// Checkpoints stores data by name.
	Checkpoints = checkpoints.Checkpoints
	// Registrations stores the workers that were registered.
	Registrations = kv.Registrations
	// Object is data of Checkpoints or Registrations.
	Object = client.Object
	// KV is a bucket of values that processes watch.
	KV = kv.Bucket
	// Value is one of them.
	Value = kv.Value
)

// InstanceTTL is how long the bucket of Instances keeps what an instance has written.
const InstanceTTL = kv.InstanceTTL

// Errors of the stores.
var (
	// ErrUnanswered means that the servers do not answer, so that it is not known what they have.
	ErrUnanswered = client.ErrUnanswered
	// ErrChanged means that another process has written a registration meanwhile.
	ErrChanged = kv.ErrChanged
	// ErrDenied means that the NATS user must not write a value.
	ErrDenied = kv.ErrDenied
	// ErrNoBucket means that there is no such bucket any more.
	ErrNoBucket = kv.ErrNoBucket
)

// IsInstance reports whether an instance has written a key of the bucket of Instances about itself.
func IsInstance(key string) bool { return kv.IsInstance(key) }

// RegistrationName decodes a key of Registrations.KV.
func RegistrationName(key string) (string, error) { return kv.RegistrationName(key) }

// Checkpoints returns the journal's checkpoints.
func (j *Journal) Checkpoints() *Checkpoints { return j.checkpoints }

// Registrations returns the journal's registrations; nil with Config.Follow.
func (j *Journal) Registrations() *Registrations { return j.registrations }

// Instances returns the KV bucket <stream>-instances, in which each instance writes what others must know of it. A value is
// removed a minute after it was written. With Config.Follow, the bucket must exist. Instances tries again while the servers do
// not answer, until ctx ends.
func (j *Journal) Instances(ctx context.Context) (bucket *KV, err error) {
	open := kv.OpenInstances
	if j.cfg.Follow {
		open = kv.FollowInstances
	}
	err = j.client.UntilAnswered(ctx, func() error {
		bucket, err = open(ctx, j.client)
		return err
	})
	return bucket, err
}

// durability is what the checkpoints need of a mode; see checkpoints.Journal.
type durability interface {
	SyncEntries() error
	CheckpointsStuck(after time.Duration)
}

// host is the journal of its checkpoints.
type host struct {
	*Journal
	durability
}

func (j *Journal) host(d durability) host { return host{j, d} }

func (h host) NewestRegistration() uint64 { return h.registrations.Newest() }
