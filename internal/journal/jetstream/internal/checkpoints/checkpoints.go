// Package checkpoints keeps named data of any length beside the entries of a journal.
//
// Data flows in under a name, and out again after a restart. Guarantee: after a crash at any point, a name has its old data or
// the new; and no data is later than the entries that it rests on, which are synced before.
package checkpoints

import (
	"context"
	"crypto/rand"
	"crypto/sha256"
	"encoding/base64"
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"strconv"
	"sync/atomic"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"

	"github.com/kvcast/kvcast/internal/journal"
	"github.com/kvcast/kvcast/internal/journal/jetstream/internal/client"
)

// chunkBytes is the size of a checkpoint's messages. nats-server allows 1 MiB by default.
const chunkBytes = 256 << 10

// Timeout bounds the write or the read of one checkpoint. Only tests change it.
var Timeout = time.Minute

// Metadata of an object.
const (
	metadataClaim    = "kvcast.claim"    // that of PutClaimed
	metadataRevision = "kvcast.revision" // the newest revision of the registrations when the checkpoint was written
)

// Journal is the journal that the data rests on.
type Journal interface {
	// Failed is closed when the journal has failed, and Err then returns why.
	Failed() <-chan struct{}
	Err() error
	// SyncEntries makes the acknowledged entries survive a crash of the machine, if the servers leave that to this process.
	SyncEntries() error
	// NewestRegistration returns the newest revision that the registrations must have.
	NewestRegistration() uint64
	// CheckpointsStuck is called when maxTimeouts writes in a row took the time d altogether.
	CheckpointsStuck(d time.Duration)
}

// Checkpoints stores named data of any length beside the journal, in the JetStream object store <stream>-checkpoints
// (tools for object stores can read it). A name is any string. Put replaces data atomically: after a crash at any point,
// the name has the old data or the new. Methods are safe for concurrent use.
type Checkpoints struct {
	client   *client.Client
	journal  Journal
	stream   jetstream.Stream
	prefix   string       // of the subjects
	timeouts atomic.Int64 // writes in a row that took Timeout
}

// bucket names the object store, which the stream OBJ_<bucket> keeps.
func bucket(stream string) string { return stream + "-checkpoints" }

// Stream names the stream of the checkpoints of a journal.
func Stream(stream string) string { return "OBJ_" + bucket(stream) }

func newCheckpoints(c *client.Client, j Journal) *Checkpoints {
	return &Checkpoints{client: c, journal: j, prefix: "$O." + bucket(c.Stream) + "."}
}

func (c *Checkpoints) openError(err error) error {
	return fmt.Errorf("open object store %q: %w", bucket(c.client.Stream), err)
}

// Follow opens the object store, which must exist, to read it.
func Follow(ctx context.Context, to *client.Client, j Journal) (*Checkpoints, error) {
	c := newCheckpoints(to, j)
	var err error
	if c.stream, err = c.client.OpenStream(ctx, Stream(c.client.Stream)); err != nil {
		return nil, c.openError(err)
	}
	return c, nil
}

// Open creates the object store unless it exists, and removes what interrupted Puts left. Data without a description that another
// process may be writing is as old as grace at least before it is removed; 0: there is no other process.
func Open(opening context.Context, to *client.Client, j Journal, grace time.Duration) (*Checkpoints, error) {
	ctx, cancel := context.WithTimeout(opening, client.ConfigureTimeout)
	defer cancel()
	c := newCheckpoints(to, j)
	name := Stream(c.client.Stream)
	s, err := c.client.OpenStream(ctx, name)
	if errors.Is(err, jetstream.ErrStreamNotFound) {
		config := jetstream.ObjectStoreConfig{Bucket: bucket(c.client.Stream), Description: "Checkpoints of kvcast.", Replicas: max(c.client.Replicas, 1)}
		// Another process may have created and configured it meanwhile.
		if _, err = c.client.JS.CreateObjectStore(ctx, config); err == nil || errors.Is(err, jetstream.ErrBucketExists) {
			if s, err = c.client.OpenStream(ctx, name); errors.Is(err, jetstream.ErrStreamNotFound) {
				err = fmt.Errorf("%w: %w", client.ErrNoAnswer, err) // from a server that has not heard of it yet
			}
		}
	}
	if err == nil {
		c.stream, err = c.configure(ctx, s)
	}
	if err != nil {
		return nil, c.openError(err)
	}
	if err := c.removeOrphans(opening, grace); err != nil {
		c.client.Log.Warn("Parts of interrupted checkpoints cannot be removed.", "error", err)
	}
	return c, nil
}

