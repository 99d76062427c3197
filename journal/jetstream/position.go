package jetstream

import (
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"os"

	"golang.org/x/sys/unix"
)

// positionFile records, beside the embedded nats-server's files, which entries must be there. nats-server truncates a
// damaged file at the first bad record when it starts; without the record, the loss of the newest entries would go
// unnoticed, and their seqs would be used again. The file survives a crash of the process, not one of the machine, for
// which it is never ahead of what was acknowledged.
//
// It has two little-endian 64-bit numbers: the newest acknowledged seq, and the last seq that may have been purged.
type positionFile struct {
	file   *os.File
	mapped []byte // the file's contents, as they are now
	newest uint64 // as they were when the file was opened or set
	purged uint64
	// damaged means that newest and purged are unknown.
	damaged bool
}

const positionBytes = 16

// maxPosition is a seq that no journal reaches. A larger one means that the file is damaged.
const maxPosition = 1 << 53

// openPosition opens the file. A missing one is created, with the position 0.
func openPosition(name string) (*positionFile, error) {
	f, err := os.OpenFile(name, os.O_RDWR|os.O_CREATE, 0o600)
	if err != nil {
		return nil, err
	}
	p := &positionFile{file: f}
	var b [positionBytes]byte
	_, err = f.ReadAt(b[:], 0)
	if errors.Is(err, io.EOF) {
		_, err = f.WriteAt(b[:], 0) // allocates what is mapped
	}
	if err == nil {
		p.mapped, err = unix.Mmap(int(f.Fd()), 0, positionBytes, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED)
	}
	if err != nil {
		_ = f.Close()
		return nil, err
	}
	p.newest, p.purged = binary.LittleEndian.Uint64(p.mapped), binary.LittleEndian.Uint64(p.mapped[8:])
	if p.newest > maxPosition || p.purged > maxPosition {
		p.newest, p.purged, p.damaged = 0, 0, true
	}
	return p, nil
}

func (p *positionFile) close() error { return errors.Join(unix.Munmap(p.mapped), p.file.Close()) }

// set records a stream that is complete.
func (p *positionFile) set(newest, purged uint64) error {
	p.newest, p.purged, p.damaged = newest, purged, false
	p.setNewest(newest)
	return p.setPurged(purged)
}

// setNewest records an acknowledged entry.
func (p *positionFile) setNewest(seq uint64) { binary.LittleEndian.PutUint64(p.mapped, seq) }

// setPurged is called before the purge. It syncs the file, so that the record is not behind the purge either.
func (p *positionFile) setPurged(seq uint64) error {
	binary.LittleEndian.PutUint64(p.mapped[8:], seq)
	return p.file.Sync()
}

// forget makes check accept what there is.
func (p *positionFile) forget() { p.newest, p.purged, p.damaged = 0, 0, false }

// check returns an error if a stream with the entries from first to last has lost some.
func (p *positionFile) check(first, last uint64) error {
	if p.damaged {
		return fmt.Errorf("%w: %s is damaged, so that entries may be lost", ErrUnreadable, p.file.Name())
	}
	if last < p.newest {
		return fmt.Errorf("%w: the newest entries, %d to %d, are lost", ErrUnreadable, last+1, p.newest)
	}
	if p.newest > 0 && first > p.purged+1 {
		return fmt.Errorf("%w: the oldest entries, %d to %d, are lost", ErrUnreadable, p.purged+1, first-1)
	}
	return nil
}
