package faultfs

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"sync"
	"syscall"
	"testing"

	"github.com/hanwen/go-fuse/v2/fs"
	"github.com/hanwen/go-fuse/v2/fuse"
	"golang.org/x/sys/unix"
)

// Kind is a kind of operation.
type Kind string

// The operations that a test is asked about, named after their system calls.
const (
	Create   Kind = "create"
	Write    Kind = "write"
	Fsync    Kind = "fsync"
	Truncate Kind = "truncate"
	Rename   Kind = "rename"
	Unlink   Kind = "unlink"
	Mkdir    Kind = "mkdir"
	Rmdir    Kind = "rmdir"
)

// Op is an operation that is about to be executed.
type Op struct {
	Kind Kind
	// Path is relative to the file system's root. Of Rename, it is the new path.
	Path string
	// Bytes is the length of a Write.
	Bytes int
}

// Fault is what happens instead of an operation. The zero Fault is the operation.
type Fault struct {
	// Errno is the error of the operation.
	Errno syscall.Errno
	// Kill kills the program with SIGKILL.
	Kill bool
	// Wrote is how many bytes are written nevertheless.
	Wrote int
}

// FS is a mounted file system. It syncs nothing.
type FS struct {
	dir, files string

	mu     sync.Mutex // guards decide, and is held while it runs
	decide func(Op) Fault
}

// maxWrite is the maximum length of a Write, in bytes.
const maxWrite = 128 << 10

// Mount mounts a file system with the files of a directory, until the test ends. It skips the test if the machine does not
// allow it. The test itself must not use Dir, only Files.
func Mount(t testing.TB, files string) *FS {
	t.Helper()
	f := &FS{dir: t.TempDir(), files: files, decide: func(Op) Fault { return Fault{} }}
	loopback, err := fs.NewLoopbackRoot(files)
	if err != nil {
		t.Fatal(err)
	}
	// fs.Mount would let child processes inherit the device: then the file system would outlive this process.
	device, err := os.OpenFile("/dev/fuse", os.O_RDWR, 0)
	if err == nil {
		err = unix.Mount("faultfs", f.dir, "fuse.faultfs", unix.MS_NOSUID|unix.MS_NODEV,
			fmt.Sprintf("fd=%d,rootmode=40000,user_id=%d,group_id=%d,max_read=%d", device.Fd(), os.Geteuid(), os.Getegid(), maxWrite))
	}
	if err != nil {
		t.Skipf("a file system with faults cannot be mounted, which needs Linux, /dev/fuse and root: %v", err)
	}
	fd, err := unix.FcntlInt(device.Fd(), unix.F_DUPFD_CLOEXEC, 3) // the server closes it
	if err == nil {
		err = device.Close()
	}
	if err != nil {
		t.Fatal(err)
	}
	server, err := fs.Mount(fmt.Sprintf("/dev/fd/%d", fd), &node{loopback.(*fs.LoopbackNode), f}, &fs.Options{
		MountOptions: fuse.MountOptions{MaxWrite: maxWrite},
	})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := unix.Unmount(f.dir, unix.MNT_DETACH); err != nil {
			t.Errorf("unmount %s: %v", f.dir, err)
		}
		server.Wait()
	})
	return f
}

// Dir returns where the file system is mounted.
func (f *FS) Dir() string { return f.dir }

// Files returns the directory that has the files.
func (f *FS) Files() string { return f.files }

// OnOp makes the file system call a function before each operation that changes files, one at a time.
func (f *FS) OnOp(decide func(Op) Fault) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.decide = decide
}

// before asks the test about an operation.
func (f *FS) before(ctx context.Context, op Op) Fault {
	f.mu.Lock()
	defer f.mu.Unlock()
	fault := f.decide(op)
	if !fault.Kill {
		return fault
	}
	if caller, ok := fuse.FromContext(ctx); ok && caller.Pid > 1 {
		_ = syscall.Kill(int(caller.Pid), syscall.SIGKILL)
	}
	fault.Errno = syscall.EIO // nobody sees it
	return fault
}

