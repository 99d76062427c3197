//go:build unix

package vllm_test

import (
	"syscall"
	"time"
)

// ownGroup has a program start a process group, so that what it starts can be ended with it.
func ownGroup() *syscall.SysProcAttr { return &syscall.SysProcAttr{Setpgid: true} }

// stop ends vllm serve: with SIGINT, and then its group with SIGKILL.
func (s *served) stop() {
	_ = s.cmd.Process.Signal(syscall.SIGINT)
	select {
	case <-s.ended:
	case <-time.After(time.Minute):
	}
	s.kill() // nothing is left of it usually
}

// kill ends vllm serve and its group with SIGKILL.
func (s *served) kill() {
	_ = syscall.Kill(-s.cmd.Process.Pid, syscall.SIGKILL)
	<-s.ended
}
