package jetstream

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"iter"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/nats-io/nats.go/jetstream"
)

// keysName is a file in Config.Dir that has the keys of the registrations, a line each.
const keysName = "kvcast.registered"

// Registrations stores the workers that were registered, by name, in the NATS KV bucket <stream>-workers. The key is the
// worker's name, with each byte that is no letter, digit, hyphen or underscore as =XX; a lone = is the empty name. Every
// process that uses the stream may write to it, and watch it. Discard keeps it. Methods are safe for concurrent use.
type Registrations struct {
	j      *Journal
	kv     jetstream.KeyValue
	stream jetstream.Stream
	prefix string // of the subjects

	mu sync.Mutex // guards all below
	// revisions are those of the keys that this process has read or written.
	revisions map[string]uint64
	// last is the newest revision that the bucket must have.
	last uint64
	// keys are those that must be there, since nats-server does not report that damaged files have lost some. They are in
	// the file keysName in Config.Dir; nil without it.
	keys map[string]bool
}

// errKey means that a key is not one of kvcast.
var errKey = errors.New("the key is not the encoded name of a worker")

// ErrChanged means that another process has written a registration meanwhile.
var ErrChanged = errors.New("another process has changed it")

// errLost means that a registration is gone that was not removed.
var errLost = errors.New("it is lost, because files are damaged")

// deletedTTL is how long the bucket keeps the record of a deletion, for those that watch it.
const deletedTTL = time.Hour

// Registrations returns the journal's registrations; nil with Config.Follow.
func (j *Journal) Registrations() *Registrations { return j.registrations }

func workersBucket(stream string) string { return stream + "-workers" }

func workersStream(stream string) string { return "KV_" + workersBucket(stream) }

// openRegistrations creates the bucket unless it exists.
func (j *Journal) openRegistrations(opening context.Context) error {
	ctx, cancel := context.WithTimeout(opening, requestTimeout)
	defer cancel()
	name, prefix := workersBucket(j.cfg.Stream), "$KV."+workersBucket(j.cfg.Stream)+"."
	s, err := j.js.Stream(ctx, workersStream(j.cfg.Stream))
	if errors.Is(err, jetstream.ErrStreamNotFound) {
		// As the KV store of nats.go creates it, but all reads go to the leader, which has the newest value.
		s, err = j.js.CreateStream(ctx, jetstream.StreamConfig{
			Name:              workersStream(j.cfg.Stream),
			Description:       "Workers registered with kvcast.",
			Subjects:          []string{prefix + ">"},
			Storage:           jetstream.FileStorage,
			Discard:           jetstream.DiscardNew,
			MaxMsgsPerSubject: 1,
			Replicas:          max(j.cfg.Replicas, 1),
			AllowRollup:       true,
			DenyDelete:        true,
			AllowMsgTTL:       true,
		})
	} else if err == nil && j.cfg.Replicas != 0 && s.CachedInfo().Config.Replicas != j.cfg.Replicas {
		config := s.CachedInfo().Config
		config.Replicas = j.cfg.Replicas
		s, err = j.js.UpdateStream(ctx, config)
	}
	r := &Registrations{j: j, stream: s, prefix: prefix, revisions: make(map[string]uint64)}
	if err == nil {
		r.kv, err = j.createdBucket(ctx, name)
	}
	if err != nil {
		return fmt.Errorf("open KV bucket %q: %w", name, err)
	}
	j.registrations = r
	r.last = s.CachedInfo().State.LastSeq
	if j.server == nil {
		return r.checkNewest(opening)
	}
	if err := r.readKeys(); err != nil {
		return err
	}
	return r.repair(ctx)
}

// checkNewest logs an error if the bucket has lost its newest revisions, as far as checkpoints have seen them.
func (r *Registrations) checkNewest(ctx context.Context) error {
	seen, err := r.j.checkpoints.newest(ctx, metadataRevision)
	if err == nil && seen > r.last {
		r.j.log.Error("The NATS servers have lost the newest changes of registrations: register workers that are missing again.",
			"bucket", workersBucket(r.j.cfg.Stream), "first", r.last+1, "last", seen)
	}
	return err
}

