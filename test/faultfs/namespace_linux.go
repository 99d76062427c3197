package faultfs

import (
	"context"
	"errors"
	"os"
	"os/exec"
	"os/signal"
	"runtime"
	"syscall"
	"testing"

	"github.com/kvcast/kvcast/test/harness"
)

// namespaced is the variable of a program that has a mount namespace of its own.
const namespaced = "KVCAST_TEST_NAMESPACED"

// RunTests is harness.RunTests in a mount namespace of its own, if the user is root: what the tests mount is gone when they end,
// however that is. It starts the program again for that, and passes signals on to it.
func RunTests(m *testing.M) int {
	if os.Geteuid() != 0 || os.Getenv(namespaced) != "" {
		return harness.RunTests(m)
	}
	runtime.LockOSThread() // the death of the thread is that of the parent
	defer runtime.UnlockOSThread()
	cmd := exec.CommandContext(context.Background(), "/proc/self/exe", os.Args[1:]...)
	cmd.Stdin, cmd.Stdout, cmd.Stderr = os.Stdin, os.Stdout, os.Stderr
	cmd.Env = append(os.Environ(), namespaced+"=1")
	cmd.SysProcAttr = &syscall.SysProcAttr{Unshareflags: syscall.CLONE_NEWNS, Pdeathsig: syscall.SIGKILL}
	signals := make(chan os.Signal, 1)
	signal.Notify(signals, syscall.SIGINT, syscall.SIGTERM, syscall.SIGQUIT)
	defer signal.Stop(signals)
	if err := cmd.Start(); err != nil {
		return harness.RunTests(m) // it is not allowed
	}
	ended := make(chan error, 1)
	go func() { ended <- cmd.Wait() }()
	for {
		select {
		case s := <-signals:
			_ = cmd.Process.Signal(s)
		case err := <-ended:
			if failed := (*exec.ExitError)(nil); errors.As(err, &failed) && failed.ExitCode() > 0 {
				return failed.ExitCode()
			} else if err != nil {
				return 1
			}
			return 0
		}
	}
}
