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
	_, info, err := j.client.StreamInfo(ctx)
	if errors.Is(err, jetstream.ErrStreamNotFound) {
		return j.mode.createStream(ctx)
	}
	if err == nil {
		err = j.checkStream(info.Config)
	}
	if err != nil {
		return streamState{}, fmt.Errorf("open %s: %w", j.client.Place(), err)
	}
	return j.mode.adoptStream(ctx, info)
}

// stateOf returns the state of a stream.
func stateOf(info *jetstream.StreamInfo) streamState {
	return streamState{info.Config.Metadata[metadataEpoch], firstSeq(info), info.State.LastSeq}
}

// createStream creates the stream with a new epoch, and with what label sets.
func (j *Journal) createStream(ctx context.Context, label func(*jetstream.StreamConfig)) (streamState, error) {
	epoch := journal.NewEpoch()
	creating, cancel := context.WithTimeout(ctx, client.ConfigureTimeout)
	defer cancel()
	config := jetstream.StreamConfig{
		Name:        j.cfg.Stream,
		Description: "Entries of kvcast.",
		Subjects:    []string{j.codec.Prefix + "*"},
		Storage:     jetstream.FileStorage,
		Discard:     jetstream.DiscardNew,
		Replicas:    max(j.cfg.Replicas, 1),
		DenyDelete:  true,
		Duplicates:  100 * time.Millisecond, // the shortest: message ids are not used, and Open reads what is in the window
		Metadata:    map[string]string{metadataEpoch: epoch},
	}
	label(&config)
	_, err := j.client.JS.CreateStream(creating, config)
	if errors.Is(err, jetstream.ErrStreamNameAlreadyInUse) {
		return j.openStream(ctx) // another process has created it meanwhile
	}
	if err != nil {
		return streamState{}, fmt.Errorf("create %s: %w", j.client.Place(), j.withReplicas(err))
	}
	j.log.Info("A new journal begins.", "place", j.client.Place(), "epoch", epoch)
	return streamState{epoch: epoch, first: 1}, nil
}

// adoptStream changes the configuration of a stream as change does, if that changes anything.
func (j *Journal) adoptStream(ctx context.Context, info *jetstream.StreamInfo, change func(*jetstream.StreamConfig)) (streamState, error) {
	before := info.Config
	info.Config.Metadata = maps.Clone(before.Metadata)
	change(&info.Config)
	if j.cfg.Replicas != 0 {
		info.Config.Replicas = j.cfg.Replicas
	}
	if !maps.Equal(info.Config.Metadata, before.Metadata) || info.Config.Replicas != before.Replicas ||
		info.Config.AllowAtomicPublish != before.AllowAtomicPublish {
		if err := j.updateStream(ctx, info.Config); err != nil {
			return streamState{}, err
		}
	}
	return stateOf(info), nil
}

// label sets what a stream says of its mode. boot and synced are empty and false in Servers.
func label(c *jetstream.StreamConfig, format int, boot string, synced bool) {
	c.Metadata[metadataFormat] = strconv.Itoa(format)
	c.Metadata[metadataBoot] = boot
	c.Metadata[metadataSynced] = strconv.FormatBool(synced)
}

func (j *Journal) updateStream(ctx context.Context, config jetstream.StreamConfig) error {
	ctx, cancel := context.WithTimeout(ctx, client.ConfigureTimeout)
	defer cancel()
	if _, err := j.client.JS.UpdateStream(ctx, config); err != nil {
		return fmt.Errorf("update %s: %w", j.client.Place(), j.withReplicas(err))
	}
	return j.mode.syncMetadata()
}

// withReplicas adds to an error the number of replicas, if the servers cannot store so many.
func (j *Journal) withReplicas(err error) error {
	var apiErr *jetstream.APIError
	if !errors.As(err, &apiErr) || apiErr.ErrorCode != client.CodeNoPeers && apiErr.ErrorCode != client.CodeNoReplicas {
		return err
	}
	return fmt.Errorf("%w: replicas are %d, which needs a cluster of as many NATS servers; want 1 for a single server", err, max(j.cfg.Replicas, 1))
}

// checkStream checks that an existing stream is a journal of a version that this one reads, and that it removes no entry by itself.
func (j *Journal) checkStream(c jetstream.StreamConfig) error {
	switch version, err := strconv.Atoi(c.Metadata[metadataFormat]); {
	case err != nil || c.Metadata[metadataEpoch] == "":
		return errors.New("the stream was not created by kvcast; name another one")
	case version > format:
		return fmt.Errorf("the stream has format %d, and this version of kvcast reads up to %d: use the version that wrote it or a later one, "+
			"or begin with an empty journal, in another directory or stream", version, format)
	}
	var problems []string
	require := func(ok bool, setting string, got, want any) {
		if !ok {
			problems = append(problems, fmt.Sprintf("%s is %v, want %v", setting, got, want))
		}
	}
	subjects := []string{j.codec.Prefix + "*"}
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
