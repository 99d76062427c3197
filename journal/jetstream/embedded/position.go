package embedded

import (
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"os"

	"golang.org/x/sys/unix"
)

// Position records, in a file beside nats-server's, which entries must be there. nats-server truncates a
// damaged file at the first bad record when it starts; without the record, the loss of the newest entries would go
// unnoticed, and their seqs would be used again. The file survives a crash of the process, not one of the machine, for
// which it is never ahead of what was acknowledged.
//
// It has two little-endian 64-bit numbers: the newest acknowledged seq, and the last seq that may have been purged.
type Position struct {
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
func openPosition(name string) (*Position, error) {
	f, err := os.OpenFile(name, os.O_RDWR|os.O_CREATE, 0o600)
	if err != nil {
		return nil, err
	}
	p := &Position{file: f}
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

func (p *Position) close() error { return errors.Join(unix.Munmap(p.mapped), p.file.Close()) }

// Newest returns the newest acknowledged seq as it was when the file was opened or set.
func (p *Position) Newest() uint64 { return p.newest }

// Set records a stream that is complete.
func (p *Position) Set(newest, purged uint64) error {
	p.newest, p.purged, p.damaged = newest, purged, false
	p.SetNewest(newest)
	return p.SetPurged(purged)
}

// SetNewest records an acknowledged entry.
func (p *Position) SetNewest(seq uint64) { binary.LittleEndian.PutUint64(p.mapped, seq) }

// SetPurged records the last seq of a purge, before the purge. It syncs the file, so that the record is not behind the purge either.
func (p *Position) SetPurged(seq uint64) error {
	binary.LittleEndian.PutUint64(p.mapped[8:], seq)
	return p.file.Sync()
}

// Forget makes Check accept what there is.
func (p *Position) Forget() { p.newest, p.purged, p.damaged = 0, 0, false }

// Check returns an error if a stream with the entries from first to last has lost some.
func (p *Position) Check(first, last uint64) error {
	if p.damaged {
		return fmt.Errorf("%s is damaged, so that entries may be lost", p.file.Name())
	}
	if last < p.newest {
		return fmt.Errorf("the newest entries, %d to %d, are lost", last+1, p.newest)
	}
	if p.newest > 0 && first > p.purged+1 {
		return fmt.Errorf("the oldest entries, %d to %d, are lost", p.purged+1, first-1)
	}
	return nil
}
