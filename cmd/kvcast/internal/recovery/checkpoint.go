package recovery

import (
	"errors"
	"fmt"
	"strings"

	"google.golang.org/protobuf/proto"

	statev1 "github.com/kvcast/kvcast/proto/kvcast/state/v1"
)

// version is the version of the stored messages.
const version = 1

// What the store has: a checkpoint of each worker, and what the pipeline keeps of removed workers.
const (
	workerPrefix = "worker."
	removedName  = "removed"
)

// CheckpointName returns the name of a worker's checkpoint in the store.
func CheckpointName(worker string) string { return workerPrefix + worker }

// WorkerOf returns the worker whose checkpoint has a name.
func WorkerOf(name string) (worker string, ok bool) { return strings.CutPrefix(name, workerPrefix) }

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
