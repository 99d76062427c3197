package embedded

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"sync"

	"github.com/zeebo/xxh3"
)

// Position records, in a file beside nats-server's, which entries must be there, and of which epoch. nats-server truncates a damaged file
// at the first bad record when it starts; without the record, the loss of the newest entries would go unnoticed, and their seqs would be
// used again. The file survives a crash of the process, not one of the machine, for which it is never ahead of what was acknowledged.
//
// An older copy of the directory must not pass for the journal. So each file records its own identity, which a copy does not have.
// A copy whose contents are written over the files in place has their identities: so the file is replaced at each start, at each
// end, and by Renew. A file that was replaced is made invalid, for directories with another link to it.
//
// After a start the caller calls Doubt, Forget if there is any, and Check; and then Set, before the other methods.
type Position struct {
	dir   string
	found positionState // of the file that was there at the start, or as it was set
	doubt error         // why found does not say what must be there; nil if it does

	mu   sync.Mutex // guards all below
	now  positionState
	file *positionFile // nil before Set
	next *positionFile // replaces file; nil if none does
	// renewed is the newest seq when file was created.
	renewed uint64
}

// positionState is what a position file says.
type positionState struct {
	epoch  uint64 // XXH3-64 of its name
	newest uint64 // the newest acknowledged seq
	purged uint64 // the last seq that may have been purged
}

// openPosition reads the file of a directory. A file that does not say what must be there is no error, but a doubt.
func openPosition(dir string) (*Position, error) {
	p := &Position{dir: dir}
	var err error
	if p.found, err = readPosition(p.name()); err == nil {
		return p, nil
	}
	p.doubt = fmt.Errorf("%s: %w", p.name(), err)
	if !errors.Is(err, errPosition) && !errors.Is(err, os.ErrNotExist) {
		return nil, p.doubt
	}
	return p, nil
}

func (p *Position) name() string { return filepath.Join(p.dir, positionName) }

// Doubt returns an error if the file does not say which entries of an epoch must be there: it is missing, damaged, a copy, or of
// another epoch.
func (p *Position) Doubt(epoch string) error {
	if p.doubt == nil && p.found.epoch != xxh3.HashString(epoch) {
		p.doubt = fmt.Errorf("%s: %w: it is of another epoch than the entries", p.name(), errPosition)
	}
	return p.doubt
}

// Forget makes Check accept what there is.
func (p *Position) Forget() { p.found, p.doubt = positionState{}, nil }

// Check returns an error if a stream with the entries from first to last has lost some.
func (p *Position) Check(first, last uint64) error {
	if p.doubt != nil {
		return p.doubt
	}
	if last < p.found.newest {
		return fmt.Errorf("the newest entries, %d to %d, are lost", last+1, p.found.newest)
	}
	if p.found.newest > 0 && first > p.found.purged+1 {
		return fmt.Errorf("the oldest entries, %d to %d, are lost", p.found.purged+1, first-1)
	}
	return nil
}

// Newest returns the newest acknowledged seq as it was at the start, or as it was set; 0 if it is unknown.
func (p *Position) Newest() uint64 { return p.found.newest }

// Set records a stream that is complete.
func (p *Position) Set(epoch string, newest, purged uint64) error {
	p.found, p.doubt = positionState{xxh3.HashString(epoch), newest, purged}, nil
	p.mu.Lock()
	p.now = p.found
	p.mu.Unlock()
	return p.replace()
}

// SetNewest records the entry that is acknowledged next after that of Set or of the last call.
func (p *Position) SetNewest(seq uint64) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.now.newest = seq
	p.file.setNewest(seq)
	if p.next != nil {
		p.next.setNewest(seq)
	}
}

// SetPurged records the last seq of a purge, before the purge. It syncs the file, so that the record is not behind the purge
// either. It must not be called concurrently with Renew.
func (p *Position) SetPurged(seq uint64) error {
	p.mu.Lock()
	p.now.purged = seq
	p.file.setPurged(seq)
	p.mu.Unlock()
	return p.file.sync()
}

// Renew replaces the file, unless no entry was acknowledged since it was created. Copies of the directory made before are then
// known as such also if their contents are written over the files in place.
func (p *Position) Renew() error {
	p.mu.Lock()
	current := p.file == nil || p.now.newest == p.renewed
	p.mu.Unlock()
	if current {
		return nil
	}
	return p.replace()
}

// replace replaces the file. The directory has a complete one at any time.
func (p *Position) replace() error {
	if err := p.replaceFile(); err != nil {
		return storageError(fmt.Sprintf("replace the file of the position: %v", err))
	}
	return nil
}

func (p *Position) replaceFile() error {
	was, err := os.OpenFile(p.name(), os.O_WRONLY, 0)
	if err == nil {
		defer func() { _ = was.Close() }()
	} else if !errors.Is(err, os.ErrNotExist) {
		return err
	}
	next, err := createPosition(p.name()+".new", p.found.epoch)
	if err != nil {
		return err
	}
	p.mu.Lock()
	next.set(p.now)
	newest := p.now.newest
	p.next = next // both are written until it is decided which one stays
	p.mu.Unlock()
	if err = next.sync(); err == nil {
		err = os.Rename(next.file.Name(), p.name())
	}
	p.mu.Lock()
	former := p.file
	p.next = nil
	if err == nil {
		p.file, p.renewed = next, newest
	}
	p.mu.Unlock()
	if err != nil {
		return errors.Join(err, next.close(), os.Remove(next.file.Name()))
	}
	if former != nil {
		err = former.close()
	}
	err = errors.Join(err, syncFile(p.dir))
	if err == nil && was != nil { // a crash of the machine does not bring it back
		_, err = was.WriteAt(make([]byte, positionBytes), 0)
	}
	return err
}

// close renews and closes the file. unrenewed is why it could not be renewed, which loses nothing.
func (p *Position) close() (unrenewed, err error) {
	unrenewed = p.Renew()
	if p.file != nil {
		err = p.file.close()
	}
	return unrenewed, err
}