// repair replaces the bucket if it is damaged, since nats-server may not write to it any more. What is lost is still
// reported by All.
func (r *Registrations) repair(ctx context.Context) error {
	damaged := false
	var left []Object
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
	if err := r.j.js.DeleteStream(ctx, config.Name); err != nil {
		return err
	}
	var err error
	if r.stream, err = r.j.js.CreateStream(ctx, config); err != nil {
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
	ctx, cancel := context.WithTimeout(ctx, requestTimeout)
	defer cancel()
	key := registrationKey(name)
	err := r.put(ctx, key, data)
	if err == nil && r.j.server != nil {
		err = errors.Join(r.j.server.SyncMessages(workersStream(r.j.cfg.Stream)), r.setKey(key, true))
	}
	if err != nil {
		return fmt.Errorf("write registration %q: %w", name, r.cause(err))
	}
	return nil
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
	if errors.Is(err, jetstream.ErrKeyExists) || isWrongLastSeq(err) {
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

// newest returns the newest revision that the bucket must have.
func (r *Registrations) newest() uint64 {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.last
}

// Delete removes the data of a worker, if there is any.
func (r *Registrations) Delete(ctx context.Context, name string) error {
	ctx, cancel := context.WithTimeout(ctx, requestTimeout)
	defer cancel()
	key := registrationKey(name)
	var err error
	if r.j.server != nil {
		err = r.setKey(key, false)
	}
	if err == nil {
		_, err = r.kv.Get(ctx, key)
	}
	if errors.Is(err, jetstream.ErrKeyNotFound) {
		return nil
	}
	if err = r.kv.Purge(ctx, key, jetstream.PurgeTTL(deletedTTL)); err != nil {
		return fmt.Errorf("delete registration %q: %w", name, r.cause(err))
	}
	r.see(key, 0)
	return nil
}

// cause returns an error that names the bucket if it is full.
func (r *Registrations) cause(err error) error {
	if apiErr := (*jetstream.APIError)(nil); errors.As(err, &apiErr) && isNoSpace(int(apiErr.ErrorCode)) {
		return r.j.noSpace(workersStream(r.j.cfg.Stream), apiErr.Description)
	}
	return err
}

func (r *Registrations) keysFile() string { return filepath.Join(r.j.cfg.Dir, keysName) }

// readKeys reads the keys that must be there.
func (r *Registrations) readKeys() error {
	text, err := os.ReadFile(r.keysFile())
	if err != nil && !errors.Is(err, os.ErrNotExist) {
		return err
	}
	r.keys = make(map[string]bool)
	for key := range strings.FieldsSeq(string(text)) {
		r.keys[key] = true
	}
	return nil
}

// setKey records whether a key must be there.
func (r *Registrations) setKey(key string, there bool) error {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.keys[key] == there {
		return nil
	}
	keys := maps.Clone(r.keys)
	if keys[key] = true; !there {
		delete(keys, key)
	}
	f, err := os.CreateTemp(r.j.cfg.Dir, keysName)
	if err != nil {
		return err
	}
	_, err = f.WriteString(strings.Join(slices.Sorted(maps.Keys(keys)), "\n") + "\n")
	err = errors.Join(err, f.Sync(), f.Close())
	if err == nil {
		err = os.Rename(f.Name(), r.keysFile())
	}
	if err != nil {
		return errors.Join(err, os.Remove(f.Name()))
	}
	r.keys = keys
	return nil
}

// missing returns the keys that must be there, but are not.
func (r *Registrations) missing(subjects map[string]uint64) []string {
	r.mu.Lock()
	defer r.mu.Unlock()
	var keys []string
	for key := range r.keys {
		if _, ok := subjects[r.prefix+key]; !ok {
			keys = append(keys, key)
		}
	}
	return keys
}

// All returns all registrations, in no particular order. If one cannot be read or is lost, All yields its name and an error,
// and continues with the next. If they cannot be listed, All yields an error without a name, and ends.
func (r *Registrations) All(ctx context.Context) iter.Seq2[Object, error] {
	return func(yield func(Object, error) bool) {
		info, err := r.stream.Info(ctx, jetstream.WithSubjectFilter(r.prefix+">"))
		if err != nil {
			yield(Object{}, fmt.Errorf("list registrations: %w", err))
			return
		}
		keys := r.missing(info.State.Subjects)
		for subject := range info.State.Subjects {
			keys = append(keys, strings.TrimPrefix(subject, r.prefix))
		}
		for _, key := range keys {
			name, err := registrationName(key)
			var data []byte
			if err == nil {
				data, err = r.read(ctx, key)
			}
			if err == nil && data == nil {
				continue // it was deleted
			}
			if err != nil {
				err = fmt.Errorf("read key %q of KV bucket %q: %w", key, workersBucket(r.j.cfg.Stream), err)
			}
			if !yield(Object{name, data}, err) {
				return
			}
		}
	}
}

// read returns the data of a key; nil if it was deleted.
func (r *Registrations) read(ctx context.Context, key string) ([]byte, error) {
	ctx, cancel := context.WithTimeout(ctx, requestTimeout)
	defer cancel()
	e, err := r.kv.Get(ctx, key)
	switch r.mu.Lock(); {
	case errors.Is(err, jetstream.ErrKeyNotFound) && r.keys[key]:
		err = errLost
	case errors.Is(err, jetstream.ErrKeyNotFound):
		err = nil
	}
	r.mu.Unlock()
	if err != nil || e == nil {
		return nil, err
	}
	r.see(key, e.Revision())
	return append([]byte{}, e.Value()...), nil
}

// registrationKey encodes any name, injectively, as a key of NATS KV, in which % is not allowed.
func registrationKey(name string) string { return strings.ReplaceAll(escape(name), "%", "=") }

// registrationName decodes a key. What is no key of a registration is its own name, with an error.
func registrationName(key string) (string, error) {
	name, err := unescape(strings.ReplaceAll(key, "=", "%"))
	if err != nil || registrationKey(name) != key {
		return key, errKey
	}
	return name, nil
}
