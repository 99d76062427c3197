package jetstream

import (
	"context"
	"time"

	"github.com/kvcast/kvcast/internal/journal/jetstream/internal/checkpoints"
	"github.com/kvcast/kvcast/internal/journal/jetstream/internal/client"
	"github.com/kvcast/kvcast/internal/journal/jetstream/internal/kv"
)

// What is stored beside the entries.
type (
	// Checkpoints stores data by name.
	Checkpoints = checkpoints.Checkpoints
	// Registrations stores the workers that were registered.
	Registrations = kv.Registrations
	// Object is data of Checkpoints or Registrations.
	Object = client.Object
	// KV is a bucket of values that processes watch, and Value one of them.
	KV    = kv.Bucket
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

// host is the journal of its checkpoints.
type host struct{ *Journal }

// SyncEntries implements checkpoints.Journal.
func (h host) SyncEntries() error {
	if h.server == nil || h.cfg.SyncAlways {
		return nil
	}
	return h.server.SyncMessages(h.cfg.Stream)
}

// NewestRegistration implements checkpoints.Journal.
func (h host) NewestRegistration() uint64 { return h.registrations.Newest() }

// CheckpointsStuck implements checkpoints.Journal.
func (h host) CheckpointsStuck(d time.Duration) {
	if h.server != nil {
		h.failStuck("stored no checkpoint", d)
	}
}

func (j *Journal) openCheckpoints(ctx context.Context) (err error) {
	switch {
	case j.cfg.Follow:
		j.checkpoints, err = checkpoints.Follow(ctx, j.client, host{j})
	case j.server == nil:
		j.checkpoints, err = checkpoints.Open(ctx, j.client, host{j}, 2*checkpoints.Timeout)
	default:
		j.checkpoints, err = checkpoints.Open(ctx, j.client, host{j}, 0)
	}
	return err
}

func (j *Journal) openRegistrations(ctx context.Context) (err error) {
	if j.server == nil {
		j.registrations, err = kv.OpenInServers(ctx, j.client, j.checkpoints.NewestRegistration)
	} else {
		j.registrations, err = kv.OpenInDirectory(ctx, j.client, j.cfg.Dir, j.server.SyncMessages)
	}
	return err
}