// configure makes all reads go to the stream's leader, since a replica may not have the newest messages yet, and sets the
// number of replicas.
func (c *Checkpoints) configure(ctx context.Context, s jetstream.Stream) (jetstream.Stream, error) {
	config := s.CachedInfo().Config
	replicas := c.client.Replicas
	if replicas == 0 {
		replicas = config.Replicas
	}
	if !config.AllowDirect && config.Replicas == replicas {
		return s, nil
	}
	config.AllowDirect, config.Replicas = false, replicas
	return c.client.JS.UpdateStream(ctx, config)
}

func (c *Checkpoints) metaSubject(name string) string {
	return c.prefix + "M." + base64.URLEncoding.EncodeToString([]byte(client.Escape(name)))
}

func (c *Checkpoints) chunkSubject(id string) string { return c.prefix + "C." + id }

// Put stores data under a name. It tries again while the servers do not answer.
func (c *Checkpoints) Put(ctx context.Context, name string, data []byte) error {
	return c.PutClaimed(ctx, name, data, 0)
}

// PutClaimed is Put for data of a worker that this instance has claimed with a seq. The error is a journal.ErrFenced if the
// data that is stored has a later claim: another instance owns the worker now.
func (c *Checkpoints) PutClaimed(parent context.Context, name string, data []byte, claim uint64) error {
	ctx, cancel := context.WithTimeout(parent, Timeout)
	defer cancel()
	go func() {
		select {
		case <-c.journal.Failed():
			cancel()
		case <-ctx.Done():
		}
	}()
	for {
		err := c.put(ctx, name, data, claim)
		if err == nil {
			c.timeouts.Store(0)
			return nil
		}
		if client.IsUnanswered(err) || client.IsWrongLastSeq(err) { // another process may have stored data meanwhile
			select {
			case <-time.After(client.RetryInterval):
				continue
			case <-ctx.Done():
			}
		}
		if errors.Is(ctx.Err(), context.DeadlineExceeded) && parent.Err() == nil {
			if c.timeouts.Add(1) == maxTimeouts {
				c.journal.CheckpointsStuck(maxTimeouts * Timeout)
			}
		}
		if failure := c.journal.Err(); failure != nil {
			err = failure
		}
		return fmt.Errorf("write checkpoint %q: %w", name, err)
	}
}

// maxTimeouts is the number of consecutive writes that exceed Timeout after which an embedded server counts as stuck.
// A single one can be that of a process that was paused.
const maxTimeouts = 2

// put is one attempt of Put.
func (c *Checkpoints) put(ctx context.Context, name string, data []byte, claim uint64) (err error) {
	old, replaced, err := c.info(ctx, c.metaSubject(name))
	if replaced == 0 && err != nil && !errors.Is(err, jetstream.ErrMsgNotFound) {
		return err
	}
	if old != nil {
		if other, _ := strconv.ParseUint(old.Metadata[metadataClaim], 10, 64); other > claim {
			return fmt.Errorf("%w: the one that is stored has the claim %d, after %d", journal.ErrFenced, other, claim)
		}
	}
	info := jetstream.ObjectInfo{
		ObjectMeta: jetstream.ObjectMeta{
			Name: client.Escape(name),
			Metadata: map[string]string{
				metadataClaim:    strconv.FormatUint(claim, 10),
				metadataRevision: strconv.FormatUint(c.journal.NewestRegistration(), 10),
			},
			Opts: &jetstream.ObjectMetaOptions{ChunkSize: chunkBytes},
		},
		Bucket: bucket(c.client.Stream),
		NUID:   rand.Text(),
		Size:   uint64(len(data)),
		Digest: digest(data),
	}
	described := false
	defer func() {
		if err != nil && !described {
			c.purge(context.WithoutCancel(ctx), c.chunkSubject(info.NUID))
		}
	}()
	// The object's description is stored when all chunks are, and replaces the old one.
	for chunk := range slices.Chunk(data, chunkBytes) {
		if err := c.publish(ctx, &nats.Msg{Subject: c.chunkSubject(info.NUID), Data: chunk}); err != nil {
			return err
		}
		info.Chunks++
	}
	description, err := json.Marshal(info)
	if err != nil {
		return err
	}
	m := &nats.Msg{Subject: c.metaSubject(name), Data: description, Header: nats.Header{jetstream.MsgRollup: {jetstream.MsgRollupSubject}}}
	// A crash of the machine must not leave a checkpoint that is newer than the entries.
	if err := c.journal.SyncEntries(); err != nil {
		return err
	}
	described = true // also if the answer does not come; the next Open removes the chunks if it is not
	if err := c.publish(ctx, m, jetstream.WithExpectLastSequencePerSubject(replaced)); err != nil {
		return err
	}
	if old != nil {
		c.purge(ctx, c.chunkSubject(old.NUID))
	}
	return nil
}

