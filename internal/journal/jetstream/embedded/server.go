// Package embedded runs a nats-server with JetStream in this process.
//
// In: a directory, which one process uses at a time. Out: a server that listens on no port and stores its streams there. Guarantee:
// files that nats-server cannot read are kept, in a directory beside them; and the caller can check whether entries that were
// acknowledged are missing, or may be because the directory is an older copy, which nats-server does not report.
package embedded

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"syscall"
	"time"

	"github.com/nats-io/nats-server/v2/server"
	"golang.org/x/sys/unix"

	"github.com/kvcast/kvcast/internal/journal"
)

// Files in Config.Dir. nats-server's own are in its subdirectory "jetstream".
const (
	lockName       = "kvcast.lock"
	positionName   = "kvcast.position"
	unreadableName = "unreadable-%d" // files that nats-server could not read
	// indexName is the file to which nats-server writes the index of a stream's messages when it stops.
	indexName = "index.db"
)

const (
	// maxPayload bounds a message. nats-server warns of more.
	maxPayload = 8 << 20
	// unlimited is the storage limit: the disk is the limit.
	unlimited = 1 << 60
	// startTimeout bounds the start after the server has read its files.
	startTimeout = 30 * time.Second
	// stopTimeout bounds the stop, which writes what the server has in memory. nats-server 2.15.2 can deadlock after an error of
	// its files: a purge that finds the failure of an earlier write locks the stream's store twice.
	stopTimeout = 30 * time.Second
	// slowStop is the time after which a stop is reported that has not ended. The process may end before stopTimeout.
	slowStop = 3 * time.Second
	// healthTimeout bounds one health check.
	healthTimeout = 5 * time.Second
)

// Config configures a Server.
type Config struct {
	// Dir is the directory of the files. It is created if it does not exist.
	Dir string
	// SyncAlways makes the server sync each message to the disk before it acknowledges it.
	SyncAlways bool
	// SyncInterval is how often it syncs to the disk without SyncAlways.
	SyncInterval time.Duration
	// Log gets the server's log lines, at the levels Debug and Warn, and an error if files were moved or deleted.
	Log *slog.Logger
}

// Server is a nats-server in this process.
type Server struct {
	// Position records which entries the stream must have.
	Position *Position

	cfg    Config
	lock   *os.File
	nats   *server.Server
	log    *serverLog    // of nats
	faults chan struct{} // nats has logged an error

	syncing sync.Mutex             // guards synced, and is held while files are synced
	synced  map[string]os.FileInfo // of the files of messages, by name, when they were last synced by SyncMessages
}

// Start locks the directory and starts a server in it. streams are those that the caller uses; see MoveUnreadable. It fails if
// another process uses the directory.
func Start(cfg Config, streams ...string) (_ *Server, err error) {
	if err := os.MkdirAll(cfg.Dir, 0o700); err != nil {
		return nil, err
	}
	lock, err := lockDir(cfg.Dir)
	if err != nil {
		return nil, err
	}
	s := &Server{cfg: cfg, lock: lock, faults: make(chan struct{}, 1), synced: make(map[string]os.FileInfo)}
	defer func() {
		if err != nil {
			err = errors.Join(err, s.Close())
		}
	}()
	if s.Position, err = openPosition(cfg.Dir); err != nil {
		return nil, err
	}
	if err := s.startWithStreams(streams); err != nil {
		return nil, err
	}
	return s, nil
}

// NATS returns the nats-server, to connect to it. MoveUnreadable can replace it.
func (s *Server) NATS() *server.Server { return s.nats }

// Faults returns a channel that has an element when the server has logged an error since the last one was received.
func (s *Server) Faults() <-chan struct{} { return s.faults }

// lockDir makes this process the only one that uses a directory.
func lockDir(dir string) (*os.File, error) {
	f, err := os.OpenFile(filepath.Join(dir, lockName), os.O_RDWR|os.O_CREATE, 0o600)
	if err != nil {
		return nil, err
	}
	if err := unix.Flock(int(f.Fd()), unix.LOCK_EX|unix.LOCK_NB); err != nil {
		_ = f.Close()
		if errors.Is(err, unix.EWOULDBLOCK) {
			return nil, fmt.Errorf("another process uses %s; give each kvcast a directory of its own", dir)
		}
		return nil, fmt.Errorf("lock %s: %w", f.Name(), err)
	}
	return f, nil
}

// unlock ends the lock of a file, and closes it. Closing it alone would leave it locked while a process that was just forked has not begun
// its program, since it still has the file then.
func unlock(f *os.File) error { return errors.Join(unix.Flock(int(f.Fd()), unix.LOCK_UN), f.Close()) }

