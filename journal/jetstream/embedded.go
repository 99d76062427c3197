package jetstream

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"github.com/nats-io/nats-server/v2/server"
	"github.com/nats-io/nats.go"
	"golang.org/x/sys/unix"

	"github.com/kvcast/kvcast/journal"
)

// Files in Config.Dir. nats-server's own are in its subdirectory "jetstream".
const (
	lockName       = "kvcast.lock"
	positionName   = "kvcast.position"
	keysName       = "kvcast.registered" // the keys of the registrations, a line each
	unreadableName = "unreadable-%d"     // files that nats-server could not read
	// indexName is where nats-server keeps the index of a stream's messages when it stops.
	indexName = "index.db"
)

const (
	// embeddedMaxPayload bounds an entry in the embedded nats-server, which warns of more.
	embeddedMaxPayload = 8 << 20
	// unlimited is the storage limit of the embedded nats-server: the disk is the limit.
	unlimited = 1 << 60
	// startTimeout bounds the start of the embedded nats-server after it has read its files.
	startTimeout = 30 * time.Second
)

// embedded is a nats-server in this process that listens nowhere.
type embedded struct {
	dir      string
	lock     *os.File
	position *positionFile
	server   *server.Server
	log      *serverLog    // of server
	faults   chan struct{} // nats-server has logged an error

	syncing sync.Mutex             // guards synced, and is held while files are synced
	synced  map[string]os.FileInfo // of the files of messages, by name, when they were last synced by syncMessages
}

// openEmbedded locks the directory, starts a nats-server in it and connects to it.
func (j *Journal) openEmbedded(ctx context.Context) error {
	dir := j.cfg.Dir
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return fmt.Errorf("open journal: %w", err)
	}
	lock, err := lockDir(dir)
	if err != nil {
		return err
	}
	j.server = &embedded{dir: dir, lock: lock, faults: make(chan struct{}, 1), synced: make(map[string]os.FileInfo)}
	if j.server.position, err = openPosition(filepath.Join(dir, positionName)); err != nil {
		return fmt.Errorf("open journal: %w", err)
	}
	if err := j.server.startWithStreams(j.cfg, j.log, j.cfg.Stream, bucketStream(j.cfg.Stream), workersStream(j.cfg.Stream)); err != nil {
		return err
	}
	checkpoints, registrations := bucketStream(j.cfg.Stream), workersStream(j.cfg.Stream)
	for _, streams := range [][]string{
		{j.cfg.Stream, checkpoints}, // checkpoints belong to the entries, so they are moved away together
		{checkpoints},
		{registrations},
	} {
		if err = j.server.moveUnreadable(streams, j.cfg, j.log); err != nil {
			break
		}
	}
	if err != nil {
		return fmt.Errorf("open journal: %w", err)
	}
	if err := ctx.Err(); err != nil {
		return err
	}
	return j.dial(nats.InProcessServer(j.server.server), j.options())
}

// lockDir makes this process the only one that uses a directory.
func lockDir(dir string) (*os.File, error) {
	f, err := os.OpenFile(filepath.Join(dir, lockName), os.O_RDWR|os.O_CREATE, 0o600)
	if err != nil {
		return nil, fmt.Errorf("open journal: %w", err)
	}
	if err := unix.Flock(int(f.Fd()), unix.LOCK_EX|unix.LOCK_NB); err != nil {
		_ = f.Close()
		if errors.Is(err, unix.EWOULDBLOCK) {
			return nil, fmt.Errorf("open journal: another process uses %s; give each kvcast a directory of its own", dir)
		}
		return nil, fmt.Errorf("lock %s: %w", f.Name(), err)
	}
	return f, nil
}

// startWithStreams starts the server. nats-server deletes the files of a stream if it cannot create another file beside them.
// So an error is returned before, if files cannot be created in the directories of streams. Their indexes are deleted, so that
// nats-server reads all messages and verifies their checksums. With an index it does not, and a damaged seq can make it hang
// for minutes, or use any amount of memory.
func (e *embedded) startWithStreams(cfg Config, log *slog.Logger, streams ...string) error {
	exist := make(map[string]bool)
	for _, stream := range streams {
		f, err := os.CreateTemp(e.streamDir(stream), "_test_")
		if errors.Is(err, os.ErrNotExist) {
			continue
		}
		if err == nil {
			err = errors.Join(f.Close(), os.Remove(f.Name()))
		}
		if err != nil {
			return storageError(fmt.Sprintf("create a file beside those of stream %q: %v", stream, err))
		}
		if err := os.Remove(filepath.Join(e.streamDir(stream), "msgs", indexName)); err != nil && !errors.Is(err, os.ErrNotExist) {
			return storageError(fmt.Sprintf("delete the index of stream %q: %v", stream, err))
		}
		exist[stream] = true
	}
	if err := e.start(cfg, log); err != nil {
		return err
	}
	for stream := range exist {
		if _, err := os.Stat(e.streamDir(stream)); errors.Is(err, os.ErrNotExist) {
			log.Error("nats-server has deleted the files of a stream that it could not open: what they had is lost.",
				"deleted", stream, "reason", e.log.warnings())
		}
	}
	return nil
}

