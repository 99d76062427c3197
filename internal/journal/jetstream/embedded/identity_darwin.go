package embedded

import (
	"os"

	"golang.org/x/sys/unix"
)

// identify returns the identity of a file.
func identify(f *os.File) (identity, error) {
	var s unix.Stat_t
	if err := unix.Fstat(int(f.Fd()), &s); err != nil {
		return identity{}, &os.PathError{Op: "fstat", Path: f.Name(), Err: err}
	}
	return identity{s.Ino, uint64(s.Btim.Nano()), uint64(s.Nlink)}, nil
}
