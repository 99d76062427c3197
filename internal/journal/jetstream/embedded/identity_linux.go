package embedded

import (
	"os"

	"golang.org/x/sys/unix"
)

// identify returns the identity of a file.
func identify(f *os.File) (identity, error) {
	var s unix.Statx_t
	if err := unix.Statx(int(f.Fd()), "", unix.AT_EMPTY_PATH, unix.STATX_INO|unix.STATX_BTIME|unix.STATX_NLINK, &s); err != nil {
		return identity{}, &os.PathError{Op: "statx", Path: f.Name(), Err: err}
	}
	id := identity{inode: s.Ino, links: uint64(s.Nlink)}
	if s.Mask&unix.STATX_BTIME != 0 {
		id.birth = uint64(s.Btime.Sec)*1e9 + uint64(s.Btime.Nsec)
	}
	return id, nil
}
