package simulator

import (
	"fmt"
	"strings"
)

// Fault is a failure of the network or the engine at a batch.
type Fault int

// The faults. At most one fault from FaultDrop to FaultTruncate, and one from FaultRestart to FaultFlap, applies to a
// batch: the first in this order. FaultPartialReplay to FaultUnresponsive last for Faults.Span batches.
const (
	// FaultDrop does not send the live message. Replay returns the batch.
	FaultDrop Fault = iota
	// FaultLose neither sends nor buffers the batch: it is lost permanently.
	FaultLose
	// FaultDuplicate sends the message twice in succession.
	FaultDuplicate
	// FaultDelay sends the message right after the message Faults.Delay batches later: with 2, and a fault at seq 4,
	// seqs 4 5 6 7 are sent as 5 6 4 7. Replay returns the batch at once. A restart discards delayed messages.
	FaultDelay
	// FaultTruncate sends the first half of the payload. Replay returns the whole payload.
	FaultTruncate

	// FaultClearReplay empties the replay buffer. The engine continues.
	FaultClearReplay
	// FaultPartialReplay omits about a quarter of the replies of each replay, different ones each time.
	FaultPartialReplay
	// FaultReplayWithoutEnd omits the end marker of replays.
	FaultReplayWithoutEnd
	// FaultNoReplay leaves replay requests unanswered.
	FaultNoReplay
	// FaultSilent sends no live message. Replay returns the batches.
	FaultSilent
	// FaultUnresponsive combines FaultSilent and FaultNoReplay. The connections stay open.
	FaultUnresponsive

	// FaultRestart restarts the engine process before the batch. The pool and the replay buffer are empty, the seq is
	// Config.FirstSeq again, and the sockets are closed and reopened at the same ports.
	FaultRestart
	// FaultRestartInPlace is FaultRestart with sockets that stay open.
	FaultRestartInPlace
	// FaultRestartLate is FaultRestart, after which the first Faults.Late batches are lost permanently.
	FaultRestartLate
	// FaultRestartAhead is FaultRestart with a first seq that is Faults.Late higher.
	FaultRestartAhead
	// FaultRestartPassed is a restart that the seq does not reveal: the sockets stay closed until the seqs of the new
	// incarnation have passed the seqs of the old incarnation. The new incarnation buffers its batches. It begins at most
	// 50 below the old seq, which bounds the outage.
	FaultRestartPassed
	// FaultFlap closes the sockets before the batch, and reopens them at the same ports Faults.Flap batches later. The
	// engine continues, and buffers the batches.
	FaultFlap

	numFaults
)

var faultNames = [numFaults]string{
	"drop", "forget", "twice", "delay", "truncate",
	"clear-replay", "holes", "endless", "mute", "silent", "dead",
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
	return 0, fmt.Errorf("%q is no fault: want one of %s", name, strings.Join(faultNames[:], ", "))
}

// MarshalText returns the name.
func (f Fault) MarshalText() ([]byte, error) { return []byte(f.String()), nil }

// UnmarshalText reads a name.
func (f *Fault) UnmarshalText(text []byte) (err error) {
	*f, err = ParseFault(string(text))
	return err
}

// affectsBatch reports whether the fault is about the message of the batch.
func (f Fault) affectsBatch() bool { return f <= FaultTruncate }

// affectsEngine reports whether the fault restarts the engine or closes its sockets.
func (f Fault) affectsEngine() bool { return f >= FaultRestart }
