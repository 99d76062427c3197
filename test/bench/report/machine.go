package main

import (
	"bufio"
	"context"
	"fmt"
	"os"
	"runtime"
	"strings"
)

// machine is where figures were measured, and with what.
type machine struct {
	CPU                   string
	Cores                 int
	MemoryGiB             int
	System                string // kernel
	Go, GRPC, ZeroMQ      string // versions; ZeroMQ is libzmq
	LoadBefore, LoadAfter string // mean numbers of runnable threads in the last 1, 5 and 15 minutes
}

func describeMachine(ctx context.Context, root string) (m machine, err error) {
	m = machine{Cores: runtime.NumCPU(), Go: runtime.Version()}
	if m.CPU, err = field("/proc/cpuinfo", "model name"); err != nil {
		return m, err
	}
	memory, err := field("/proc/meminfo", "MemTotal")
	if err != nil {
		return m, err
	}
	var kib int
	if _, err := fmt.Sscan(memory, &kib); err != nil {
		return m, fmt.Errorf("read the size of the memory: %q: %w", memory, err)
	}
	m.MemoryGiB = (kib + 1<<19) >> 20
	for _, v := range []struct {
		to   *string
		args []string
	}{
		{&m.System, []string{"uname", "-sr"}},
		{&m.GRPC, []string{"go", "list", "-m", "-f", "{{.Version}}", "google.golang.org/grpc"}},
		{&m.ZeroMQ, []string{"pkg-config", "--modversion", "libzmq"}},
	} {
		if *v.to, err = output(ctx, root, v.args[0], v.args[1:]...); err != nil {
			return m, err
		}
	}
	m.LoadBefore, err = load()
	return m, err
}

func load() (string, error) {
	b, err := os.ReadFile("/proc/loadavg")
	if err != nil {
		return "", fmt.Errorf("read the load: %w", err)
	}
	return strings.Join(strings.Fields(string(b))[:3], " "), nil
}

// field returns the first value of a field of a file of lines "field: value".
func field(path, name string) (string, error) {
	f, err := os.Open(path)
	if err != nil {
		return "", err
	}
	defer func() { _ = f.Close() }() // it was only read
	for s := bufio.NewScanner(f); s.Scan(); {
		if key, value, ok := strings.Cut(s.Text(), ":"); ok && strings.TrimSpace(key) == name {
			return strings.TrimSpace(value), nil
		}
	}
	return "", fmt.Errorf("%s has no field %q", path, name)
}
