// Package kv has the NATS KV buckets beside a journal: what the instances that share it write about themselves, and the workers that
// were registered.
//
// Values flow in under keys, and out to all processes that watch a bucket. Guarantee: a registration replaces only what its process
// has seen; and one that is lost in a directory is reported by name.
package kv

import (
	"context"
	"errors"
	"fmt"
	"strconv"
	"strings"
	"time"

	"github.com/nats-io/nats.go/jetstream"

	"github.com/kvcast/kvcast/internal/journal"
	"github.com/kvcast/kvcast/internal/journal/jetstream/internal/client"
)

// Bucket is a NATS KV bucket that the instances which use the stream share. Methods are safe for concurrent use.
type Bucket struct {
	client *client.Client
	name   string
	kv     jetstream.KeyValue
}

// Value is a value in a Bucket.
type Value struct {
	Key string
	// Revision grows with each change of any key.
	Revision uint64
	// Stored is when the servers have stored it, by their clock; see State.
	Stored time.Time
	// Data is nil if the key was deleted.
	Data []byte
}

// InstanceTTL is how long the bucket of the instances keeps what an instance has written.
const InstanceTTL = time.Minute

func instancesBucket(stream string) string { return stream + "-instances" }

// FollowInstances opens the bucket <stream>-instances, which must exist, in which each instance writes what others must know of it.
// A value is removed InstanceTTL after it was written.
func FollowInstances(ctx context.Context, c *client.Client) (*Bucket, error) {
	ctx, cancel := context.WithTimeout(ctx, client.RequestTimeout)
	defer cancel()
	kv, err := c.JS.KeyValue(ctx, instancesBucket(c.Stream))
	return instances(c, kv, err)
}

// OpenInstances is FollowInstances, and creates the bucket unless it exists.
func OpenInstances(ctx context.Context, c *client.Client) (*Bucket, error) {
	b, err := FollowInstances(ctx, c)
	if !errors.Is(err, jetstream.ErrBucketNotFound) {
		return b, err
	}
	ctx, cancel := context.WithTimeout(ctx, client.ConfigureTimeout)
	defer cancel()
	name := instancesBucket(c.Stream)
	kv, err := c.JS.CreateKeyValue(ctx, jetstream.KeyValueConfig{
		Bucket: name, Description: "Instances of kvcast.", TTL: InstanceTTL, Replicas: max(c.Replicas, 1),
	})
	if errors.Is(err, jetstream.ErrBucketExists) || errors.Is(err, jetstream.ErrStreamNameAlreadyInUse) {
		kv, err = c.CreatedBucket(ctx, name) // another instance has created it meanwhile
	}
	return instances(c, kv, err)
}

func instances(c *client.Client, kv jetstream.KeyValue, err error) (*Bucket, error) {
	name := instancesBucket(c.Stream)
	if err != nil {
		return nil, fmt.Errorf("open KV bucket %q: %w", name, err)
	}
	return &Bucket{c, name, kv}, nil
}

// ErrDenied means that the NATS user must not write a value.
var ErrDenied = errors.New("permission denied")

// Put writes a value. It does not try again. The error is an ErrDenied if the servers have denied it; they do so by a message
// of its own, which may come late: then the next Put returns it.
func (k *Bucket) Put(ctx context.Context, key string, data []byte) error {
	if _, err := k.kv.Put(ctx, key, data); err != nil {
		if denied := k.client.Denied(); denied != nil && strings.Contains(denied.Error(), strconv.Quote("$KV."+k.name+"."+key)) {
			err = fmt.Errorf("%w: %w", ErrDenied, denied)
		}
		return fmt.Errorf("write key %q of KV bucket %q: %w", key, k.name, err)
	}
	return nil
}

// Values returns the values that there are. It tries again while the servers do not answer, until ctx ends.
func (k *Bucket) Values(ctx context.Context) (all []Value, err error) {
	err = k.client.UntilAnswered(ctx, func() error {
		ctx, cancel := context.WithTimeout(ctx, client.RequestTimeout)
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

// endedPrefix begins the keys in the bucket of the instances that name epochs which an instance ends.
const endedPrefix = "ended."

// IsInstance reports whether an instance has written a key of the bucket of the instances about itself.
func IsInstance(key string) bool { return !strings.HasPrefix(key, endedPrefix) }

// EndEpoch returns nil for the first process that calls it for an epoch in a bucket of instances, also if it calls it again, and a
// journal.ErrFenced for others that call it within InstanceTTL. process is a random name.
func (k *Bucket) EndEpoch(ctx context.Context, epoch, process string) error {
	_, err := k.kv.Create(ctx, endedPrefix+epoch, []byte(process))
	if !errors.Is(err, jetstream.ErrKeyExists) {
		return err
	}
	by, err := k.kv.Get(ctx, endedPrefix+epoch)
	switch {
	case errors.Is(err, jetstream.ErrKeyNotFound):
		return fmt.Errorf("%w: the key of the epoch %q has expired", client.ErrNoAnswer, epoch)
	case err == nil && string(by.Value()) != process:
		return fmt.Errorf("%w: another instance ends the epoch %q", journal.ErrFenced, epoch)
	}
	return err
}

// Delete deletes a key.
func (k *Bucket) Delete(ctx context.Context, key string) error {
	if err := k.kv.Delete(ctx, key); err != nil {
		return fmt.Errorf("delete key %q of KV bucket %q: %w", key, k.name, err)
	}
	return nil
}

// State is the state of a KV bucket.
type State struct {
	// Now is the time of the server that stores the values.
	Now time.Time
	// Created is when the bucket was created, by the clocks of the servers.
	Created time.Time
}

// ErrNoBucket means that there is no such bucket any more.
var ErrNoBucket = errors.New("the bucket does not exist")

// State returns the state of the bucket. The error is an ErrNoBucket if the bucket was deleted. It is also an error if the NATS server
// that answers may have been replaced as the bucket's leader.
func (k *Bucket) State(ctx context.Context) (State, error) {
	s, err := k.client.JS.Stream(ctx, "KV_"+k.name)
	if errors.Is(err, jetstream.ErrStreamNotFound) {
		err = ErrNoBucket
	}
	if err == nil {
		info := s.CachedInfo() // of this call
		if err = client.HearsMajority(info.Cluster); err == nil {
			return State{info.TimeStamp, info.Created}, nil
		}
	}
	return State{}, fmt.Errorf("read the state of KV bucket %q: %w", k.name, err)
}

// Watch calls changed with the values that there are, then loaded, and then changed with each change, until ctx ends. After
// a loss of the connection, it continues; values may come again.
func (k *Bucket) Watch(ctx context.Context, changed func(Value), loaded func()) error {
	// The client stops the watcher when its context ends, and does not wait for the servers then. Its method Stop waits for them.
	ctx, stop := context.WithCancel(ctx)
	defer stop()
	w, err := k.kv.WatchAll(ctx)
	if err != nil {
		return fmt.Errorf("watch KV bucket %q: %w", k.name, err)
	}
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
