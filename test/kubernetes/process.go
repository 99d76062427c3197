package kubernetes

import (
	"bytes"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"syscall"
	"testing"
)

// logTailBytes is the size of the end of a log in errors.
const logTailBytes = 4 << 10

// process is a program that runs until it is stopped. The kernel kills it if this process is killed.
type process struct {
	command *exec.Cmd
	log     string        // file
	ended   chan struct{} // closed when the program has exited
}

// startProcess starts a program, whose output is appended to a log file.
func startProcess(t testing.TB, log, program string, args ...string) *process {
	t.Helper()
	output, err := os.OpenFile(log, os.O_CREATE|os.O_WRONLY|os.O_APPEND, 0o600)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = output.Close() }()                                                        // the program has a descriptor of its own
	p := &process{command: exec.Command(program, args...), log: log, ended: make(chan struct{})} //nolint:noctx // stop ends it
	p.command.Stdout, p.command.Stderr = output, output
	p.command.SysProcAttr = endWithParent()
	if err := p.command.Start(); err != nil {
		t.Fatalf("start %s: %v", filepath.Base(program), err)
	}
	go func() {
		defer close(p.ended)
		_ = p.command.Wait() // ProcessState has the status
	}()
	return p
}

// stop sends a signal, and waits for the program to exit.
func (p *process) stop(s syscall.Signal) {
	_ = p.command.Process.Signal(s) // it may have exited already
	<-p.ended
}

// logTail returns the end of the log.
func (p *process) logTail() string {
	log, err := os.ReadFile(p.log)
	if err != nil {
		return fmt.Sprintf("no log: %v", err)
	}
	return string(bytes.TrimSpace(log[max(0, len(log)-logTailBytes):]))
}
