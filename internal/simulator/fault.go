package simulator

import (
	"fmt"
	"strings"
)

// Fault is something that goes wrong at a batch.
type Fault int

// The faults. Of the first five, which befall the batch itself, at most one does at a
// batch, and so of the last six, which befall the engine and its connections right
// before it: the first in this order. Those that last do so for Faults.Span batches.
const (
	// FaultDrop: the live message is not sent. Replay gives the batch.
	FaultDrop Fault = iota
	// FaultForget: the batch is neither sent nor remembered. It is lost for good.
	FaultForget
	// FaultTwice: the message is sent twice, one right after the other.
	FaultTwice
	// FaultDelay: the message is held back, and sent right after the message
	// Faults.Delay batches later: with 2, seqs 4 5 6 7 go out as 5 6 4 7 where 4 is
	// held. Replay gives it at once. A restart loses what is held back.
	FaultDelay
	// FaultTruncate: the message has the first half of the payload. Replay gives it
	// whole.
	FaultTruncate

	// FaultAmnesia: all that is remembered is forgotten. The engine goes on.
	FaultAmnesia
	// FaultHoles: for a while, each answer to a request for replay leaves out every
	// fourth reply or so, others each time.
	FaultHoles
	// FaultEndless: for a while, answers have no end marker.
	FaultEndless
	// FaultMute: for a while, requests for replay get no answer.
	FaultMute
	// FaultSilent: for a while, no live message is sent. Replay gives the batches.
	FaultSilent
	// FaultDead: for a while, no live message is sent and replay is not answered,
	// while the connections stay.
	FaultDead

	// FaultRestart: the engine's process restarts. The pool is empty, nothing is
	// remembered, the seq is the first again, and the sockets are closed and opened
	// at the same ports.
	FaultRestart
	// FaultRestartInPlace: the same behind sockets that stay open.
	FaultRestartInPlace
	// FaultRestartLate: a restart whose first Faults.Late batches are lost for good.
	FaultRestartLate
	// FaultRestartAhead: a restart whose seq begins Faults.Late above the first,
	// with no batch below it.
	FaultRestartAhead
	// FaultRestartPassed: a restart that nobody notices by the seq. The sockets
	// stay closed until the seqs of the new run have passed those of the old one,
	// and the new run remembers its batches. It begins at most 50 below the old seq,
	// so as not to be away for as long as the old run took.
	FaultRestartPassed
	// FaultFlap: the sockets are closed, and opened again at the same ports
	// Faults.Flap batches later. The engine goes on, and remembers them.
	FaultFlap

	numFaults
)

var faultNames = [numFaults]string{
	"drop", "forget", "twice", "delay", "truncate",
	"amnesia", "holes", "endless", "mute", "silent", "dead",
	"restart", "restart-in-place", "restart-late", "restart-ahead", "restart-passed", "flap",
}

// AllFaults returns the faults in their order.
func AllFaults() []Fault {
	all := make([]Fault, numFaults)
	for i := range all {
		all[i] = Fault(i)
	}
	return all
}

// String returns the name, such as restart-late.
func (f Fault) String() string {
	if f < 0 || f >= numFaults {
		return fmt.Sprintf("Fault(%d)", int(f))
	}
	return faultNames[f]
}

// ParseFault returns the fault of a name.
func ParseFault(name string) (Fault, error) {
	for i, n := range faultNames {
		if n == name {
			return Fault(i), nil
		}
	}
	return 0, fmt.Errorf("no fault is called %q: want one of %s", name, strings.Join(faultNames[:], ", "))
}

// MarshalText returns the name.
func (f Fault) MarshalText() ([]byte, error) { return []byte(f.String()), nil }

// UnmarshalText reads a name.
func (f *Fault) UnmarshalText(text []byte) (err error) {
	*f, err = ParseFault(string(text))
	return err
}

// affectsBatch reports whether it is one of the first five.
func (f Fault) affectsBatch() bool { return f <= FaultTruncate }

// affectsEngine reports whether it is one of the last six.
func (f Fault) affectsEngine() bool { return f >= FaultRestart }