func (e *embedded) start(cfg Config, log *slog.Logger) error {
	s, err := server.NewServer(&server.Options{
		ServerName:             "kvcast",
		DontListen:             true,
		NoSigs:                 true,
		JetStream:              true,
		StoreDir:               e.dir,
		JetStreamMaxStore:      unlimited,
		JetStreamMaxMemory:     64 << 20,
		DisableJetStreamBanner: true,
		MaxPayload:             embeddedMaxPayload,
		SyncAlways:             cfg.SyncAlways,
		SyncInterval:           cfg.SyncInterval,
	})
	if err != nil {
		return fmt.Errorf("start nats-server in %s: %w", e.dir, err)
	}
	e.server = s
	e.log = &serverLog{log: log, faults: e.faults}
	s.SetLoggerV2(e.log, log.Enabled(context.Background(), slog.LevelDebug), false, false)
	s.Start()
	if e.log.failed.Load() || !s.JetStreamEnabled() {
		return storageError(fmt.Sprintf("start nats-server in %s: %s", e.dir, e.log.warnings()))
	}
	if !s.ReadyForConnections(startTimeout) {
		return fmt.Errorf("start nats-server in %s: it is not ready after %v", e.dir, startTimeout)
	}
	return nil
}

func (e *embedded) streamDir(stream string) string {
	return filepath.Join(e.dir, server.JetStreamStoreDir, server.DEFAULT_GLOBAL_ACCOUNT, "streams", stream)
}

// moveUnreadable moves the files of streams away, and starts nats-server again, if there are files of the first stream and
// nats-server does not have it. If the cause may be temporary, it returns an error instead.
func (e *embedded) moveUnreadable(streams []string, cfg Config, log *slog.Logger) error {
	stream := streams[0]
	if _, err := os.Stat(e.streamDir(stream)); errors.Is(err, os.ErrNotExist) {
		return nil
	} else if err == nil {
		if err = e.health(stream); err == nil || errors.Is(err, errNoHealth) {
			return err
		}
	}
	reason := e.log.warnings()
	for _, temporary := range temporaryErrors {
		if strings.Contains(reason, temporary.Error()) {
			return storageError(reason)
		}
	}
	if err := e.stop(); err != nil {
		return err
	}
	to := ""
	for n := 1; to == ""; n++ {
		name := filepath.Join(e.dir, fmt.Sprintf(unreadableName, n))
		if err := os.Mkdir(name, 0o700); err == nil {
			to = name
		} else if !errors.Is(err, os.ErrExist) {
			return err
		}
	}
	for _, name := range slices.Backward(streams) { // the first is the last, so that a crash in between changes nothing
		if err := os.Rename(e.streamDir(name), filepath.Join(to, name)); err != nil && !errors.Is(err, os.ErrNotExist) {
			return err
		}
	}
	if stream == cfg.Stream {
		if err := e.position.set(0, 0); err != nil {
			return err
		}
	}
	log.Error("Files of the journal are unreadable. They are moved away, and what they had is lost.",
		"stream", stream, "moved_to", to, "reason", reason)
	return e.start(cfg, log)
}

// fullErrors are errors of a storage that is full, and temporaryErrors those that do not mean damaged files.
var (
	fullErrors      = []syscall.Errno{syscall.ENOSPC, syscall.EDQUOT, syscall.EFBIG}
	temporaryErrors = append([]syscall.Errno{syscall.EACCES, syscall.EPERM, syscall.EROFS, syscall.EIO, syscall.EMFILE, syscall.ENFILE, syscall.ENOMEM}, fullErrors...)
)

// errNoHealth means that it is not known whether the server can write to a stream.
var errNoHealth = errors.New("nats-server does not tell whether its files can be written")

// healthAttempts is how often a server is asked before health returns an errNoHealth.
const healthAttempts = 1000

// healthz is changed by tests.
var healthz = (*server.Server).Healthz

// health returns an error if the server cannot write to a stream. The server has one millisecond to find that it is ready, and
// says that it is not if the process does not run meanwhile: it is asked again. A server that is stuck does not answer.
func (e *embedded) health(stream string) error {
	for range healthAttempts {
		answers := make(chan *server.HealthStatus, 1)
		go func() {
			answers <- healthz(e.server, &server.HealthzOptions{Account: server.DEFAULT_GLOBAL_ACCOUNT, Stream: stream})
		}()
		var status *server.HealthStatus
		select {
		case status = <-answers:
		case <-time.After(requestTimeout):
			return errNoHealth
		}
		switch {
		case status.Error == "":
			return nil
		case !strings.Contains(status.Error, "failed to be ready for connections"):
			return storageError(status.Error)
		}
	}
	return errNoHealth
}

