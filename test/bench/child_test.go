package bench_test

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"runtime"
	"slices"
	"syscall"
	"testing"
	"time"
)

// roleVariable is the environment variable that makes the test binary run as a child that does one
// thing and measures itself. The child's CPU time is the CPU time of the work, including threads such
// as libzmq's.
const roleVariable = "KVCAST_BENCH_ROLE"

// work is an operation that a child repeats.
type work interface {
	// do runs the operation n times. It returns how much it moved: bytes, or responses of a relay.
	do(n int) (moved uint64, err error)
	io.Closer
}

// serving is work that clients connect to.
type serving interface {
	// address returns the address that it listens on.
	address() string
}

// roles are the constructors of each role's work. Files that need cgo add theirs.
var roles = map[string]func(childSetup) (work, error){
	"fanout": newFanout,
}

// childSetup is the first line that a child reads.
type childSetup struct {
	// Address is the address to connect to.
	Address string
	// Conn is the address to write to.
	Conn string `json:",omitempty"`
	// EventBytes is the size of an event in bytes.
	EventBytes int `json:",omitempty"`
	// Conns is the number of connections to write to.
	Conns int `json:",omitempty"`
	// Answer is the encoded message with which each request is answered.
	Answer []byte `json:",omitempty"`
}

// childOrder is each further line: run the operation n times.
type childOrder struct{ N int }

// childReport is a line that a child writes when it is ready, before it starts an order, and when
// the order is complete.
type childReport struct {
	Address string        `json:",omitempty"` // of serving work, when it is ready
	Moved   uint64        `json:",omitempty"` // see work
	CPU     time.Duration `json:",omitempty"`
	Waits   int64         `json:",omitempty"` // number of times that a thread slept
	Mallocs uint64        `json:",omitempty"`
	Alloced uint64        `json:",omitempty"` // bytes
}

// usage contains the resources that this process has used.
type usage struct {
	cpu   time.Duration
	waits int64
}

func ownUsage() usage {
	var r syscall.Rusage
	if err := syscall.Getrusage(syscall.RUSAGE_SELF, &r); err != nil {
		panic("getrusage of this process: " + err.Error()) // cannot fail with these arguments
	}
	waits := int64(r.Nvcsw) //nolint:unconvert // an int32 on 32-bit platforms
	return usage{cpu: time.Duration(r.Utime.Nano() + r.Stime.Nano()), waits: waits}
}

// childMain is the main function of a child. It returns at the end of its input.
func childMain(role string, in io.Reader, out, errOut io.Writer) int {
	if err := runChild(role, json.NewDecoder(in), json.NewEncoder(out)); err != nil {
		_, _ = fmt.Fprintf(errOut, "%s: %v\n", role, err)
		return 1
	}
	return 0
}

func runChild(role string, in *json.Decoder, out *json.Encoder) (err error) {
	newWork, ok := roles[role]
	if !ok {
		return errors.New("no such role")
	}
	var setup childSetup
	if err := in.Decode(&setup); err != nil {
		return err
	}
	w, err := newWork(setup)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, w.Close()) }()
	ready := childReport{}
	if s, ok := w.(serving); ok {
		ready.Address = s.address()
	}
	if err := out.Encode(ready); err != nil {
		return err
	}
	for {
		var order childOrder
		if err := in.Decode(&order); errors.Is(err, io.EOF) {
			return nil
		} else if err != nil {
			return err
		}
		var memory runtime.MemStats
		runtime.ReadMemStats(&memory)
		mallocs, alloced := memory.Mallocs, memory.TotalAlloc
		before := ownUsage()
		if err := out.Encode(childReport{}); err != nil {
			return err
		}
		moved, err := w.do(order.N)
		if err != nil {
			return err
		}
		after := ownUsage()
		runtime.ReadMemStats(&memory)
		err = out.Encode(childReport{
			Moved: moved, CPU: after.cpu - before.cpu, Waits: after.waits - before.waits,
			Mallocs: memory.Mallocs - mallocs, Alloced: memory.TotalAlloc - alloced,
		})
		if err != nil {
			return err
		}
	}
}

// child is a child process, as its parent uses it.
type child struct {
	cmd     *exec.Cmd
	stdin   io.Closer
	orders  *json.Encoder
	reports *json.Decoder
	address string // of serving work
}

// startChild starts a child and returns once it is ready.
func startChild(role string, setup childSetup) (*child, error) {
	return startWrappedChild(nil, role, setup)
}

// startWrappedChild starts a child through a wrapper command.
func startWrappedChild(wrapper []string, role string, setup childSetup) (*child, error) {
	self, err := os.Executable()
	if err != nil {
		return nil, fmt.Errorf("start %s: %w", role, err)
	}
	command := append(slices.Clone(wrapper), self)
	cmd := exec.CommandContext(context.Background(), command[0], command[1:]...)
	// By default, a program with the race detector sleeps for a second before it exits.
	cmd.Env = append(os.Environ(), roleVariable+"="+role, "GORACE=atexit_sleep_ms=0")
	cmd.Stderr = os.Stderr
	in, err := cmd.StdinPipe()
	if err != nil {
		return nil, fmt.Errorf("start %s: %w", role, err)
	}
	out, err := cmd.StdoutPipe()
	if err != nil {
		return nil, fmt.Errorf("start %s: %w", role, err)
	}
	if err := cmd.Start(); err != nil {
		return nil, fmt.Errorf("start %s: %w", role, err)
	}
	c := &child{cmd: cmd, stdin: in, orders: json.NewEncoder(in), reports: json.NewDecoder(out)}
	err = c.orders.Encode(setup)
	if err == nil {
		var ready childReport
		err = c.reports.Decode(&ready)
		c.address = ready.Address
	}
	if err != nil {
		return nil, errors.Join(fmt.Errorf("start %s: %w", role, err), c.Close())
	}
	return c, nil
}

// measure makes the child run its operation n times while feed provides the input.
func (c *child) measure(n int, feed func() error) (r childReport, err error) {
	err = c.orders.Encode(childOrder{N: n})
	if err == nil {
		err = c.reports.Decode(&childReport{})
	}
	if err == nil {
		err = feed()
	}
	if err == nil {
		err = c.reports.Decode(&r)
	}
	if err != nil {
		return r, fmt.Errorf("measure child: %w", err)
	}
	return r, nil
}

// Close stops the child.
func (c *child) Close() error {
	if err := errors.Join(c.stdin.Close(), c.cmd.Wait()); err != nil {
		return fmt.Errorf("end child: %w", err)
	}
	return nil
}

func TestChildReportsErrors(t *testing.T) {
	if status := childMain("nothing", nil, io.Discard, io.Discard); status != 1 {
		t.Errorf("role nothing: status %d", status)
	}
}
