package simulator

import (
	"fmt"
	"strings"
)

// Fault is something that goes wrong at a batch.
type Fault int

// The faults. The first five affect the batch itself, and at most one of them applies per batch:
// the first in this order. The same holds for the last six, which affect the engine and its
// connections immediately before the batch. Lasting faults last for Faults.Span batches.
const (
	// FaultDrop: the live message is not sent. Replay returns the batch.
	FaultDrop Fault = iota
	// FaultForget: the batch is neither sent nor buffered, and is lost permanently.
	FaultForget
	// FaultTwice: the message is sent twice in succession.
	FaultTwice
	// FaultDelay: the message is delayed, and sent right after the message Faults.Delay batches
	// later: with 2, seqs 4 5 6 7 are sent as 5 6 4 7 if 4 is delayed. Replay returns it at once. A
	// restart discards delayed messages.
	FaultDelay
	// FaultTruncate: the message has only the first half of the payload. Replay returns it whole.
	FaultTruncate

	// FaultAmnesia: the replay buffer is emptied. The engine continues.
	FaultAmnesia
	// FaultHoles: for a while, each answer to a replay request omits about every fourth reply,
	// different ones each time.
	FaultHoles
	// FaultEndless: for a while, answers have no end marker.
	FaultEndless
	// FaultMute: for a while, replay requests are not answered.
	FaultMute
	// FaultSilent: for a while, no live message is sent. Replay returns the batches.
	FaultSilent
	// FaultDead: for a while, no live message is sent and replay requests are not answered, while
	// the connections stay open.
	FaultDead

	// FaultRestart: the engine's process restarts. The pool and the replay buffer are empty, the
	// seq is the first again, and the sockets are closed and reopened at the same ports.
	FaultRestart
	// FaultRestartInPlace: FaultRestart with sockets that stay open.
	FaultRestartInPlace
	// FaultRestartLate: a restart whose first Faults.Late batches are lost permanently.
	FaultRestartLate
	// FaultRestartAhead: a restart whose first seq is Faults.Late above the usual one, with no
	// batch below it.
	FaultRestartAhead
	// FaultRestartPassed: a restart that the seq does not reveal. The sockets stay closed until the
	// seqs of the new incarnation have passed those of the old one; the new incarnation buffers its
	// batches. It begins at most 50 below the old seq, to bound the outage.
	FaultRestartPassed
	// FaultFlap: the sockets are closed, and reopened at the same ports Faults.Flap batches later.
	// The engine continues, and buffers the batches.
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

// ParseFault returns the fault with a name.
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

// affectsBatch reports whether the fault is one of the first five.
func (f Fault) affectsBatch() bool { return f <= FaultTruncate }

// affectsEngine reports whether the fault is one of the last six.
func (f Fault) affectsEngine() bool { return f >= FaultRestart }
