package recovery

import (
	"context"
	"encoding/json"
	"fmt"
	"log/slog"

	"google.golang.org/protobuf/proto"

	ingestconfig "github.com/kvcast/kvcast/ingest/config"
	"github.com/kvcast/kvcast/internal/journal/jetstream"
	statev1 "github.com/kvcast/kvcast/proto/kvcast/state/v1"
)

// registrationPrefix begins the names of registrations among the checkpoints, where format 1 of the journal has them.
const registrationPrefix = "registered."

// Registrations stores the workers that were registered, by name, until they are deregistered.
type Registrations struct{ Store Store }

// Add stores a worker.
func (r Registrations) Add(ctx context.Context, w ingestconfig.Worker) error {
	return storeIn(ctx, w, r.Store.Put)
}

// Restore stores a worker in a bucket that was created again, unless it was stored or removed there.
func Restore(ctx context.Context, bucket *jetstream.Registrations, w ingestconfig.Worker) error {
	return storeIn(ctx, w, bucket.Restore)
}

func storeIn(ctx context.Context, w ingestconfig.Worker, put func(ctx context.Context, name string, data []byte) error) error {
	b, err := encodeRegistration(w)
	if err == nil {
		err = put(ctx, w.Name, b)
	}
	if err != nil {
		return fmt.Errorf("store the registration of worker %q: %w", w.Name, err)
	}
	return nil
}

// Remove deletes a worker, if it is stored.
func (r Registrations) Remove(ctx context.Context, name string) error {
	if err := r.Store.Delete(ctx, name); err != nil {
		return fmt.Errorf("delete the registration of worker %q: %w", name, err)
	}
	return nil
}

// registered are the workers that were registered.
type registered struct {
	store   Registrations
	log     *slog.Logger
	workers []ingestconfig.Worker
	known   map[string]bool // also those that cannot be read
}

// read returns all workers. It logs those that cannot be read.
func (r Registrations) read(ctx context.Context, log *slog.Logger) (*registered, error) {
	all := &registered{store: r, log: log, known: make(map[string]bool)}
	for object, err := range r.Store.All(ctx) {
		if err != nil && object.Name == "" {
			return nil, err
		}
		all.add(object.Name, object.Data, err)
	}
	return all, ctx.Err()
}

// add adds a worker. It logs an error and returns false if its registration cannot be read.
func (r *registered) add(name string, data []byte, err error) (w ingestconfig.Worker, ok bool) {
	r.known[name] = true
	if err == nil {
		w, err = DecodeRegistration(name, data)
	}
	if err != nil {
		r.log.Error("a registration cannot be read: register the worker again", "worker", name, "error", err)
		return w, false
	}
	r.workers = append(r.workers, w)
	return w, true
}

// move moves a registration that is among the checkpoints, unless it is known. After that, it is not there any more, since
// it would come back after the worker is deregistered.
func (r *registered) move(ctx context.Context, checkpoints Store, name string, data []byte, err error) error {
	if !r.known[name] {
		w, ok := r.add(name, data, err)
		if !ok {
			return nil
		}
		if err := r.store.Add(ctx, w); err != nil {
			return err
		}
	}
	if err := checkpoints.Delete(ctx, registrationPrefix+name); err != nil {
		return fmt.Errorf("move the registration of worker %q: %w", name, err)
	}
	return nil
}

// encodeRegistration encodes a registered worker.
func encodeRegistration(w ingestconfig.Worker) ([]byte, error) {
	b, err := json.Marshal(w)
	if err != nil {
		return nil, err
	}
	return proto.Marshal(&statev1.Registration{Version: version, Worker: b})
}

// DecodeRegistration decodes the registration of a worker.
func DecodeRegistration(name string, data []byte) (w ingestconfig.Worker, err error) {
	var r statev1.Registration
	if err := proto.Unmarshal(data, &r); err != nil {
		return w, err
	}
	if err := checkVersion(r.GetVersion()); err != nil {
		return w, err
	}
	if err := json.Unmarshal(r.GetWorker(), &w); err != nil {
		return w, err
	}
	if w.Name != name {
		return w, fmt.Errorf("it is of worker %q", w.Name)
	}
	return w, (&ingestconfig.Config{Workers: []ingestconfig.Worker{w}}).Validate()
}
