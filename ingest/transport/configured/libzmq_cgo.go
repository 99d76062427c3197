//go:build cgo

package configured

import (
	"github.com/kvcast/kvcast/ingest/transport"
	"github.com/kvcast/kvcast/ingest/transport/libzmq"
	"github.com/kvcast/kvcast/internal/budget"
)

// LibzmqVersion returns the version of libzmq; empty if this build has none.
func LibzmqVersion() string { return libzmq.Version() }

func newLibzmq(maxSockets int, received *budget.Budget) (transport.Transport, error) {
	return libzmq.New(libzmq.Config{MaxSockets: maxSockets, Budget: received})
}
