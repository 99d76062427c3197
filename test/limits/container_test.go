package limits

import (
	"fmt"
	"os"
	"path/filepath"
	"runtime"
	"strconv"
	"strings"
	"testing"
)

// milliCPUs is the limit of a container's CPU time.
const milliCPUs = 500

// container limits the memory and the CPU time of a process by cgroups. Where this process may not create them, the
// variable GOMEMLIMIT takes the place of the limit of memory, and CPU time is not limited.
type container struct {
	memory      int64
	dirs        []string
	description string
}

// newContainer returns a container with some memory, which the test removes after the process has ended.
func newContainer(t *testing.T, memory int64) *container {
	t.Helper()
	if runtime.GOOS != "linux" {
		t.Skip("the memory of a process is read from /proc: run this test on Linux")
	}
	const root = "/sys/fs/cgroup"
	name := fmt.Sprintf("kvcast-test-%d", os.Getpid())
	cpu := fmt.Sprint(milliCPUs * 100)
	c := &container{memory: memory, description: "in a cgroup"}
	for _, dir := range []struct {
		path   string
		limits [][2]string
	}{
		{filepath.Join(root, "memory", name), [][2]string{{"memory.limit_in_bytes", fmt.Sprint(memory)}}}, // version 1
		{filepath.Join(root, "cpu", name), [][2]string{{"cpu.cfs_period_us", "100000"}, {"cpu.cfs_quota_us", cpu}}},
		{filepath.Join(root, name), [][2]string{{"memory.max", fmt.Sprint(memory)}, {"memory.swap.max", "0"}, {"cpu.max", cpu + " 100000"}}}, // version 2
	} {
		if _, err := os.Stat(filepath.Join(filepath.Dir(dir.path), "cgroup.procs")); err != nil {
			continue // another version
		}
		if err := create(dir.path, dir.limits); err != nil {
			t.Logf("without a cgroup: %v", err)
			c.remove()
			c.dirs, c.description = nil, "with GOMEMLIMIT"
			break
		}
		c.dirs = append(c.dirs, dir.path)
	}
	if len(c.dirs) == 0 {
		c.description = "with GOMEMLIMIT"
		t.Setenv("GOMEMLIMIT", fmt.Sprint(memory*9/10))
	}
	t.Cleanup(c.remove)
	return c
}

// create creates a cgroup, or none if a limit cannot be set.
func create(path string, limits [][2]string) error {
	if err := os.Mkdir(path, 0o700); err != nil {
		return err
	}
	for _, limit := range limits {
		if err := os.WriteFile(filepath.Join(path, limit[0]), []byte(limit[1]), 0o600); err != nil {
			_ = os.Remove(path)
			return err
		}
	}
	return nil
}

// peak returns the most memory that the container has used, with what the kernel counts for it, such as buffers of connections; 0 if it is not known.
func (c *container) peak(t *testing.T) int64 {
	t.Helper()
	for _, dir := range c.dirs {
		for _, name := range []string{"memory.max_usage_in_bytes", "memory.peak"} {
			text, err := os.ReadFile(filepath.Join(dir, name))
			if err != nil {
				continue // of the other version, or of CPU time
			}
			n, err := strconv.ParseInt(strings.TrimSpace(string(text)), 10, 64)
			if err != nil {
				t.Fatal(err)
			}
			return n
		}
	}
	return 0
}

func (c *container) remove() {
	for _, dir := range c.dirs {
		_ = os.Remove(dir)
	}
}

// wrapper is a command that moves itself into the cgroups and then runs the program.
func (c *container) wrapper() []string {
	script := ""
	for _, dir := range c.dirs {
		script += fmt.Sprintf("echo $$ >%s/cgroup.procs && ", dir)
	}
	return []string{"sh", "-c", script + `exec "$0" "$@"`}
}
