package recovery

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"

	"google.golang.org/protobuf/proto"

	ingestconfig "github.com/kvcast/kvcast/ingest/config"
	statev1 "github.com/kvcast/kvcast/proto/kvcast/state/v1"
)

// version is the version of the stored messages.
const version = 1

// What the store has: a checkpoint of each worker, a registration of each registered worker, and what the pipeline keeps of
// removed workers.
const (
	workerPrefix       = "worker."
	registrationPrefix = "registered."
	removedName        = "removed"
)

func checkVersion(got uint32) error {
	if got != version {
		return fmt.Errorf("it has format version %d, and this kvcast reads version %d: use the kvcast that wrote it, or a later one", got, version)
	}
	return nil
}

func decodeCheckpoint(name string, data []byte) (*statev1.WorkerCheckpoint, error) {
	c := new(statev1.WorkerCheckpoint)
	if err := proto.Unmarshal(data, c); err != nil {
		return nil, err
	}
	switch err := checkVersion(c.GetVersion()); {
	case err != nil:
		return nil, err
	case workerPrefix+c.GetWorker() != name || c.GetIndex().GetWorker().GetWorker() != c.GetWorker():
		return nil, fmt.Errorf("it is of worker %q", c.GetWorker())
	case c.GetIndexUpTo() < c.GetIndexSeq() || c.GetIndexSeq() < c.GetPipelineSeq():
		return nil, errors.New("its seqs are not ascending")
	}
	return c, nil
}

// encodeRegistration encodes a registered worker.
func encodeRegistration(w ingestconfig.Worker) ([]byte, error) {
	b, err := json.Marshal(w)
	if err != nil {
		return nil, err
	}
	return proto.Marshal(&statev1.Registration{Version: version, Worker: b})
}

func decodeRegistration(name string, data []byte) (w ingestconfig.Worker, err error) {
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
	if registrationPrefix+w.Name != name {
		return w, fmt.Errorf("it is of worker %q", w.Name)
	}
	return w, (&ingestconfig.Config{Workers: []ingestconfig.Worker{w}}).Validate()
}

// Registrations stores the workers that were registered, until they are deregistered.
type Registrations struct{ Store Store }

// Add stores a worker.
func (r Registrations) Add(ctx context.Context, w ingestconfig.Worker) error {
	b, err := encodeRegistration(w)
	if err == nil {
		err = r.Store.Put(ctx, registrationPrefix+w.Name, b)
	}
	if err != nil {
		return fmt.Errorf("store the registration of worker %q: %w", w.Name, err)
	}
	return nil
}

// Remove deletes a worker, if it is stored.
func (r Registrations) Remove(ctx context.Context, name string) error {
	if err := r.Store.Delete(ctx, registrationPrefix+name); err != nil {
		return fmt.Errorf("delete the registration of worker %q: %w", name, err)
	}
	return nil
}
