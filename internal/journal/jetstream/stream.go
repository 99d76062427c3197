package jetstream

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/nats-io/nats.go/jetstream"

	"github.com/kvcast/kvcast/internal/journal"
	"github.com/kvcast/kvcast/internal/journal/jetstream/embedded"
	"github.com/kvcast/kvcast/internal/journal/jetstream/internal/client"
)

// Metadata of the stream.
const (
	metadataEpoch  = "kvcast.epoch"
	metadataBoot   = "kvcast.boot_id" // of the machine that last opened the stream in a directory
	metadataSynced = "kvcast.synced"  // "true" if all entries since that boot were written with SyncAlways
	metadataFormat = "kvcast.format"
)

// format is the version of what is stored: subjects, headers, metadata, checkpoints, registrations. Version 1 has the
// registrations beside the checkpoints. Since version 3, the stream in Servers has records of the workers' owners; a
// directory still has version 2, which is the same without them.
const (
	format              = 3
	formatWithoutOwners = 2
)

// format returns the version that the journal writes.
func (j *Journal) format() string {
	if j.shared == nil {
		return strconv.Itoa(formatWithoutOwners)
	}
	return strconv.Itoa(format)
}

// streamState is what Open needs to know of a stream.
type streamState struct {
	epoch       string
	first, last uint64
}

// firstSeq returns the seq of a stream's oldest entry, or of the next one if it has none.
func firstSeq(info *jetstream.StreamInfo) uint64 {
	if info.State.Msgs == 0 {
		return info.State.LastSeq + 1
	}
	return info.State.FirstSeq
}

// openStream creates the stream, or checks it and decides whether its epoch continues.
func (j *Journal) openStream(ctx context.Context) (streamState, error) {
	boot := ""
	if j.server != nil {
		boot = embedded.BootID()
	}
	_, info, err := j.client.StreamInfo(ctx)
	if errors.Is(err, jetstream.ErrStreamNotFound) && j.cfg.Follow {
		return streamState{}, fmt.Errorf("open %s: the stream does not exist; start an instance that reads engines first", j.client.Place())
	}
	if errors.Is(err, jetstream.ErrStreamNotFound) {
		return j.createStream(ctx, boot)
	}
	if err != nil {
		return streamState{}, fmt.Errorf("open %s: %w", j.client.Place(), err)
	}
	if err := j.checkStream(info.Config); err != nil {
		return streamState{}, fmt.Errorf("open %s: %w", j.client.Place(), err)
	}
	config := info.Config
	if j.cfg.Follow {
		return streamState{config.Metadata[metadataEpoch], firstSeq(info), info.State.LastSeq}, nil
	}
	config.Metadata = maps.Clone(config.Metadata)
	rebooted := j.server != nil && (boot == "" || boot != config.Metadata[metadataBoot])
	synced := config.Metadata[metadataSynced] == "true"
	var doubt error
	if j.server != nil {
		doubt = j.server.Position.Doubt(config.Metadata[metadataEpoch])
	}
	beginEpoch := func(why string, args ...any) {
		j.server.Position.Forget()
		config.Metadata[metadataEpoch] = journal.NewEpoch()
		j.log.Warn(why+" The journal continues in a new epoch.", append(args, "dir", j.cfg.Dir, "entries", info.State.Msgs,
			"last", info.State.LastSeq, "epoch", config.Metadata[metadataEpoch])...)
	}
	switch {
	case rebooted && !synced:
		beginEpoch("The machine has booted since the journal was written without sync always: entries may be lost.")
	case doubt != nil:
		beginEpoch("It is not known whether entries are lost, or the directory is an older copy.", "reason", doubt)
	}
	config.Metadata[metadataFormat] = j.format()
	config.Metadata[metadataBoot] = boot
	config.Metadata[metadataSynced] = strconv.FormatBool(j.cfg.SyncAlways && (synced || rebooted))
	config.AllowAtomicPublish = config.AllowAtomicPublish || j.cfg.SyncAlways || j.shared != nil
	if j.cfg.Replicas != 0 {
		config.Replicas = j.cfg.Replicas
	}
	if !maps.Equal(config.Metadata, info.Config.Metadata) || config.Replicas != info.Config.Replicas ||
		config.AllowAtomicPublish != info.Config.AllowAtomicPublish {
		if err := j.updateStream(ctx, config); err != nil {
			return streamState{}, err
		}
	}
	return streamState{config.Metadata[metadataEpoch], firstSeq(info), info.State.LastSeq}, nil
}

