package embedded

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"

	"github.com/nats-io/nats-server/v2/server"
)

// SyncMetadata syncs the files that have a stream's configuration and metadata.
func (s *Server) SyncMetadata(stream string) error {
	dir := s.streamDir(stream)
	for _, name := range []string{server.JetStreamMetaFile, server.JetStreamMetaFileSum, "."} {
		if err := syncFile(filepath.Join(dir, name)); err != nil {
			return fmt.Errorf("sync journal: %w", err)
		}
	}
	return nil
}

// SyncMessages makes the messages of a stream that are acknowledged survive a crash of the machine. It syncs the files that
// have changed since the last call.
func (s *Server) SyncMessages(stream string) error {
	s.syncing.Lock()
	defer s.syncing.Unlock()
	dir := filepath.Join(s.streamDir(stream), "msgs")
	files, err := os.ReadDir(dir)
	created := false
	for _, file := range files {
		info, infoErr := file.Info()
		if filepath.Ext(file.Name()) != ".blk" || errors.Is(infoErr, os.ErrNotExist) { // nats-server has removed it meanwhile
			continue
		}
		name := filepath.Join(dir, file.Name())
		was := s.synced[name]
		if was != nil && os.SameFile(was, info) && was.Size() == info.Size() {
			continue // messages are only appended
		}
		created = created || was == nil || !os.SameFile(was, info)
		switch syncErr := errors.Join(infoErr, syncFile(name)); {
		case syncErr == nil:
			s.synced[name] = info
		case !errors.Is(syncErr, os.ErrNotExist):
			err = errors.Join(err, syncErr)
		}
	}
	if created && err == nil {
		err = syncFile(dir)
	}
	if err != nil {
		return storageError(fmt.Sprintf("sync stream %q: %v", stream, err))
	}
	return nil
}

func syncFile(name string) error {
	f, err := os.Open(name)
	if err != nil {
		return err
	}
	return errors.Join(f.Sync(), f.Close())
}
