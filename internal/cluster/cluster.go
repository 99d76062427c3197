// Package cluster decides which workers an instance of kvcast ingests when several instances share a log.
//
// Each worker is ingested by one instance, its owner. A claim, a record in the log, makes its writer the owner;
// a release, written by the owner, names the next owner or none. Each record of a worker is appended only if its
// writer knows the worker's previous one (compare and swap), so that the log decides between two claims, and
// refuses what a former owner appends. All instances read the same records in the same order, and agree on the
// owner. No clock takes part in that.
//
// Heartbeats show which instances live. They decide when to claim, hence how long a worker has no live owner, but
// never who may append. Wanted workers are assigned to live instances by rendezvous hashing. An instance that reaches no
// engine gets none while another one reaches any. Workers whose engines connect to an instance follow the connection.
//
// Inputs of a Machine are heartbeats, ownership records, wanted workers, connections of engines, whether engines are
// reached, the results of its actions, and the time. Outputs are actions: claim, release, remove, drop. A Machine is pure: it uses no socket,
// clock, lock, log or metric, and its inputs determine its outputs. It is not safe for concurrent use.
package cluster

import (
	"cmp"
	"fmt"
	"time"
)

// Config configures a Machine.
type Config struct {
	// ID names this instance; another run of the process has another ID.
	ID string
	// Ingest reports whether this instance may own workers.
	Ingest bool
	// TTL is how long an instance without a heartbeat is held for live; default 3 s. A heartbeat is due every TTL/3.
	TTL time.Duration
	// Settle is how long an instance is a candidate before workers are handed over to it, and how long a worker
	// whose engine has disconnected keeps its owner while there are other candidates; default 2 TTL.
	Settle time.Duration
	// Grace is how long a worker that is neither wanted nor connected stays in the log; default 1 m.
	Grace time.Duration
	// Retry is the wait after a failed action; default TTL/3.
	Retry time.Duration
	// MaxHandOvers limits the workers on their way to another instance because it is their first by rendezvous;
	// default 4. A hand-over ends when the worker is claimed.
	MaxHandOvers int
	// MaxActions limits the claims in progress, and the other actions in progress; default 64 each.
	MaxActions int
}

// withDefaults returns c with defaults for what is zero.
func (c Config) withDefaults() Config {
	c.TTL = cmp.Or(c.TTL, 3*time.Second)
	c.Settle = cmp.Or(c.Settle, 2*c.TTL)
	c.Grace = cmp.Or(c.Grace, time.Minute)
	c.Retry = cmp.Or(c.Retry, c.TTL/3)
	c.MaxHandOvers = cmp.Or(c.MaxHandOvers, 4)
	c.MaxActions = cmp.Or(c.MaxActions, 64)
	return c
}

// Info is what a heartbeat contains about its instance.
type Info struct {
	// Ingest reports whether the instance may own workers.
	Ingest bool
	// Draining reports whether it is shutting down: it gives its workers away.
	Draining bool
	// Engines is what its Machine.Engines was given.
	Engines Reach
}

// Reach is whether an instance reaches the engines to which kvcast connects.
type Reach uint8

// The values.
const (
	// ReachUnknown: there are none, or it has not tried yet.
	ReachUnknown Reach = iota
	// ReachSome: it reaches one at least.
	ReachSome
	// ReachNone: it has tried some, and reaches none of them.
	ReachNone
)

// Kind is what an Action requests.
type Kind uint8

// The kinds.
const (
	// Claim: append a claim, recover the worker once the claim is read back from the log, ingest it, and call
	// Machine.Claimed. The expected last seq of the worker is the one at the position of the log up to which
	// the machine has been given the records. Or it is a later one, if no ownership record of the worker is in
	// between, thus none after Action.Seq.
	Claim Kind = iota + 1
	// Release: stop ingesting the worker, wait for its appends, append a release to Action.To, and call
	// Machine.Released. If the worker is not ingested, because a claim was not completed, append the release alone.
	Release
	// Remove: stop ingesting the worker, append its removal and then a release to nobody, and call Machine.Released.
	Remove
	// Drop: stop ingesting the worker without appending anything, because another instance owns it or an append
	// was refused. Then call Machine.Dropped.
	Drop
)

// String returns the kind's name in logs and metrics.
func (k Kind) String() string {
	return [...]string{Claim: "claim", Release: "release", Remove: "remove", Drop: "drop"}[k]
}

// Reason is why an Action is requested.
type Reason uint8

// The reasons.
const (
	// ReasonUnowned: claim of a worker that no instance has owned, or that was removed.
	ReasonUnowned Reason = iota + 1
	// ReasonOwnerDead: claim of a worker whose owner is dead, or was dead before it claimed what was released to it.
	ReasonOwnerDead
	// ReasonReleased: claim of a worker that was released to nobody, or to an instance that is draining.
	ReasonReleased
	// ReasonHandedOver: claim of a worker that was released to this instance.
	ReasonHandedOver
	// ReasonConnected: claim of a worker whose engine has connected to this instance.
	ReasonConnected
	// ReasonIncomplete: claim of a worker that this instance owns and does not ingest, because an action failed.
	ReasonIncomplete
	// ReasonUnwanted: claim or removal of a worker that is neither wanted nor connected.
	ReasonUnwanted
	// ReasonAssigned: release to the instance that is first by rendezvous.
	ReasonAssigned
	// ReasonDraining: release because this instance is shutting down.
	ReasonDraining
	// ReasonCutOff: release because this instance reaches no engine, and another one does.
	ReasonCutOff
	// ReasonDisconnected: release because the engine has disconnected and may have connected to another instance.
	ReasonDisconnected
	// ReasonFenced: drop because another instance owns the worker, or an append was refused.
	ReasonFenced
)

// String returns the reason in logs and metrics.
func (r Reason) String() string {
	return [...]string{
		ReasonUnowned: "unowned", ReasonOwnerDead: "owner_dead", ReasonReleased: "released",
		ReasonHandedOver: "handed_over", ReasonConnected: "connected", ReasonIncomplete: "incomplete",
		ReasonUnwanted: "unwanted", ReasonAssigned: "assigned", ReasonDraining: "draining",
		ReasonCutOff: "cut_off", ReasonDisconnected: "disconnected", ReasonFenced: "fenced",
	}[r]
}

// Action is something to do for a worker. A machine has at most one action of a worker in progress, from Next until
// the call that reports its result.
type Action struct {
	Kind   Kind
	Worker string
	Reason Reason
	// To is the next owner of a Release; empty for none.
	To string
	// Seq is the seq of the newest ownership record, of any worker, that the machine had been given.
	Seq uint64
}

// String returns the action for logs and tests.
func (a Action) String() string {
	if a.Kind == Release {
		return fmt.Sprintf("%s %s to %q (%s)", a.Kind, a.Worker, a.To, a.Reason)
	}
	return fmt.Sprintf("%s %s (%s)", a.Kind, a.Worker, a.Reason)
}
