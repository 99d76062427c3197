//go:build !cgo

package configured

import (
	"errors"

	"github.com/kvcast/kvcast/internal/budget"
	"github.com/kvcast/kvcast/internal/transport"
)

// LibzmqVersion returns the version of libzmq; empty if this build has none.
func LibzmqVersion() string { return "" }

// newLibzmq fails: Config.Validate accepts no libzmq in this build.
func newLibzmq(int, *budget.Budget) (transport.Transport, error) {
	return nil, errors.New("open libzmq: built without cgo")
}
