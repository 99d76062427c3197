package embedded

import (
	"crypto/rand"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"os"
	"sync/atomic"
	"unsafe"

	"github.com/zeebo/xxh3"
	"golang.org/x/sys/unix"
)

// The 64-bit words of a position file, in the machine's byte order. Those up to wordChecksum are written once.
//
// A seq is sealed: it is in the upper 48 bits of a word, and the lower 16 are a checksum, which depends on the incarnation and the
// word and is never 0. To record an entry is to write one word, which a crash of the process does not tear: before and after it,
// the words of wordNewest have adjacent seqs.
const (
	wordMagic       = iota
	wordIncarnation // random, of this file
	wordInode       // identity of this file
	wordBirth
	wordEpoch    // XXH3-64 of the epoch's name
	wordChecksum // XXH3-64 of the words before
	wordPurged   // sealed: the last seq that may have been purged
	_            // unused: those of wordNewest share a cache line
	wordNewest   // sealed: the newest acknowledged seq if it is even, else the one before
	_            // sealed: the newest acknowledged seq if it is odd, else the one before
	positionWords
)

const (
	positionMagic = 0x6b76_6361_7374_7032 // "kvcastp2"
	positionBytes = 8 * positionWords
	// maxPosition is the largest seq that can be sealed. No journal reaches it.
	maxPosition = 1<<48 - 1
)

// errPosition means that a position file does not say which entries must be there.
var errPosition = errors.New("the position cannot be used")

// identity tells a file from its copies.
type identity struct {
	inode uint64
	// birth is when the file was created, in ns since 1970. No program can set it. It is 0 if the file system does not record it.
	birth uint64
	links uint64 // names of the file; not stored
}

// positionFile is a position file that this process writes.
type positionFile struct {
	file   *os.File
	mapped []byte   // the file's contents
	words  []uint64 // mapped
}

// createPosition creates a file, which is invalid until set is called.
func createPosition(name string, epoch uint64) (_ *positionFile, err error) {
	if err := os.Remove(name); err != nil && !errors.Is(err, os.ErrNotExist) { // a crash has left it
		return nil, err
	}
	file, err := os.OpenFile(name, os.O_RDWR|os.O_CREATE|os.O_EXCL, 0o600)
	if err != nil {
		return nil, err
	}
	defer func() {
		if err != nil {
			err = errors.Join(err, file.Close(), os.Remove(name))
		}
	}()
	id, err := identify(file)
	if err != nil {
		return nil, err
	}
	if _, err := file.Write(make([]byte, positionBytes)); err != nil { // allocates what is mapped
		return nil, err
	}
	mapped, err := unix.Mmap(int(file.Fd()), 0, positionBytes, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED)
	if err != nil {
		return nil, err
	}
	var incarnation [8]byte
	_, _ = rand.Read(incarnation[:]) // it does not fail
	w := unsafe.Slice((*uint64)(unsafe.Pointer(&mapped[0])), positionWords)
	w[wordMagic], w[wordIncarnation] = positionMagic, binary.NativeEndian.Uint64(incarnation[:])
	w[wordInode], w[wordBirth], w[wordEpoch] = id.inode, id.birth, epoch
	w[wordChecksum] = xxh3.Hash(mapped[:8*wordChecksum])
	return &positionFile{file, mapped, w}, nil
}

// set records what must be there.
func (f *positionFile) set(s positionState) {
	f.setPurged(s.purged)
	f.setNewest(s.newest - 1)
	f.setNewest(s.newest)
}

func (f *positionFile) setNewest(seq uint64) { f.seal(wordNewest+int(seq&1), seq) }

func (f *positionFile) setPurged(seq uint64) { f.seal(wordPurged, seq) }

func (f *positionFile) seal(word int, seq uint64) {
	atomic.StoreUint64(&f.words[word], sealed(f.words[wordIncarnation], word, seq))
}

func (f *positionFile) sync() error { return f.file.Sync() }

func (f *positionFile) close() error { return errors.Join(unix.Munmap(f.mapped), f.file.Close()) }

// sealed returns a word of a file with a seq.
func sealed(incarnation uint64, word int, seq uint64) uint64 {
	seq <<= 16
	var b [8]byte
	binary.NativeEndian.PutUint64(b[:], seq)
	return seq | xxh3.HashSeed(b[:], incarnation+uint64(word))&0xffff | 1
}

// newestOf returns the newest acknowledged seq of a valid file.
func newestOf(words []uint64) uint64 {
	even, odd := words[wordNewest]>>16, words[wordNewest+1]>>16
	if odd == (even+1)&maxPosition {
		return odd
	}
	return even
}

// readPosition reads a file. The error is an errPosition if the file is not valid, or a copy.
func readPosition(name string) (positionState, error) {
	file, err := os.Open(name)
	if err != nil {
		return positionState{}, err
	}
	defer func() { _ = file.Close() }()
	words := make([]uint64, positionWords+1)
	b := unsafe.Slice((*byte)(unsafe.Pointer(&words[0])), 8*len(words))
	n, err := io.ReadFull(file, b)
	if err != nil && !errors.Is(err, io.EOF) && !errors.Is(err, io.ErrUnexpectedEOF) {
		return positionState{}, err
	}
	id, err := identify(file)
	if err != nil {
		return positionState{}, err
	}
	if err := checkPosition(words, n, id); err != nil {
		return positionState{}, fmt.Errorf("%w: %w", errPosition, err)
	}
	return positionState{words[wordEpoch], newestOf(words), words[wordPurged] >> 16}, nil
}

// checkPosition returns an error if the words of a file with n bytes are not valid, or were written to another file.
func checkPosition(words []uint64, n int, id identity) error {
	if n != positionBytes {
		return fmt.Errorf("it has %d bytes, want %d: it is damaged, or of another version", min(n, positionBytes+1), positionBytes)
	}
	header := unsafe.Slice((*byte)(unsafe.Pointer(&words[0])), 8*wordChecksum)
	if words[wordMagic] != positionMagic || words[wordChecksum] != xxh3.Hash(header) {
		return errors.New("it is damaged")
	}
	for _, word := range []int{wordPurged, wordNewest, wordNewest + 1} {
		if words[word] != sealed(words[wordIncarnation], word, words[word]>>16) {
			return errors.New("it is damaged")
		}
	}
	even, odd := words[wordNewest]>>16, words[wordNewest+1]>>16
	if even%2 != 0 || odd != (even+1)&maxPosition && odd != (even-1)&maxPosition {
		return errors.New("it is damaged")
	}
	was := identity{inode: words[wordInode], birth: words[wordBirth]}
	if id.links > 1 {
		return errors.New("it has another link, in a directory that may be a copy")
	}
	if was.inode != id.inode || was.birth != id.birth && was.birth != 0 && id.birth != 0 {
		return errors.New("it was written to another file: it is a copy")
	}
	return nil
}
