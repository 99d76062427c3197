package jetstream

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
	"strings"
	"sync/atomic"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"

	"github.com/kvcast/kvcast/internal/journal"
)

// chunkBytes is the size of a checkpoint's messages. nats-server allows 1 MiB by default.
const chunkBytes = 256 << 10

// checkpointTimeout bounds the write or the read of one checkpoint.
var checkpointTimeout = time.Minute

// Metadata of an object.
const (
	metadataClaim    = "kvcast.claim"    // that of PutClaimed
	metadataRevision = "kvcast.revision" // the newest revision of the registrations when the checkpoint was written
)

// Checkpoints stores named data of any length beside the journal, in the JetStream object store <stream>-checkpoints
// (tools for object stores can read it). A name is any string. Put replaces data atomically: after a crash at any point,
// the name has the old data or the new. Methods are safe for concurrent use.
type Checkpoints struct {
	j        *Journal
	stream   jetstream.Stream
	prefix   string       // of the subjects
	timeouts atomic.Int64 // writes in a row that took checkpointTimeout
}

// Object is stored data.
type Object struct {
	Name string
	Data []byte
}

// Checkpoints returns the journal's checkpoints.
func (j *Journal) Checkpoints() *Checkpoints { return j.checkpoints }

// bucket names the object store, which the stream OBJ_<bucket> keeps.
func bucket(stream string) string { return stream + "-checkpoints" }

func bucketStream(stream string) string { return "OBJ_" + bucket(stream) }

// openCheckpoints creates the object store unless it exists, and removes what interrupted Puts left.
func (j *Journal) openCheckpoints(opening context.Context) error {
	ctx, cancel := context.WithTimeout(opening, requestTimeout)
	defer cancel()
	name := bucket(j.cfg.Stream)
	c := &Checkpoints{j: j, prefix: "$O." + name + "."}
	j.checkpoints = c
	s, err := j.js.Stream(ctx, bucketStream(j.cfg.Stream))
	if errors.Is(err, jetstream.ErrStreamNotFound) && !j.cfg.Follow {
		config := jetstream.ObjectStoreConfig{Bucket: name, Description: "Checkpoints of kvcast.", Replicas: max(j.cfg.Replicas, 1)}
		// Another process may have created and configured it meanwhile.
		if _, err = j.js.CreateObjectStore(ctx, config); err == nil || errors.Is(err, jetstream.ErrBucketExists) {
			if s, err = j.js.Stream(ctx, bucketStream(j.cfg.Stream)); errors.Is(err, jetstream.ErrStreamNotFound) {
				err = fmt.Errorf("%w: %w", errNoAnswer, err) // from a server that has not heard of it yet
			}
		}
	}
	if err == nil && j.cfg.Follow {
		c.stream = s
		return nil
	}
	if err == nil {
		c.stream, err = c.configure(ctx, s)
	}
	if err != nil {
		return fmt.Errorf("open object store %q: %w", name, err)
	}
	if err := c.removeOrphans(opening); err != nil {
		j.log.Warn("Parts of interrupted checkpoints cannot be removed.", "error", err)
	}
	return nil
}

// configure makes all reads go to the stream's leader, since a replica may not have the newest messages yet, and sets the
// number of replicas.
func (c *Checkpoints) configure(ctx context.Context, s jetstream.Stream) (jetstream.Stream, error) {
	config := s.CachedInfo().Config
	replicas := c.j.cfg.Replicas
	if replicas == 0 {
		replicas = config.Replicas
	}
	if !config.AllowDirect && config.Replicas == replicas {
		return s, nil
	}
	config.AllowDirect, config.Replicas = false, replicas
	return c.j.js.UpdateStream(ctx, config)
}

func (c *Checkpoints) metaSubject(name string) string {
	return c.prefix + "M." + base64.URLEncoding.EncodeToString([]byte(escape(name)))
}

func (c *Checkpoints) chunkSubject(id string) string { return c.prefix + "C." + id }

// Put stores data under a name. It tries again while the servers do not answer.
func (c *Checkpoints) Put(ctx context.Context, name string, data []byte) error {
	return c.PutClaimed(ctx, name, data, 0)
}