func (j *Journal) createStream(ctx context.Context, boot string) (streamState, error) {
	epoch := journal.NewEpoch()
	ctx, cancel := context.WithTimeout(ctx, client.RequestTimeout)
	defer cancel()
	_, err := j.client.JS.CreateStream(ctx, jetstream.StreamConfig{
		Name:               j.cfg.Stream,
		Description:        "Entries of kvcast.",
		Subjects:           []string{j.subjects + "*"},
		Storage:            jetstream.FileStorage,
		Discard:            jetstream.DiscardNew,
		Replicas:           max(j.cfg.Replicas, 1),
		DenyDelete:         true,
		AllowAtomicPublish: j.cfg.SyncAlways || j.shared != nil,
		Duplicates:         100 * time.Millisecond, // the shortest: message ids are not used, and Open reads what is in the window
		Metadata: map[string]string{
			metadataEpoch:  epoch,
			metadataBoot:   boot,
			metadataSynced: strconv.FormatBool(j.cfg.SyncAlways),
			metadataFormat: j.format(),
		},
	})
	if errors.Is(err, jetstream.ErrStreamNameAlreadyInUse) {
		return j.openStream(ctx) // another process has created it meanwhile
	}
	if err != nil {
		return streamState{}, fmt.Errorf("create %s: %w", j.client.Place(), j.withReplicas(err))
	}
	j.log.Info("A new journal begins.", "place", j.client.Place(), "epoch", epoch)
	if j.server != nil {
		j.server.Position.Forget()
	}
	return streamState{epoch: epoch, first: 1}, j.syncMetadata()
}

func (j *Journal) updateStream(ctx context.Context, config jetstream.StreamConfig) error {
	ctx, cancel := context.WithTimeout(ctx, client.RequestTimeout)
	defer cancel()
	if _, err := j.client.JS.UpdateStream(ctx, config); err != nil {
		return fmt.Errorf("update %s: %w", j.client.Place(), j.withReplicas(err))
	}
	return j.syncMetadata()
}

// withReplicas adds to an error the number of replicas, if the servers cannot store so many.
func (j *Journal) withReplicas(err error) error {
	var apiErr *jetstream.APIError
	if !errors.As(err, &apiErr) || apiErr.ErrorCode != client.CodeNoPeers && apiErr.ErrorCode != client.CodeNoReplicas {
		return err
	}
	return fmt.Errorf("%w: replicas are %d, which needs a cluster of as many NATS servers; want 1 for a single server", err, max(j.cfg.Replicas, 1))
}

// syncMetadata syncs the stream's metadata to the disk, which the embedded nats-server does only with SyncAlways.
func (j *Journal) syncMetadata() error {
	if j.server == nil {
		return nil
	}
	return j.server.SyncMetadata(j.cfg.Stream)
}

// checkStream checks that an existing stream is a journal of a version that this one reads, and that it removes no
// entry by itself.
func (j *Journal) checkStream(c jetstream.StreamConfig) error {
	switch version, err := strconv.Atoi(c.Metadata[metadataFormat]); {
	case err != nil || c.Metadata[metadataEpoch] == "":
		return errors.New("the stream was not created by kvcast; name another one")
	case version > format:
		return fmt.Errorf("the stream has format %d, and this version of kvcast reads up to %d; use the version that wrote it", version, format)
	}
	var problems []string
	require := func(ok bool, setting string, got, want any) {
		if !ok {
			problems = append(problems, fmt.Sprintf("%s is %v, want %v", setting, got, want))
		}
	}
	subjects := []string{j.subjects + "*"}
	require(slices.Equal(c.Subjects, subjects), "subjects", c.Subjects, subjects)
	require(c.Retention == jetstream.LimitsPolicy, "retention", c.Retention, jetstream.LimitsPolicy)
	require(c.Storage == jetstream.FileStorage, "storage", c.Storage, jetstream.FileStorage)
	require(c.Discard == jetstream.DiscardNew, "discard", c.Discard, jetstream.DiscardNew)
	require(c.MaxAge == 0, "max_age", c.MaxAge, "none")
	require(c.MaxMsgsPerSubject <= 0, "max_msgs_per_subject", c.MaxMsgsPerSubject, "none")
	require(!c.DenyPurge, "deny_purge", c.DenyPurge, false)
	require(!c.Sealed, "sealed", c.Sealed, false)
	if problems != nil {
		return fmt.Errorf("the stream's configuration does not suit a journal: %s", strings.Join(problems, "; "))
	}
	return nil
}