// storageError returns an error with the text of one of nats-server, which does not give the cause otherwise.
func storageError(text string) error {
	for _, full := range fullErrors {
		if strings.Contains(text, full.Error()) {
			return fmt.Errorf("%w: %s", journal.ErrNoSpace, text)
		}
	}
	return errors.New(text)
}

// syncMetadata syncs the files that have a stream's configuration and metadata.
func (e *embedded) syncMetadata(stream string) error {
	dir := e.streamDir(stream)
	for _, name := range []string{server.JetStreamMetaFile, server.JetStreamMetaFileSum, "."} {
		if err := syncFile(filepath.Join(dir, name)); err != nil {
			return fmt.Errorf("sync journal: %w", err)
		}
	}
	return nil
}

// syncMessages makes the messages of a stream that are acknowledged survive a crash of the machine. It syncs the files that
// have changed since the last call.
func (e *embedded) syncMessages(stream string) error {
	e.syncing.Lock()
	defer e.syncing.Unlock()
	dir := filepath.Join(e.streamDir(stream), "msgs")
	files, err := os.ReadDir(dir)
	created := false
	for _, file := range files {
		info, infoErr := file.Info()
		if filepath.Ext(file.Name()) != ".blk" || errors.Is(infoErr, os.ErrNotExist) { // nats-server has removed it meanwhile
			continue
		}
		name := filepath.Join(dir, file.Name())
		was := e.synced[name]
		if was != nil && os.SameFile(was, info) && was.Size() == info.Size() {
			continue // messages are only appended
		}
		created = created || was == nil || !os.SameFile(was, info)
		switch syncErr := errors.Join(infoErr, syncFile(name)); {
		case syncErr == nil:
			e.synced[name] = info
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

// stopTimeout bounds the stop of the nats-server, which writes what it has in memory. nats-server 2.15.2 can deadlock after an
// error of its files: a purge that finds the failure of an earlier write locks the stream's store twice.
const stopTimeout = 30 * time.Second

func (e *embedded) stop() error {
	if e.server == nil {
		return nil
	}
	stopped := make(chan struct{})
	go func() {
		e.server.Shutdown()
		e.server.WaitForShutdown()
		close(stopped)
	}()
	select {
	case <-stopped:
		return nil
	case <-time.After(stopTimeout):
		return fmt.Errorf("the NATS server in %s has not stopped within %v, which can follow an error of its files; the directory stays locked until the process ends", e.dir, stopTimeout)
	}
}

// close stops the server and unlocks the directory.
func (e *embedded) close() error {
	if err := e.stop(); err != nil {
		return err // the server may still write
	}
	var err error
	if e.position != nil {
		err = e.position.close()
	}
	return errors.Join(err, e.lock.Close())
}

// serverLog writes nats-server's log lines to a slog.Logger.
type serverLog struct {
	log    *slog.Logger
	faults chan struct{}

	failed atomic.Bool // the server does not start
	mu     sync.Mutex
	lines  []string // the first warnings and errors
}

// maxLines bounds the lines that warnings returns.
const maxLines = 8

// warnings returns the first warnings and errors.
func (l *serverLog) warnings() string {
	l.mu.Lock()
	defer l.mu.Unlock()
	return strings.Join(l.lines, "; ")
}

// Debugf implements server.Logger.
func (l *serverLog) Debugf(format string, v ...any) { _ = l.write(slog.LevelDebug, format, v) }

// Tracef implements server.Logger.
func (l *serverLog) Tracef(format string, v ...any) { _ = l.write(slog.LevelDebug, format, v) }

// Noticef implements server.Logger.
func (l *serverLog) Noticef(format string, v ...any) { _ = l.write(slog.LevelDebug, format, v) }

// Warnf implements server.Logger.
func (l *serverLog) Warnf(format string, v ...any) {
	line := l.write(slog.LevelWarn, format, v)
	l.mu.Lock()
	defer l.mu.Unlock()
	if len(l.lines) < maxLines {
		l.lines = append(l.lines, line)
	}
}

// Errorf implements server.Logger.
func (l *serverLog) Errorf(format string, v ...any) {
	l.Warnf(format, v...)
	signal(l.faults)
}

// Fatalf implements server.Logger. nats-server continues after it, without JetStream.
func (l *serverLog) Fatalf(format string, v ...any) {
	l.Errorf(format, v...)
	l.failed.Store(true)
}

func (l *serverLog) write(level slog.Level, format string, v []any) string {
	line := strings.TrimSpace(fmt.Sprintf(format, v...))
	l.log.Log(context.Background(), level, "nats-server: "+line)
	return line
}