// PutClaimed is Put for data of a worker that this instance has claimed with a seq. The error is a journal.ErrFenced if the
// data that is stored has a later claim: another instance owns the worker now.
func (c *Checkpoints) PutClaimed(parent context.Context, name string, data []byte, claim uint64) error {
	ctx, cancel := context.WithTimeout(parent, checkpointTimeout)
	defer cancel()
	go func() {
		select {
		case <-c.j.failed:
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
		if isUnanswered(err) || isWrongLastSeq(err) { // another process may have stored data meanwhile
			select {
			case <-time.After(retryInterval):
				continue
			case <-ctx.Done():
			}
		}
		if errors.Is(ctx.Err(), context.DeadlineExceeded) && parent.Err() == nil {
			c.timedOut()
		}
		if failure := c.j.Err(); failure != nil {
			err = failure
		}
		return fmt.Errorf("write checkpoint %q: %w", name, err)
	}
}

// maxTimeouts is the number of consecutive writes that exceed checkpointTimeout after which the embedded server counts as stuck.
// A single one can be that of a process that was paused.
const maxTimeouts = 2

// timedOut fails the journal if the embedded server is stuck.
func (c *Checkpoints) timedOut() {
	if c.j.server != nil && c.timeouts.Add(1) == maxTimeouts {
		c.j.failStuck("stored no checkpoint", maxTimeouts*checkpointTimeout)
	}
}

// ErrUnanswered means that the servers do not answer, so that it is not known what they have.
var ErrUnanswered = errors.New("the servers do not answer")

// isUnanswered reports whether an error means that no server has answered, or one has that has no leader to ask or that cannot reach the
// others, as while they start.
func isUnanswered(err error) bool {
	var apiErr *jetstream.APIError
	if errors.As(err, &apiErr) && (apiErr.ErrorCode == codeUnavailable || apiErr.ErrorCode == codeNoPeers && strings.Contains(apiErr.Description, "peer offline")) {
		return true
	}
	return errors.Is(err, errNoAnswer) || errors.Is(err, jetstream.ErrNoStreamResponse) || errors.Is(err, nats.ErrNoResponders) ||
		errors.Is(err, nats.ErrReconnectBufExceeded) || errors.Is(err, nats.ErrConnectionReconnecting)
}

// errNoAnswer means that no server has answered within requestTimeout.
var errNoAnswer = errors.New("no answer")

// retryInterval is the time between two attempts to store a checkpoint.
const retryInterval = 500 * time.Millisecond

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
			Name: escape(name),
			Metadata: map[string]string{
				metadataClaim:    strconv.FormatUint(claim, 10),
				metadataRevision: strconv.FormatUint(c.j.registrations.newest(), 10),
			},
			Opts: &jetstream.ObjectMetaOptions{ChunkSize: chunkBytes},
		},
		Bucket: bucket(c.j.cfg.Stream),
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
	if c.j.server != nil && !c.j.cfg.SyncAlways {
		// A crash of the machine must not leave a checkpoint that is newer than the entries.
		if err := c.j.server.SyncMessages(c.j.cfg.Stream); err != nil {
			return err
		}
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
		_, err := c.j.js.PublishMsg(ctx, m, opts...)
		return err
	})
	if apiErr := (*jetstream.APIError)(nil); errors.As(err, &apiErr) && isNoSpace(int(apiErr.ErrorCode)) {
		return c.j.noSpace(bucketStream(c.j.cfg.Stream), apiErr.Description)
	}
	return err
}

// ask makes a request, which may take requestTimeout.
func (c *Checkpoints) ask(ctx context.Context, request func(context.Context) error) error {
	asking, cancel := context.WithTimeout(ctx, requestTimeout)
	defer cancel()
	err := request(asking)
	if errors.Is(err, context.DeadlineExceeded) && ctx.Err() == nil {
		return fmt.Errorf("%w from stream %q of %s within %v", errNoAnswer, bucketStream(c.j.cfg.Stream), c.j.where(), requestTimeout)
	}
	return err
}

// purge removes chunks that nothing references. What it leaves, the next Open removes.
func (c *Checkpoints) purge(ctx context.Context, subject string) {
	ctx, cancel := context.WithTimeout(ctx, requestTimeout)
	defer cancel()
	if err := c.stream.Purge(ctx, jetstream.WithPurgeSubject(subject)); err != nil {
		c.j.log.Debug("Chunks of a checkpoint cannot be removed now.", "subject", subject, "error", err)
	}
}

// Delete removes the data of a name, if there is any.
func (c *Checkpoints) Delete(ctx context.Context, name string) error {
	ctx, cancel := context.WithTimeout(ctx, checkpointTimeout)
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
func (c *Checkpoints) removeOrphans(ctx context.Context) error {
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
		if err != nil {
			return nil //nolint:nilerr // All reports it; its chunks cannot be distinguished from orphans
		}
		referenced[c.chunkSubject(info.NUID)] = true
	}
	for _, subject := range chunks {
		if referenced[subject] {
			continue
		}
		if c.j.server == nil { // another process may be writing it
			m, err := c.stream.GetLastMsgForSubject(ctx, subject)
			if err != nil || time.Since(m.Time) < 2*checkpointTimeout {
				continue
			}
		}
		c.purge(ctx, subject)
	}
	return nil
}

func isWrongLastSeq(err error) bool {
	var apiErr *jetstream.APIError
	return errors.As(err, &apiErr) && (apiErr.ErrorCode == codeWrongLastSeq || apiErr.ErrorCode == codeWrongLastSeqConst)
}

// discard removes all checkpoints.
func (c *Checkpoints) discard(ctx context.Context) error {
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