// startWithStreams starts the server. nats-server deletes the files of a stream if it cannot create another file beside them.
// So an error is returned before, if files cannot be created in the directories of streams. Their indexes are deleted, so that
// nats-server reads all messages and verifies their checksums. With an index it does not, and a damaged seq can make it hang
// for minutes, or use any amount of memory.
func (s *Server) startWithStreams(streams []string) error {
	exist := make(map[string]bool)
	for _, stream := range streams {
		f, err := os.CreateTemp(s.streamDir(stream), "_test_")
		if errors.Is(err, os.ErrNotExist) {
			continue
		}
		if err == nil {
			err = errors.Join(f.Close(), os.Remove(f.Name()))
		}
		if err != nil {
			return storageError(fmt.Sprintf("create a file beside those of stream %q: %v", stream, err))
		}
		if err := os.Remove(filepath.Join(s.streamDir(stream), "msgs", indexName)); err != nil && !errors.Is(err, os.ErrNotExist) {
			return storageError(fmt.Sprintf("delete the index of stream %q: %v", stream, err))
		}
		exist[stream] = true
	}
	if err := s.setAsideTooLarge(); err != nil {
		return storageError(fmt.Sprintf("look at the files of the streams: %v", err))
	}
	if err := s.start(); err != nil {
		return err
	}
	for stream := range exist {
		if _, err := os.Stat(s.streamDir(stream)); errors.Is(err, os.ErrNotExist) {
			s.cfg.Log.Error("nats-server has deleted the files of a stream that it could not open: what they had is lost.",
				"deleted", stream, "reason", s.log.warnings())
		}
	}
	return nil
}

// maxMetadata is more than nats-server writes to a file of metadata: a configuration and a checksum.
const maxMetadata = 1 << 20

// setAsideTooLarge renames files of metadata that are damaged, since they are too large: nats-server would read the whole of each, and take
// minutes and several times its size in memory to say what is wrong. It treats a stream without metadata as one that it cannot read.
func (s *Server) setAsideTooLarge() error {
	return filepath.WalkDir(filepath.Join(s.cfg.Dir, server.JetStreamStoreDir), func(name string, d fs.DirEntry, err error) error {
		if errors.Is(err, os.ErrNotExist) {
			return nil
		}
		if err != nil || d.Name() != server.JetStreamMetaFile && d.Name() != server.JetStreamMetaFileSum {
			return err
		}
		info, err := d.Info()
		switch {
		case errors.Is(err, os.ErrNotExist): // nats-server was still deleting it
			return nil
		case err != nil || info.Size() <= maxMetadata:
			return err
		}
		s.cfg.Log.Error("A file of the journal is damaged: it is too large, and is set aside.", "file", name, "bytes", info.Size(), "allowed", maxMetadata)
		return os.Rename(name, name+".too_large")
	})
}

func (s *Server) start() error {
	nats, err := server.NewServer(&server.Options{
		ServerName:             "kvcast",
		DontListen:             true,
		NoSigs:                 true,
		JetStream:              true,
		StoreDir:               s.cfg.Dir,
		JetStreamMaxStore:      unlimited,
		JetStreamMaxMemory:     64 << 20,
		DisableJetStreamBanner: true,
		MaxPayload:             maxPayload,
		SyncAlways:             s.cfg.SyncAlways,
		SyncInterval:           s.cfg.SyncInterval,
	})
	if err != nil {
		return fmt.Errorf("start nats-server in %s: %w", s.cfg.Dir, err)
	}
	s.nats = nats
	s.log = &serverLog{log: s.cfg.Log, faults: s.faults}
	nats.SetLoggerV2(s.log, s.cfg.Log.Enabled(context.Background(), slog.LevelDebug), false, false)
	nats.Start()
	if s.log.failed.Load() || !nats.JetStreamEnabled() {
		return storageError(fmt.Sprintf("start nats-server in %s: %s", s.cfg.Dir, s.log.warnings()))
	}
	if !nats.ReadyForConnections(startTimeout) {
		return fmt.Errorf("start nats-server in %s: it is not ready after %v", s.cfg.Dir, startTimeout)
	}
	return nil
}

func (s *Server) streamDir(stream string) string {
	return filepath.Join(s.cfg.Dir, server.JetStreamStoreDir, server.DEFAULT_GLOBAL_ACCOUNT, "streams", stream)
}

// CheckDir returns an error if the directory, or that of a stream, was removed or replaced. The server does not notice: it goes on
// writing to its open files, which no later start finds.
func (s *Server) CheckDir(stream string) error {
	_, err := os.Stat(s.streamDir(stream))
	if err == nil {
		var ours, there os.FileInfo
		if ours, err = s.lock.Stat(); err == nil {
			there, err = os.Stat(s.lock.Name())
		}
		if err == nil && !os.SameFile(ours, there) {
			err = fmt.Errorf("%w: another file has the name %s", os.ErrNotExist, s.lock.Name())
		}
	}
	if errors.Is(err, os.ErrNotExist) {
		return fmt.Errorf("the files of the journal in %s were removed or replaced while it was open, so what is stored would be lost: %w", s.cfg.Dir, err)
	}
	return nil // other errors may be temporary
}

