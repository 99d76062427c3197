//go:build cgo

package configured

import (
	"github.com/kvcast/kvcast/internal/budget"
	"github.com/kvcast/kvcast/internal/transport"
	"github.com/kvcast/kvcast/internal/transport/libzmq"
)

// LibzmqVersion returns the version of libzmq; empty if this build has none.
func LibzmqVersion() string { return libzmq.Version() }

func newLibzmq(maxSockets int, received *budget.Budget) (transport.Transport, error) {
	return libzmq.New(libzmq.Config{MaxSockets: maxSockets, Budget: received})
}
