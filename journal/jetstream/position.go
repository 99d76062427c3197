package jetstream

import (
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"os"
)

// positionFile records, beside the embedded nats-server's files, which entries must be there. nats-server truncates a
// damaged file at the first bad record when it starts; without the record, the loss of the newest entries would go
// unnoticed, and their seqs would be used again. The file survives a crash of the process, not one of the machine, for
// which it is never ahead of what was acknowledged.
//
// It has two little-endian 64-bit numbers: the newest acknowledged seq, and the last seq that may have been purged.
type positionFile struct {
	file   *os.File
	newest uint64
	purged uint64
}

const positionBytes = 16

// openPosition opens the file. A missing one is created, with the position 0.
func openPosition(name string) (*positionFile, error) {
	f, err := os.OpenFile(name, os.O_RDWR|os.O_CREATE, 0o600)
	if err != nil {
		return nil, err
	}
	p := &positionFile{file: f}
	var b [positionBytes]byte
	switch _, err := f.ReadAt(b[:], 0); {
	case errors.Is(err, io.EOF):
		return p, p.set(0, 0)
	case err != nil:
		_ = f.Close()
		return nil, err
	}
	p.newest, p.purged = binary.LittleEndian.Uint64(b[:]), binary.LittleEndian.Uint64(b[8:])
	return p, nil
}

// set records a stream that is complete.
func (p *positionFile) set(newest, purged uint64) error {
	p.newest, p.purged = newest, purged
	if err := p.setNewest(newest); err != nil {
		return err
	}
	return p.setPurged(purged)
}

func (p *positionFile) setNewest(seq uint64) error {
	var b [8]byte
	binary.LittleEndian.PutUint64(b[:], seq)
	_, err := p.file.WriteAt(b[:], 0)
	return err
}

// setPurged is called before the purge. It syncs the file, so that the record is not behind the purge either.
func (p *positionFile) setPurged(seq uint64) error {
	var b [8]byte
	binary.LittleEndian.PutUint64(b[:], seq)
	if _, err := p.file.WriteAt(b[:], 8); err != nil {
		return err
	}
	return p.file.Sync()
}

// forget makes check accept what there is.
func (p *positionFile) forget() { p.newest, p.purged = 0, 0 }

// check returns an error if a stream with the entries from first to last has lost some.
func (p *positionFile) check(first, last uint64) error {
	if last < p.newest {
		return fmt.Errorf("%w: the newest entries, %d to %d, are lost", ErrUnreadable, last+1, p.newest)
	}
	if p.newest > 0 && first > p.purged+1 {
		return fmt.Errorf("%w: the oldest entries, %d to %d, are lost", ErrUnreadable, p.purged+1, first-1)
	}
	return nil
}
