package kv

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"iter"
	"strings"
	"sync"
	"time"

	"github.com/nats-io/nats.go/jetstream"

	"github.com/kvcast/kvcast/internal/journal/jetstream/internal/client"
)

// Registrations stores the workers that were registered, by name, in the NATS KV bucket <stream>-workers. The key is the
// worker's name, with each byte that is no letter, digit, hyphen or underscore as =XX; a lone = is the empty name. Every
// process that uses the stream may write to it, and watch it. Discard keeps it. Methods are safe for concurrent use.
type Registrations struct {
	client *client.Client
	kv     jetstream.KeyValue
	stream jetstream.Stream
	prefix string // of the subjects
	keys   keys

	mu sync.Mutex // guards all below
	// revisions are those of the keys that this process has read or written.
	revisions map[string]uint64
	// last is the newest revision that the bucket must have.
	last uint64
}

// keys are those that must be in the bucket of a directory, since nats-server does not report that damaged files have lost some.
type keys interface {
	// stored makes a key that was written survive a crash of the machine, and requires it.
	stored(key string) error
	// removing is called before a key is removed, which is not required from then on.
	removing(key string) error
	// required reports whether a key must be there.
	required(key string) bool
	// missing returns the keys that must be there, and are not among the subjects with a prefix.
	missing(prefix string, subjects map[string]uint64) []string
}

// serverKeys are the keys in servers, which keep what they have acknowledged: none is required.
type serverKeys struct{}

func (serverKeys) stored(string) error                        { return nil }
func (serverKeys) removing(string) error                      { return nil }
func (serverKeys) required(string) bool                       { return false }
func (serverKeys) missing(string, map[string]uint64) []string { return nil }

// errKey means that a key is not one of kvcast.
var errKey = errors.New("the key is not the encoded name of a worker")

// ErrChanged means that another process has written a registration meanwhile.
var ErrChanged = errors.New("another process has changed it")

// errLost means that a registration is gone that was not removed.
var errLost = errors.New("it is lost, because files are damaged")

// deletedTTL is how long the bucket keeps the record of a deletion, for those that watch it.
const deletedTTL = time.Hour

func workersBucket(stream string) string { return stream + "-workers" }

// WorkersStream names the stream of the registrations of a journal.
func WorkersStream(stream string) string { return "KV_" + workersBucket(stream) }

// OpenInServers opens the registrations of a journal in servers, and creates the bucket unless it exists. It logs an error if the
// bucket has lost its newest revisions, as far as seen has the newest.
func OpenInServers(ctx context.Context, c *client.Client, seen func(context.Context) (uint64, error)) (*Registrations, error) {
	r, err := open(ctx, c, serverKeys{})
	if err != nil {
		return nil, err
	}
	newest, err := seen(ctx)
	if err != nil {
		return nil, err
	}
	if newest > r.last {
		c.Log.Error("The NATS servers have lost the newest changes of registrations: register workers that are missing again.",
			"bucket", workersBucket(c.Stream), "first", r.last+1, "last", newest)
	}
	return r, nil
}

// OpenInDirectory opens the registrations of a journal in a directory, and creates the bucket unless it exists, or if it is damaged. sync
// makes the messages of a stream survive a crash of the machine.
func OpenInDirectory(ctx context.Context, c *client.Client, dir string, sync func(stream string) error) (*Registrations, error) {
	keys, err := readKeys(dir, func() error { return sync(WorkersStream(c.Stream)) })
	if err != nil {
		return nil, err
	}
	r, err := open(ctx, c, keys)
	if err != nil {
		return nil, err
	}
	ctx, cancel := context.WithTimeout(ctx, client.RequestTimeout)
	defer cancel()
	return r, r.repair(ctx)
}

// open opens the bucket, and creates it unless it exists.
func open(ctx context.Context, c *client.Client, k keys) (*Registrations, error) {
	ctx, cancel := context.WithTimeout(ctx, client.ConfigureTimeout)
	defer cancel()
	name, prefix := workersBucket(c.Stream), "$KV."+workersBucket(c.Stream)+"."
	s, err := c.OpenStream(ctx, WorkersStream(c.Stream))
	if errors.Is(err, jetstream.ErrStreamNotFound) {
		s, err = create(ctx, c, 0)
	} else if err == nil && c.Replicas != 0 && s.CachedInfo().Config.Replicas != c.Replicas {
		config := s.CachedInfo().Config
		config.Replicas = c.Replicas
		s, err = c.JS.UpdateStream(ctx, config)
	}
	r := &Registrations{client: c, stream: s, prefix: prefix, keys: k, revisions: make(map[string]uint64)}
	if err == nil {
		r.kv, err = c.CreatedBucket(ctx, name)
	}
	if err != nil {
		return nil, fmt.Errorf("open KV bucket %q: %w", name, err)
	}
	r.last = s.CachedInfo().State.LastSeq
	return r, nil
}

