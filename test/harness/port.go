package harness

import (
	"errors"
	"fmt"
	"net"
	"os"
	"strconv"
	"sync"
	"syscall"
	"testing"
	"time"
)

// Ports of tests are below the range from which Linux takes ports by default, for outgoing connections and for
// listeners on port 0: 32768 to 60999 (Documentation/networking/ip-sysctl.rst, ip_local_port_range). So nobody else
// gets a port between the time when it is allocated and the time when it is bound, or bound again after a restart.
const (
	firstPort = 12_000
	endPort   = 32_000
	// portBlock is the number of ports that a process reserves at a time.
	portBlock = 200
)

// ports belongs to the process: packages are tested by processes that run at the same time.
var ports struct {
	mu sync.Mutex
	// reservations are listeners on the first port of each block that the process has used. They keep other processes
	// away, and are open until the process ends.
	reservations []net.Listener
	next, end    int
}

// FreePort returns a port that is free on all addresses, and that no other call returns.
func FreePort(t testing.TB) int {
	t.Helper()
	return FreePorts(t, 1)
}

// FreePorts returns the first of n consecutive ports that are free on all addresses, and that no other call returns.
func FreePorts(t testing.TB, n int) int {
	t.Helper()
	port, err := AllocatePorts(n)
	if err != nil {
		t.Fatal(err)
	}
	return port
}

// AllocatePorts is FreePorts outside of tests. n is at most 100.
func AllocatePorts(n int) (first int, err error) {
	ports.mu.Lock()
	defer ports.mu.Unlock()
	for {
		for ; ports.next+n <= ports.end; ports.next++ {
			if first := ports.next; free(first, n) {
				ports.next = first + n
				return first, nil
			}
		}
		if err := reservePorts(); err != nil {
			return 0, fmt.Errorf("allocate %d ports in a row: %w", n, err)
		}
	}
}

// reservePorts reserves the next block of ports that no process has reserved.
func reservePorts() error {
	start := firstPort
	if ports.end > 0 {
		start = ports.end
	}
	for block := start; block+portBlock <= endPort; block += portBlock {
		if l, err := listen(block); err == nil {
			ports.reservations = append(ports.reservations, l)
			ports.next, ports.end = block+1, block+portBlock
			return nil
		}
	}
	return fmt.Errorf("all blocks of %d ports from %d to %d are reserved", portBlock, firstPort, endPort-1)
}

// free reports whether ports are free. No process starts meanwhile: one that starts has the listeners of this process open until it
// executes its program, so a port would be in use for a moment after its listener is closed.
func free(first, n int) bool {
	makeFirstProcess()
	syscall.ForkLock.RLock()
	defer syscall.ForkLock.RUnlock()
	for port := first; port < first+n; port++ {
		l, err := listen(port)
		if err != nil || l.Close() != nil {
			return false
		}
	}
	return true
}

// makeFirstProcess makes the process by which package os finds out what the kernel can do: it does not take ForkLock for that one.
var makeFirstProcess = sync.OnceFunc(func() { _, _ = os.FindProcess(os.Getpid()) })

// Bind calls bind until its port is not in use: a process that is starting has a listener open for a moment after it was closed.
func Bind[T any](bind func() (T, error)) (T, error) {
	for until := time.Now().Add(Timeout); ; time.Sleep(time.Millisecond) {
		if bound, err := bind(); !errors.Is(err, syscall.EADDRINUSE) || time.Now().After(until) {
			return bound, err
		}
	}
}

func listen(port int) (net.Listener, error) {
	return net.Listen("tcp", ":"+strconv.Itoa(port)) //nolint:noctx // it does not block
}
