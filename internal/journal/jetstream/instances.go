package jetstream

import (
	"context"
	"errors"
	"fmt"
	"strconv"
	"strings"
	"time"

	"github.com/nats-io/nats.go/jetstream"

	"github.com/kvcast/kvcast/internal/journal"
)

// KV is a NATS KV bucket that the instances which use the stream share. Methods are safe for concurrent use.
type KV struct {
	j    *Journal
	name string
	kv   jetstream.KeyValue
}

// Value is a value in a KV.
type Value struct {
	Key string
	// Revision grows with each change of any key.
	Revision uint64
	// Stored is when the servers have stored it, by their clock; see KVState.
	Stored time.Time
	// Data is nil if the key was deleted.
	Data []byte
}

// InstanceTTL is how long the bucket of Instances keeps what an instance has written.
const InstanceTTL = time.Minute

// Instances returns the KV bucket <stream>-instances, in which each instance writes what others must know of it. A value is
// removed a minute after it was written. With Config.Follow, the bucket must exist. Instances tries again while the servers do
// not answer, until ctx ends.
func (j *Journal) Instances(ctx context.Context) (*KV, error) {
	var kv *KV
	err := j.untilAnswered(ctx, func() (err error) {
		kv, err = j.openInstances(ctx)
		return err
	})
	return kv, err
}

func (j *Journal) openInstances(ctx context.Context) (*KV, error) {
	ctx, cancel := context.WithTimeout(ctx, requestTimeout)
	defer cancel()
	name := j.cfg.Stream + "-instances"
	kv, err := j.js.KeyValue(ctx, name)
	if errors.Is(err, jetstream.ErrBucketNotFound) && !j.cfg.Follow {
		kv, err = j.js.CreateKeyValue(ctx, jetstream.KeyValueConfig{
			Bucket: name, Description: "Instances of kvcast.", TTL: InstanceTTL, Replicas: max(j.cfg.Replicas, 1),
		})
		if errors.Is(err, jetstream.ErrBucketExists) || errors.Is(err, jetstream.ErrStreamNameAlreadyInUse) {
			kv, err = j.createdBucket(ctx, name) // another instance has created it meanwhile
		}
	}
	if err != nil {
		return nil, fmt.Errorf("open KV bucket %q: %w", name, err)
	}
	return &KV{j, name, kv}, nil
}

// createdBucket returns a KV bucket that exists. A server that has not heard of it yet has no answer.
func (j *Journal) createdBucket(ctx context.Context, name string) (jetstream.KeyValue, error) {
	kv, err := j.js.KeyValue(ctx, name)
	if errors.Is(err, jetstream.ErrBucketNotFound) {
		err = fmt.Errorf("%w: %w", errNoAnswer, err)
	}
	return kv, err
}

// KV returns the bucket of the registrations, whose keys are encoded names; see RegistrationName.
func (r *Registrations) KV() *KV { return &KV{r.j, workersBucket(r.j.cfg.Stream), r.kv} }

// RegistrationName decodes a key of Registrations.KV.
func RegistrationName(key string) (string, error) { return registrationName(key) }

// ErrDenied means that the NATS user must not write a value.
var ErrDenied = errors.New("permission denied")

// Put writes a value. It does not try again. The error is an ErrDenied if the servers have denied it; they do so by a message
// of its own, which may come late: then the next Put returns it.
func (k *KV) Put(ctx context.Context, key string, data []byte) error {
	if _, err := k.kv.Put(ctx, key, data); err != nil {
		if denied := k.j.denied.Load(); denied != nil && strings.Contains((*denied).Error(), strconv.Quote("$KV."+k.name+"."+key)) {
			err = fmt.Errorf("%w: %w", ErrDenied, *denied)
		}
		return fmt.Errorf("write key %q of KV bucket %q: %w", key, k.name, err)
	}
	return nil
}