// create creates the stream of the bucket, whose first revision will be first, or 1 if that is 0: as the KV store of nats.go does, but all reads go to the leader,
// which has the newest value.
func create(ctx context.Context, c *client.Client, first uint64) (jetstream.Stream, error) {
	return c.JS.CreateStream(ctx, jetstream.StreamConfig{
		Name:              WorkersStream(c.Stream),
		Description:       "Workers registered with kvcast.",
		Subjects:          []string{"$KV." + workersBucket(c.Stream) + ".>"},
		Storage:           jetstream.FileStorage,
		Discard:           jetstream.DiscardNew,
		MaxMsgsPerSubject: 1,
		Replicas:          max(c.Replicas, 1),
		AllowRollup:       true,
		DenyDelete:        true,
		AllowMsgTTL:       true,
		FirstSeq:          first,
	})
}

// Recreate creates the bucket again, which was deleted: it is empty, and its revisions continue.
func (r *Registrations) Recreate(ctx context.Context) error {
	_, err := create(ctx, r.client, r.Newest()+1)
	if errors.Is(err, jetstream.ErrStreamNameAlreadyInUse) { // another process has created it
		return nil
	}
	return err
}

// KV returns the bucket of the registrations, whose keys are encoded names; see RegistrationName.
func (r *Registrations) KV() *Bucket { return &Bucket{r.client, workersBucket(r.client.Stream), r.kv} }

// repair replaces the bucket if it is damaged, since nats-server may not write to it any more. What is lost is still reported by All.
func (r *Registrations) repair(ctx context.Context) error {
	damaged := false
	var left []client.Object
	for object, err := range r.All(ctx) {
		if err == nil {
			left = append(left, object)
		}
		damaged = damaged || err != nil && object.Name != "" && !errors.Is(err, errKey)
	}
	if !damaged {
		return nil
	}
	config := r.stream.CachedInfo().Config
	if err := r.client.JS.DeleteStream(ctx, config.Name); err != nil {
		return err
	}
	var err error
	if r.stream, err = r.client.JS.CreateStream(ctx, config); err != nil {
		return err
	}
	clear(r.revisions)
	for _, object := range left {
		if err := r.Put(ctx, object.Name, object.Data); err != nil {
			return err
		}
	}
	return nil
}

// Put stores data under a worker's name, and replaces what this process has read or written there. The error is an
// ErrChanged if there is something else.
func (r *Registrations) Put(ctx context.Context, name string, data []byte) error {
	ctx, cancel := context.WithTimeout(ctx, client.RequestTimeout)
	defer cancel()
	key := registrationKey(name)
	err := r.put(ctx, key, data)
	if err == nil {
		err = r.keys.stored(key)
	}
	if err != nil {
		return fmt.Errorf("write registration %q: %w", name, r.cause(err))
	}
	return nil
}

// Restore stores data under a worker's name unless the bucket has, or had, something there: a worker that was deregistered stays so. It is for a
// bucket that was created again.
func (r *Registrations) Restore(ctx context.Context, name string, data []byte) error {
	ctx, cancel := context.WithTimeout(ctx, client.RequestTimeout)
	defer cancel()
	key := registrationKey(name)
	ack, err := r.client.JS.Publish(ctx, r.prefix+key, data, jetstream.WithExpectLastSequencePerSubject(0))
	switch {
	case client.IsWrongLastSeq(err):
		return nil
	case err != nil:
		return fmt.Errorf("restore registration %q: %w", name, r.cause(err))
	}
	r.see(key, ack.Sequence)
	return r.keys.stored(key)
}

