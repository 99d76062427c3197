//go:build !linux

package kubernetes

import "syscall"

// endWithParent returns no attributes: only Linux kills a child when its parent ends.
func endWithParent() *syscall.SysProcAttr { return nil }
