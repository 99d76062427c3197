package native

import (
	"fmt"
	"os"
	"sync/atomic"
	"time"
)

// pipe wakes one goroutine, which runs when the goroutine that wakes it waits, on the same thread. A channel makes the runtime wake another
// thread to look for work, which costs as much as all else that is done for a message, if messages arrive one by one.
type pipe struct {
	read, write *os.File
	full        atomic.Bool // wake need not write: wait has not returned since the last time
	deadline    time.Time   // of read
}

func newPipe() (*pipe, error) {
	r, w, err := os.Pipe()
	if err != nil {
		return nil, fmt.Errorf("create pipe: %w", err)
	}
	return &pipe{read: r, write: w}, nil
}

// wake ends the wait in progress, or else the next one. It is safe for concurrent use.
func (p *pipe) wake() {
	if !p.full.Swap(true) {
		_, _ = p.write.Write([]byte{0}) // fails after close
	}
}

// wait waits for wake until a time; the zero time means forever.
func (p *pipe) wait(until time.Time) error {
	if !until.Equal(p.deadline) {
		if err := p.read.SetReadDeadline(until); err != nil {
			return err
		}
		p.deadline = until
	}
	var b [1]byte
	if _, err := p.read.Read(b[:]); err != nil {
		return err
	}
	p.full.Store(false)
	return nil
}

func (p *pipe) close() {
	_ = p.read.Close()
	_ = p.write.Close()
}
