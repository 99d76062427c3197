package kubernetes

import "syscall"

// endWithParent returns the attributes of a child that the kernel kills when its parent ends.
func endWithParent() *syscall.SysProcAttr { return &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL} }
