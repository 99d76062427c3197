package checkpoints

import (
	"bytes"
	"context"
	"encoding/base64"
	"encoding/json"
	"errors"
	"fmt"
	"iter"
	"maps"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/nats-io/nats.go/jetstream"

	"github.com/kvcast/kvcast/internal/journal/jetstream/internal/client"
)

// All returns all checkpoints, in no particular order. If one cannot be read, or its checksum differs, All yields its name and an error,
// and continues with the next. If the checkpoints cannot be listed, All yields an error without a name, and ends.
func (c *Checkpoints) All(ctx context.Context) iter.Seq2[client.Object, error] {
	return func(yield func(client.Object, error) bool) {
		subjects, err := c.subjects(ctx, "M.")
		if err != nil {
			yield(client.Object{}, fmt.Errorf("list checkpoints: %w", err))
			return
		}
		for _, subject := range subjects {
			name, data, err := c.read(ctx, subject)
			if errors.Is(err, errDeleted) {
				continue
			}
			if err != nil {
				err = fmt.Errorf("read checkpoint %q: %w", name, err)
			}
			if !yield(client.Object{Name: name, Data: data}, err) {
				return
			}
		}
	}
}

// Get returns the data of a name; nil if there is none. It tries again for a minute while the servers do not answer: the
// error is an ErrUnanswered then. Any other error means that the data cannot be read.
func (c *Checkpoints) Get(ctx context.Context, name string) ([]byte, error) {
	ctx, cancel := context.WithTimeout(ctx, Timeout)
	defer cancel()
	subject := c.metaSubject(name)
	for {
		info, seq, err := c.info(ctx, subject)
		if errors.Is(err, jetstream.ErrMsgNotFound) || errors.Is(err, errDeleted) {
			return nil, nil
		}
		var data []byte
		if err == nil {
			data, err = c.chunks(ctx, info)
		}
		if err == nil {
			return data, nil
		}
		if !client.IsUnanswered(err) && ctx.Err() == nil {
			if _, newest, again := c.info(ctx, subject); again == nil && newest != seq {
				continue // another process has replaced it, and removed the chunks, meanwhile
			}
			return nil, fmt.Errorf("read checkpoint %q: %w", name, err)
		}
		c.client.Log.Debug("A checkpoint cannot be read now.", "name", name, "error", err)
		select {
		case <-time.After(client.RetryInterval):
		case <-ctx.Done():
			return nil, fmt.Errorf("read checkpoint %q: %w: %w", name, client.ErrUnanswered, err)
		}
	}
}

// subjects returns the subjects of the stored messages of a kind, "M." or "C.".
func (c *Checkpoints) subjects(ctx context.Context, kind string) ([]string, error) {
	var info *jetstream.StreamInfo
	err := c.ask(ctx, func(ctx context.Context) (err error) {
		info, err = c.stream.Info(ctx, jetstream.WithSubjectFilter(c.prefix+kind+">"))
		return err
	})
	if err != nil {
		return nil, err
	}
	return slices.Collect(maps.Keys(info.State.Subjects)), nil
}

// errDeleted is an error of an object that a client of NATS has deleted, such as nats object rm. Delete leaves no description.
var errDeleted = errors.New("it is deleted")

// info returns an object's description, and its seq in the bucket's stream.
func (c *Checkpoints) info(ctx context.Context, subject string) (*jetstream.ObjectInfo, uint64, error) {
	var m *jetstream.RawStreamMsg
	err := c.ask(ctx, func(ctx context.Context) (err error) {
		m, err = c.stream.GetLastMsgForSubject(ctx, subject)
		return err
	})
	if err != nil {
		return nil, 0, err
	}
	var info jetstream.ObjectInfo
	if err := json.Unmarshal(m.Data, &info); err != nil {
		// The error can repeat the text, which anything can have stored.
		return nil, m.Sequence, fmt.Errorf("invalid description: %.200q", err.Error())
	}
	if info.Deleted {
		return nil, m.Sequence, errDeleted
	}
	return &info, m.Sequence, nil
}

// read returns the name and the data of an object, given its description's subject.
func (c *Checkpoints) read(ctx context.Context, subject string) (string, []byte, error) {
	ctx, cancel := context.WithTimeout(ctx, Timeout)
	defer cancel()
	encoded, err := base64.URLEncoding.DecodeString(subject[strings.LastIndexByte(subject, '.')+1:])
	if err != nil {
		return subject, nil, err
	}
	name, err := client.Unescape(string(encoded))
	if err != nil {
		return subject, nil, err
	}
	info, _, err := c.info(ctx, subject)
	if err != nil {
		return name, nil, err
	}
	data, err := c.chunks(ctx, info)
	return name, data, err
}

// chunks returns the data of an object.
func (c *Checkpoints) chunks(ctx context.Context, info *jetstream.ObjectInfo) ([]byte, error) {
	var data bytes.Buffer
	seq := uint64(1)
	for range info.Chunks {
		var m *jetstream.RawStreamMsg
		err := c.ask(ctx, func(ctx context.Context) (err error) {
			m, err = c.stream.GetMsg(ctx, seq, jetstream.WithGetMsgSubject(c.chunkSubject(info.NUID)))
			return err
		})
		if err != nil {
			return nil, fmt.Errorf("after %d bytes of %d: %w", data.Len(), info.Size, err)
		}
		data.Write(m.Data)
		seq = m.Sequence + 1
	}
	if got := digest(data.Bytes()); got != info.Digest {
		return nil, fmt.Errorf("checksum of %d bytes is %s, want %.100q of %d bytes", data.Len(), got, info.Digest, info.Size)
	}
	return data.Bytes(), nil
}

// NewestRegistration returns the newest revision of the registrations that any checkpoint has seen.
func (c *Checkpoints) NewestRegistration(ctx context.Context) (uint64, error) {
	subjects, err := c.subjects(ctx, "M.")
	if err != nil {
		return 0, err
	}
	newest := uint64(0)
	for _, subject := range subjects {
		if info, _, err := c.info(ctx, subject); err == nil {
			n, _ := strconv.ParseUint(info.Metadata[metadataRevision], 10, 64)
			newest = max(newest, n)
		}
	}
	return newest, nil
}
