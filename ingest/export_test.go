package ingest

import (
	"time"

	"github.com/kvcast/kvcast/ingest/internal/sequence"
	"github.com/kvcast/kvcast/internal/transport"
)

// ReorderBytes returns the size of all reorder buffers, in bytes.
func ReorderBytes(in *Ingest) int64 { return in.shared.budgets.reordered.Used() }

// SetFirstRequests sets how long the first reply of a replay socket may take, and how long
// such a request waits for a slot. It must be called before Run.
func SetFirstRequests(in *Ingest, reply, patience time.Duration) {
	in.shared.replays.FirstReply, in.shared.replays.FirstPatience = reply, patience
}

// RestTime is sequence.RestTime.
const RestTime = sequence.RestTime

// SetTransport replaces the transport to engines. It must be called before Run.
func SetTransport(in *Ingest, t transport.Transport) { in.shared.transports.Connecting = t }
