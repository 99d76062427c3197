package ingest

import (
	"time"

	"github.com/kvcast/kvcast/ingest/sequence"
)

// HeldBytes returns how many bytes of live batches are held back.
func HeldBytes(in *Ingest) int64 { return in.shared.budgets.reordered.Used() }

// SetFirstRequests sets how long a replay socket that never answered is waited for, and
// how long a request of such a one waits for its turn. To be called before Run.
func SetFirstRequests(in *Ingest, reply, patience time.Duration) {
	in.shared.replays.FirstReply, in.shared.replays.FirstPatience = reply, patience
}

// RestTime is how long a replay socket that did not answer is not asked again for a
// gap.
const RestTime = sequence.RestTime