// node is a file or a directory.
type node struct {
	*fs.LoopbackNode
	fs *FS
}

func (n *node) WrapChild(_ context.Context, ops fs.InodeEmbedder) fs.InodeEmbedder {
	return &node{ops.(*fs.LoopbackNode), n.fs}
}

// before returns the fault of an operation on a name in the directory n, or on n itself if the name is "".
func (n *node) before(ctx context.Context, kind Kind, name string, bytes int) Fault {
	return n.fs.before(ctx, Op{kind, filepath.Join(n.Path(n.Root()), name), bytes})
}

// handle is an open file. The kernel must not bypass this package.
type handle struct{ *fs.LoopbackFile }

func (handle) PassthroughFd() (int, bool) { return 0, false }

func wrap(f fs.FileHandle) fs.FileHandle {
	if l, ok := f.(*fs.LoopbackFile); ok {
		return handle{l}
	}
	return f
}

func (n *node) Open(ctx context.Context, flags uint32) (fs.FileHandle, uint32, syscall.Errno) {
	f, fuseFlags, errno := n.LoopbackNode.Open(ctx, flags)
	return wrap(f), fuseFlags, errno
}

func (n *node) Create(ctx context.Context, name string, flags, mode uint32, out *fuse.EntryOut) (*fs.Inode, fs.FileHandle, uint32, syscall.Errno) {
	if fault := n.before(ctx, Create, name, 0); fault.Errno != 0 {
		return nil, nil, 0, fault.Errno
	}
	child, f, fuseFlags, errno := n.LoopbackNode.Create(ctx, name, flags, mode, out)
	return child, wrap(f), fuseFlags, errno
}

func (n *node) Write(ctx context.Context, f fs.FileHandle, data []byte, off int64) (uint32, syscall.Errno) {
	fault := n.before(ctx, Write, "", len(data))
	if fault.Errno == 0 {
		return f.(fs.FileWriter).Write(ctx, data, off)
	}
	if part := data[:min(fault.Wrote, len(data))]; len(part) > 0 {
		_, _ = f.(fs.FileWriter).Write(ctx, part, off)
	}
	return 0, fault.Errno
}

func (n *node) Fsync(ctx context.Context, _ fs.FileHandle, _ uint32) syscall.Errno {
	return n.before(ctx, Fsync, "", 0).Errno
}

func (n *node) Setattr(ctx context.Context, f fs.FileHandle, in *fuse.SetAttrIn, out *fuse.AttrOut) syscall.Errno {
	if _, ok := in.GetSize(); ok {
		if fault := n.before(ctx, Truncate, "", 0); fault.Errno != 0 {
			return fault.Errno
		}
	}
	return n.LoopbackNode.Setattr(ctx, f, in, out)
}

func (n *node) Rename(ctx context.Context, name string, parent fs.InodeEmbedder, newName string, flags uint32) syscall.Errno {
	if fault := parent.(*node).before(ctx, Rename, newName, 0); fault.Errno != 0 {
		return fault.Errno
	}
	return n.LoopbackNode.Rename(ctx, name, parent, newName, flags)
}

func (n *node) Unlink(ctx context.Context, name string) syscall.Errno {
	if fault := n.before(ctx, Unlink, name, 0); fault.Errno != 0 {
		return fault.Errno
	}
	return n.LoopbackNode.Unlink(ctx, name)
}

func (n *node) Mkdir(ctx context.Context, name string, mode uint32, out *fuse.EntryOut) (*fs.Inode, syscall.Errno) {
	if fault := n.before(ctx, Mkdir, name, 0); fault.Errno != 0 {
		return nil, fault.Errno
	}
	return n.LoopbackNode.Mkdir(ctx, name, mode, out)
}

func (n *node) Rmdir(ctx context.Context, name string) syscall.Errno {
	if fault := n.before(ctx, Rmdir, name, 0); fault.Errno != 0 {
		return fault.Errno
	}
	return n.LoopbackNode.Rmdir(ctx, name)
}