// MoveUnreadable moves the files of streams to a directory beside those of the server, and starts the server again, if there are
// files of the first stream and the server does not have it. If the cause may be temporary, it returns an error instead.
func (s *Server) MoveUnreadable(streams ...string) (moved bool, err error) {
	stream := streams[0]
	if _, err := os.Stat(s.streamDir(stream)); errors.Is(err, os.ErrNotExist) {
		return false, nil
	} else if err == nil {
		if err = s.Health(stream); err == nil || errors.Is(err, ErrNoHealth) {
			return false, err
		}
	}
	reason := s.log.warnings()
	for _, temporary := range temporaryErrors {
		if strings.Contains(reason, temporary.Error()) {
			return false, storageError(reason)
		}
	}
	if err := s.stop(); err != nil {
		return false, err
	}
	to := ""
	for n := 1; to == ""; n++ {
		name := filepath.Join(s.cfg.Dir, fmt.Sprintf(unreadableName, n))
		if err := os.Mkdir(name, 0o700); err == nil {
			to = name
		} else if !errors.Is(err, os.ErrExist) {
			return false, err
		}
	}
	for _, name := range slices.Backward(streams) { // the first is the last, so that a crash in between changes nothing
		if err := os.Rename(s.streamDir(name), filepath.Join(to, name)); err != nil && !errors.Is(err, os.ErrNotExist) {
			return false, err
		}
	}
	s.cfg.Log.Error("Files of the journal are unreadable. They are moved away, and what they had is lost.",
		"stream", stream, "moved_to", to, "reason", reason)
	return true, s.start()
}

// fullErrors are errors of a storage that is full, and temporaryErrors those that do not mean damaged files.
var (
	fullErrors      = []syscall.Errno{syscall.ENOSPC, syscall.EDQUOT, syscall.EFBIG}
	temporaryErrors = append([]syscall.Errno{syscall.EACCES, syscall.EPERM, syscall.EROFS, syscall.EIO, syscall.EMFILE, syscall.ENFILE, syscall.ENOMEM}, fullErrors...)
)

// ErrNoHealth means that it is not known whether the server can write to a stream.
var ErrNoHealth = errors.New("nats-server does not report whether its files can be written")

// healthAttempts is the number of health checks after which Health returns ErrNoHealth.
const healthAttempts = 1000

// healthz is changed by tests.
var healthz = (*server.Server).Healthz

// Health returns an error if the server cannot write to a stream, and ErrNoHealth if that is unknown. nats-server checks first whether it
// accepts connections, with a timeout of one millisecond. If the process is not scheduled in that millisecond, the check fails although the
// server is healthy, so Health repeats it. A server that is stuck does not answer: Health then gives up after healthTimeout.
func (s *Server) Health(stream string) error {
	for range healthAttempts {
		answers := make(chan *server.HealthStatus, 1)
		go func() {
			answers <- healthz(s.nats, &server.HealthzOptions{Account: server.DEFAULT_GLOBAL_ACCOUNT, Stream: stream})
		}()
		var status *server.HealthStatus
		select {
		case status = <-answers:
		case <-time.After(healthTimeout):
			return ErrNoHealth
		}
		switch {
		case status.Error == "":
			return nil
		case !strings.Contains(status.Error, "failed to be ready for connections"):
			return storageError(status.Error)
		}
	}
	return ErrNoHealth
}

// storageError returns an error with the text of one of nats-server, which does not give the cause otherwise. It is a
// journal.ErrNoSpace if the storage is full.
func storageError(text string) error {
	for _, full := range fullErrors {
		if strings.Contains(text, full.Error()) {
			return fmt.Errorf("%w: %s", journal.ErrNoSpace, text)
		}
	}
	return errors.New(text)
}

func (s *Server) stop() error {
	if s.nats == nil {
		return nil
	}
	stopped := make(chan struct{})
	go func() {
		s.nats.Shutdown()
		s.nats.WaitForShutdown()
		close(stopped)
	}()
	return s.awaitStop(stopped)
}

// awaitStop waits until the server has stopped, or for stopTimeout.
func (s *Server) awaitStop(stopped <-chan struct{}) error {
	const cause = "which can follow an error of its files"
	slow := time.After(slowStop)
	timeout := time.After(stopTimeout)
	for {
		select {
		case <-stopped:
			return nil
		case <-slow:
			s.cfg.Log.Warn("The NATS server has not stopped yet, "+cause+".", "dir", s.cfg.Dir, "after", slowStop)
		case <-timeout:
			return fmt.Errorf("the NATS server in %s has not stopped within %v, %s; the directory stays locked until the process ends",
				s.cfg.Dir, stopTimeout, cause)
		}
	}
}

// Close stops the server and unlocks the directory.
func (s *Server) Close() error {
	if err := s.stop(); err != nil {
		return err // the server may still write
	}
	var err error
	if s.Position != nil {
		var unrenewed error
		if unrenewed, err = s.Position.close(); unrenewed != nil {
			s.cfg.Log.Warn("The position cannot be renewed. An older copy of it is not noticed if it is written over the file in place.",
				"dir", s.cfg.Dir, "error", unrenewed)
		}
	}
	return errors.Join(err, unlock(s.lock))
}