func (r *Registrations) put(ctx context.Context, key string, data []byte) error {
	r.mu.Lock()
	revision := r.revisions[key]
	r.mu.Unlock()
	var err error
	if revision == 0 {
		revision, err = r.kv.Create(ctx, key, data)
	} else {
		revision, err = r.kv.Update(ctx, key, data, revision)
	}
	if errors.Is(err, jetstream.ErrKeyExists) || client.IsWrongLastSeq(err) {
		e, getErr := r.kv.Get(ctx, key)
		switch apiErr := (*jetstream.APIError)(nil); {
		case errors.Is(getErr, jetstream.ErrKeyNotFound) && revision != 0: // another process has deleted it
			revision, err = r.kv.Create(ctx, key, data)
		case getErr == nil && bytes.Equal(e.Value(), data): // an earlier attempt has stored it, and its answer did not come
			revision, err = e.Revision(), nil
		case errors.As(getErr, &apiErr) && !errors.Is(getErr, jetstream.ErrKeyNotFound): // it is damaged
			revision, err = r.kv.Put(ctx, key, data)
		default:
			return errors.Join(ErrChanged, getErr)
		}
	}
	if err == nil {
		r.see(key, revision)
	}
	return err
}

// see records the revision of a key; 0: it was deleted.
func (r *Registrations) see(key string, revision uint64) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.revisions[key] = revision
	r.last = max(r.last, revision)
}

// Newest returns the newest revision that the bucket must have.
func (r *Registrations) Newest() uint64 {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.last
}

// Delete removes the data of a worker, if there is any.
func (r *Registrations) Delete(ctx context.Context, name string) error {
	ctx, cancel := context.WithTimeout(ctx, client.RequestTimeout)
	defer cancel()
	key := registrationKey(name)
	if err := r.keys.removing(key); err != nil {
		return err
	}
	// Also if there is nothing: another instance may be about to restore it.
	if err := r.kv.Purge(ctx, key, jetstream.PurgeTTL(deletedTTL)); err != nil {
		return fmt.Errorf("delete registration %q: %w", name, r.cause(err))
	}
	r.see(key, 0)
	return nil
}

// cause returns an error that names the bucket if it is full.
func (r *Registrations) cause(err error) error {
	if description, ok := client.RefusedForSpace(err); ok {
		return r.client.NoSpace(context.Background(), WorkersStream(r.client.Stream), description)
	}
	return err
}

// All returns all registrations, in no particular order. If one cannot be read or is lost, All yields its name and an error,
// and continues with the next. If they cannot be listed, All yields an error without a name, and ends.
func (r *Registrations) All(ctx context.Context) iter.Seq2[client.Object, error] {
	return func(yield func(client.Object, error) bool) {
		info, err := r.stream.Info(ctx, jetstream.WithSubjectFilter(r.prefix+">"))
		if err != nil {
			yield(client.Object{}, fmt.Errorf("list registrations: %w", err))
			return
		}
		keys := r.keys.missing(r.prefix, info.State.Subjects)
		for subject := range info.State.Subjects {
			keys = append(keys, strings.TrimPrefix(subject, r.prefix))
		}
		for _, key := range keys {
			name, err := RegistrationName(key)
			var data []byte
			if err == nil {
				data, err = r.read(ctx, key)
			}
			if err == nil && data == nil {
				continue // it was deleted
			}
			if err != nil {
				err = fmt.Errorf("read key %q of KV bucket %q: %w", key, workersBucket(r.client.Stream), err)
			}
			if !yield(client.Object{Name: name, Data: data}, err) {
				return
			}
		}
	}
}

// read returns the data of a key; nil if it was deleted.
func (r *Registrations) read(ctx context.Context, key string) ([]byte, error) {
	ctx, cancel := context.WithTimeout(ctx, client.RequestTimeout)
	defer cancel()
	e, err := r.kv.Get(ctx, key)
	switch {
	case errors.Is(err, jetstream.ErrKeyNotFound) && r.keys.required(key):
		err = errLost
	case errors.Is(err, jetstream.ErrKeyNotFound):
		err = nil
	}
	if err != nil || e == nil {
		return nil, err
	}
	r.see(key, e.Revision())
	return append([]byte{}, e.Value()...), nil
}

// registrationKey encodes any name, injectively, as a key of NATS KV, in which % is not allowed.
func registrationKey(name string) string { return strings.ReplaceAll(client.Escape(name), "%", "=") }

// RegistrationName decodes a key. What is no key of a registration is its own name, with an error.
func RegistrationName(key string) (string, error) {
	name, err := client.Unescape(strings.ReplaceAll(key, "=", "%"))
	if err != nil || registrationKey(name) != key {
		return key, errKey
	}
	return name, nil
}