// Values returns the values that there are. It tries again while the servers do not answer, until ctx ends.
func (k *KV) Values(ctx context.Context) (all []Value, err error) {
	err = k.j.untilAnswered(ctx, func() error {
		ctx, cancel := context.WithTimeout(ctx, requestTimeout)
		defer cancel()
		loaded := false
		all = nil
		err := k.Watch(ctx, func(v Value) {
			if v.Data != nil {
				all = append(all, v)
			}
		}, func() { loaded = true; cancel() })
		if loaded {
			err = nil
		}
		return err
	})
	return all, err
}

// endedPrefix begins the keys in the bucket of Instances that name epochs which an instance ends.
const endedPrefix = "ended."

// IsInstance reports whether an instance has written a key of the bucket of Instances about itself.
func IsInstance(key string) bool { return !strings.HasPrefix(key, endedPrefix) }

// endEpoch returns nil for the first instance that calls it for an epoch, also if it calls it again, and a journal.ErrFenced
// for others that call it within InstanceTTL.
func (j *Journal) endEpoch(ctx context.Context, epoch string) error {
	k, err := j.openInstances(ctx)
	if err != nil {
		return err
	}
	if _, err = k.kv.Create(ctx, endedPrefix+epoch, []byte(j.replies)); !errors.Is(err, jetstream.ErrKeyExists) {
		return err
	}
	by, err := k.kv.Get(ctx, endedPrefix+epoch)
	switch {
	case errors.Is(err, jetstream.ErrKeyNotFound):
		return fmt.Errorf("%w: the key of the epoch %q has expired", errNoAnswer, epoch)
	case err == nil && string(by.Value()) != j.replies: // a random subject of this process
		return fmt.Errorf("%w: another instance ends the epoch %q", journal.ErrFenced, epoch)
	}
	return err
}

// Delete deletes a key.
func (k *KV) Delete(ctx context.Context, key string) error {
	if err := k.kv.Delete(ctx, key); err != nil {
		return fmt.Errorf("delete key %q of KV bucket %q: %w", key, k.name, err)
	}
	return nil
}

// KVState is the state of a KV bucket.
type KVState struct {
	// Now is the time of the server that stores the values.
	Now time.Time
	// Created is when the bucket was created, by the clocks of the servers.
	Created time.Time
}

// ErrNoBucket means that there is no such bucket any more.
var ErrNoBucket = errors.New("the bucket does not exist")

// State returns the state of the bucket. The error is an ErrNoBucket if the bucket was deleted. It is also an error if the NATS server
// that answers may have been replaced as the bucket's leader.
func (k *KV) State(ctx context.Context) (KVState, error) {
	s, err := k.j.js.Stream(ctx, "KV_"+k.name)
	if errors.Is(err, jetstream.ErrStreamNotFound) {
		err = ErrNoBucket
	}
	if err == nil {
		info := s.CachedInfo() // of this call
		if err = hearsMajority(info.Cluster); err == nil {
			return KVState{info.TimeStamp, info.Created}, nil
		}
	}
	return KVState{}, fmt.Errorf("read the state of KV bucket %q: %w", k.name, err)
}

// Watch calls changed with the values that there are, then loaded, and then changed with each change, until ctx ends. After
// a loss of the connection, it continues; values may come again.
func (k *KV) Watch(ctx context.Context, changed func(Value), loaded func()) error {
	w, err := k.kv.WatchAll(ctx)
	if err != nil {
		return fmt.Errorf("watch KV bucket %q: %w", k.name, err)
	}
	defer func() { _ = w.Stop() }()
	for {
		select {
		case e, ok := <-w.Updates():
			switch {
			case !ok:
				return fmt.Errorf("watch KV bucket %q: interrupted", k.name)
			case e == nil:
				loaded()
			case e.Operation() == jetstream.KeyValuePut:
				changed(Value{e.Key(), e.Revision(), e.Created(), append([]byte{}, e.Value()...)})
			default:
				changed(Value{e.Key(), e.Revision(), e.Created(), nil})
			}
		case <-ctx.Done():
			return ctx.Err()
		}
	}
}