// publish stores a message.
func (c *Checkpoints) publish(ctx context.Context, m *nats.Msg, opts ...jetstream.PublishOpt) error {
	err := c.ask(ctx, func(ctx context.Context) error {
		_, err := c.client.JS.PublishMsg(ctx, m, opts...)
		return err
	})
	if description, ok := client.RefusedForSpace(err); ok {
		return c.client.NoSpace(context.WithoutCancel(ctx), Stream(c.client.Stream), description)
	}
	return err
}

// ask makes a request, which may take client.RequestTimeout.
func (c *Checkpoints) ask(ctx context.Context, request func(context.Context) error) error {
	asking, cancel := context.WithTimeout(ctx, client.RequestTimeout)
	defer cancel()
	err := request(asking)
	if errors.Is(err, context.DeadlineExceeded) && ctx.Err() == nil {
		return fmt.Errorf("%w from stream %q of %s within %v", client.ErrNoAnswer, Stream(c.client.Stream), c.client.Where, client.RequestTimeout)
	}
	return err
}

// purge removes chunks that nothing references. What it leaves, the next Open removes.
func (c *Checkpoints) purge(ctx context.Context, subject string) {
	ctx, cancel := context.WithTimeout(ctx, client.RequestTimeout)
	defer cancel()
	if err := c.stream.Purge(ctx, jetstream.WithPurgeSubject(subject)); err != nil {
		c.client.Log.Debug("Chunks of a checkpoint cannot be removed now.", "subject", subject, "error", err)
	}
}

// Delete removes the data of a name, if there is any.
func (c *Checkpoints) Delete(ctx context.Context, name string) error {
	ctx, cancel := context.WithTimeout(ctx, Timeout)
	defer cancel()
	subject := c.metaSubject(name)
	m, err := c.stream.GetLastMsgForSubject(ctx, subject)
	if errors.Is(err, jetstream.ErrMsgNotFound) {
		return nil
	}
	if err == nil { // what another process has stored since stays
		err = c.stream.Purge(ctx, jetstream.WithPurgeSubject(subject), jetstream.WithPurgeSequence(m.Sequence+1))
	}
	if err != nil {
		return fmt.Errorf("delete checkpoint %q: %w", name, err)
	}
	var old jetstream.ObjectInfo
	if json.Unmarshal(m.Data, &old) == nil {
		c.purge(ctx, c.chunkSubject(old.NUID))
	}
	return nil
}

// removeOrphans removes chunks that no description references.
func (c *Checkpoints) removeOrphans(ctx context.Context, grace time.Duration) error {
	chunks, err := c.subjects(ctx, "C.")
	if err != nil || len(chunks) == 0 {
		return err
	}
	descriptions, err := c.subjects(ctx, "M.")
	if err != nil {
		return err
	}
	referenced := make(map[string]bool)
	for _, subject := range descriptions {
		info, _, err := c.info(ctx, subject)
		if errors.Is(err, errDeleted) {
			continue
		}
		if err != nil {
			return nil //nolint:nilerr // All reports it; its chunks cannot be distinguished from orphans
		}
		referenced[c.chunkSubject(info.NUID)] = true
	}
	for _, subject := range chunks {
		if referenced[subject] {
			continue
		}
		if grace > 0 { // another process may be writing it
			m, err := c.stream.GetLastMsgForSubject(ctx, subject)
			if err != nil || time.Since(m.Time) < grace {
				continue
			}
		}
		c.purge(ctx, subject)
	}
	return nil
}

// Discard removes all checkpoints.
func (c *Checkpoints) Discard(ctx context.Context) error {
	err := c.stream.Purge(ctx, jetstream.WithPurgeSubject(c.prefix+"M.>"))
	if err == nil {
		err = c.stream.Purge(ctx, jetstream.WithPurgeSubject(c.prefix+"C.>"))
	}
	return err
}

func digest(data []byte) string {
	h := sha256.Sum256(data)
	return "SHA-256=" + base64.URLEncoding.EncodeToString(h[:])
}
