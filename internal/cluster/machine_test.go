package cluster

import (
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
)

// With the instances a and b, the worker forA is assigned to a, and forB to b. With c, too, both are assigned to c.
var forA, forB = assignedWorkers()

func assignedWorkers() (forA, forB string) {
	a, b, c := newInstance("a"), newInstance("b"), newInstance("c")
	for i := 0; forA == "" || forB == ""; i++ {
		name := fmt.Sprintf("worker-%d", i)
		switch {
		case first([]*instance{a, b, c}, name) != c:
		case first([]*instance{a, b}, name) == a:
			forA = name
		default:
			forB = name
		}
	}
	return forA, forB
}

const second = time.Second

// driver gives inputs to the machine of instance a, and collects its actions. TTL is 3 s, Settle 6 s, Grace 60 s, Retry 1 s.
type driver struct {
	*Machine
	now      time.Time
	revision uint64
	seq      uint64
	again    time.Time
	got      []string
}

// newDriver returns a driver whose machine is loaded and knows the instances.
func newDriver(cfg Config, others ...string) *driver {
	cfg.ID = "a"
	d := &driver{Machine: New(cfg), now: worldStart}
	d.beat(append(others, "a")...)
	d.Loaded(d.now)
	return d
}

// beat gives heartbeats.
func (d *driver) beat(ids ...string) {
	for _, id := range ids {
		d.revision++
		d.Instance(id, d.revision, Info{Ingest: true}, d.now)
	}
}

// next collects the actions.
func (d *driver) next() {
	var actions []Action
	actions, d.again = d.Next(d.now)
	for _, a := range actions {
		got := a.String()
		got = strings.ReplaceAll(strings.ReplaceAll(got, forA, "forA"), forB, "forB")
		d.got = append(d.got, got)
	}
}

// pass lets time pass, second by second, with heartbeats of the instances and of a.
func (d *driver) pass(t time.Duration, others ...string) {
	d.next()
	for ; t > 0; t -= second {
		d.now = d.now.Add(second)
		d.beat(append(others, "a")...)
		d.next()
	}
}

// claim and release give records of the log.
func (d *driver) claim(worker, owner string) {
	d.seq++
	d.ClaimRead(worker, d.seq, owner, d.now)
}

func (d *driver) release(worker, next string) {
	d.seq++
	d.ReleaseRead(worker, d.seq, next, d.now)
}

// ingest completes a claim that is in progress.
func (d *driver) ingest(workers ...string) {
	d.next()
	for _, worker := range workers {
		d.claim(worker, "a")
		d.Claimed(worker, true, d.now)
	}
	d.next()
	d.got = nil
}

// own makes the machine ingest a wanted worker that is assigned to it.
func (d *driver) own(worker string) {
	d.Wanted(worker, true)
	d.release(worker, "a")
	d.ingest(worker)
	d.InStream(worker, true)
}

// ownBound makes it ingest a worker whose engine is connected.
func (d *driver) ownBound(worker string) {
	d.Connected(worker)
	d.ingest(worker)
	d.InStream(worker, true)
}

func TestRules(t *testing.T) {
	ingest := Config{Ingest: true}
	for _, tt := range []struct {
		name   string
		cfg    Config
		others string // ids of one letter
		do     func(d *driver)
		want   []string
	}{
		// Claims of wanted workers.
		{"assigned here", ingest, "b", func(d *driver) { d.Wanted(forA, true) }, []string{"claim forA (unowned)"}},
		{"assigned to another", ingest, "b", func(d *driver) { d.Wanted(forB, true) }, nil},
		{"no instance but this", ingest, "", func(d *driver) { d.Wanted(forB, true) }, []string{"claim forB (unowned)"}},
		{"does not ingest", Config{}, "", func(d *driver) { d.Wanted(forA, true) }, nil},
		{"other does not ingest", ingest, "", func(d *driver) {
			d.Instance("b", 9, Info{}, d.now)
			d.Wanted(forB, true)
		}, []string{"claim forB (unowned)"}},
		{"other is draining", ingest, "", func(d *driver) {
			d.Instance("b", 9, Info{Ingest: true, Draining: true}, d.now)
			d.Wanted(forB, true)
		}, []string{"claim forB (unowned)"}},
		{"cut off, and another is not", ingest, "b", func(d *driver) {
			d.Engines(ReachNone)
			d.Instance("b", 9, Info{Ingest: true, Engines: ReachSome}, d.now)
			d.Wanted(forA, true)
		}, nil},
		{"nobody reaches engines", ingest, "b", func(d *driver) {
			d.Engines(ReachNone)
			d.Instance("b", 9, Info{Ingest: true, Engines: ReachNone}, d.now)
			d.Wanted(forA, true)
		}, []string{"claim forA (unowned)"}},
		{"no engine reached, of another it is not known", ingest, "b", func(d *driver) {
			d.Engines(ReachNone)
			d.Wanted(forA, true)
		}, []string{"claim forA (unowned)"}},
		{"no engine reached, but by one that drains", ingest, "b", func(d *driver) {
			d.Engines(ReachNone)
			d.Instance("b", 9, Info{Ingest: true, Draining: true, Engines: ReachSome}, d.now)
			d.Wanted(forA, true)
		}, []string{"claim forA (unowned)"}},
		{"another is cut off", ingest, "b", func(d *driver) {
			d.Engines(ReachSome)
			d.Instance("b", 9, Info{Ingest: true, Engines: ReachNone}, d.now)
			d.Wanted(forB, true)
		}, []string{"claim forB (unowned)"}},
		{"cut off with a worker", ingest, "b", func(d *driver) {
			d.own(forA)
			d.Engines(ReachNone)
			d.Instance("b", 99, Info{Ingest: true, Engines: ReachSome}, d.now)
		}, []string{"release forA to \"b\" (cut_off)"}},
		{"cut off with a worker whose engine is connected", ingest, "b", func(d *driver) {
			d.ownBound(forA)
			d.Engines(ReachNone)
			d.Instance("b", 99, Info{Ingest: true, Engines: ReachSome}, d.now)
		}, nil},
		{"an engine connects while cut off", ingest, "b", func(d *driver) {
			d.Engines(ReachNone)
			d.Instance("b", 99, Info{Ingest: true, Engines: ReachSome}, d.now)
			d.Connected(forB)
		}, []string{"claim forB (connected)"}},
		{"released to this while cut off", ingest, "b", func(d *driver) {
			d.Engines(ReachNone)
			d.Instance("b", 99, Info{Ingest: true, Engines: ReachSome}, d.now)
			d.Wanted(forA, true)
			d.release(forA, "a")
		}, nil},
		{"released to another that is cut off", ingest, "b", func(d *driver) {
			d.Engines(ReachSome)
			d.Wanted(forB, true)
			d.release(forB, "b")
			d.next()
			d.Instance("b", 99, Info{Ingest: true, Engines: ReachNone}, d.now)
		}, []string{"claim forB (released)"}},
		{"drains", ingest, "", func(d *driver) {
			d.Wanted(forA, true)
			d.Drain()
		}, nil},
		{"owner lives", ingest, "b", func(d *driver) {
			d.Wanted(forA, true)
			d.claim(forA, "b")
			d.pass(20*second, "b")
		}, nil},
		{"owner dies", ingest, "b", func(d *driver) {
			d.Wanted(forA, true)
			d.claim(forA, "b")
			d.pass(2 * second)
			d.got = append(d.got, "3 s")
			d.pass(1 * second)
		}, []string{"3 s", "claim forA (owner_dead)"}},
		{"owner dies, assigned to another", ingest, "bc", func(d *driver) {
			d.Wanted(forA, true)
			d.claim(forA, "b")
			d.pass(20*second, "c")
		}, nil},
		{"owner returns before TTL", ingest, "b", func(d *driver) {
			d.Wanted(forA, true)
			d.claim(forA, "b")
			d.pass(2 * second)
			d.beat("b")
			d.pass(2 * second)
		}, nil},
		{"old revision is no heartbeat", ingest, "b", func(d *driver) {
			d.Wanted(forA, true)
			d.claim(forA, "b")
			d.pass(2 * second)
			d.Instance("b", 1, Info{Ingest: true}, d.now)
			d.pass(1 * second)
		}, []string{"claim forA (owner_dead)"}},
		{"owner has gone", ingest, "b", func(d *driver) {
			d.Wanted(forA, true)
			d.claim(forA, "b")
			d.pass(4*second, "b")
			d.InstanceGone("b")
		}, []string{"claim forA (owner_dead)"}},
		{"owner drains and has gone", ingest, "b", func(d *driver) {
			d.Wanted(forA, true)
			d.claim(forA, "b")
			d.Instance("b", 99, Info{Draining: true}, d.now)
			d.now = d.now.Add(2 * second)
			d.Instance("b", 100, Info{Draining: true}, d.now)
			d.now = d.now.Add(2 * second)
			d.beat("a")
			d.next()
			d.InstanceGone("b")
			d.pass(3 * second)
		}, []string{"claim forA (owner_dead)"}},
		{"owner drains and lives", ingest, "b", func(d *driver) {
			d.Wanted(forA, true)
			d.claim(forA, "b")
			for range 9 {
				d.revision += 9
				d.Instance("b", d.revision, Info{Ingest: true, Draining: true}, d.now)
				d.pass(1 * second)
			}
		}, nil},
		{"owner never seen before a long load", Config{Ingest: true}, "", func(d *driver) {
			d.loaded = false
			d.Wanted(forA, true)
			d.claim(forA, "x")
			d.pass(20 * second)
			d.Loaded(d.now)
			d.pass(2 * second)
			d.got = append(d.got, "3 s")
			d.pass(1 * second)
		}, []string{"3 s", "claim forA (owner_dead)"}},
		{"owner never seen during an outage", ingest, "", func(d *driver) {
			d.Wanted(forA, true)
			d.now = d.now.Add(90 * second)
			d.claim(forA, "x")
			d.next()
			d.now = d.now.Add(90 * second)
			d.pass(3 * second)
			d.got = append(d.got, "3 s")
			d.pass(1 * second)
		}, []string{"3 s", "claim forA (owner_dead)"}},
		{"not loaded", ingest, "", func(d *driver) {
			d.loaded = false
			d.Wanted(forA, true)
			d.pass(20 * second)
		}, nil},
		{"own key was deleted", ingest, "", func(d *driver) {
			d.InstanceGone("a")
			d.Wanted(forA, true)
		}, []string{"claim forA (unowned)"}},
		{"owner never seen", ingest, "", func(d *driver) {
			d.Wanted(forA, true)
			d.claim(forA, "x")
			d.pass(2 * second)
			d.got = append(d.got, "3 s")
			d.pass(1 * second)
		}, []string{"3 s", "claim forA (owner_dead)"}},
		{"owner's first heartbeat is late", ingest, "", func(d *driver) {
			d.Wanted(forA, true)
			d.claim(forA, "b")
			d.pass(2 * second)
			d.pass(9*second, "b")
		}, nil},
		{"released to this", ingest, "bc", func(d *driver) {
			d.Wanted(forB, true)
			d.release(forB, "a")
		}, []string{"claim forB (handed_over)"}},
		{"released to another", ingest, "b", func(d *driver) {
			d.Wanted(forA, true)
			d.release(forA, "b")
			d.pass(9*second, "b")
		}, nil},
		{"released to another that dies", ingest, "b", func(d *driver) {
			d.Wanted(forA, true)
			d.release(forA, "b")
			d.pass(3 * second)
		}, []string{"claim forA (owner_dead)"}},
		{"released to another that drains", ingest, "b", func(d *driver) {
			d.Wanted(forA, true)
			d.release(forA, "b")
			d.next()
			d.Instance("b", 99, Info{Ingest: true, Draining: true}, d.now)
		}, []string{"claim forA (released)"}},
		{"released to nobody", ingest, "b", func(d *driver) {
			d.Wanted(forA, true)
			d.Wanted(forB, true)
			d.release(forA, "")
			d.release(forB, "")
		}, []string{"claim forA (released)"}},

		// Results.
		{"claim fails", ingest, "", func(d *driver) {
			d.Wanted(forA, true)
			d.next()
			d.Claimed(forA, false, d.now)
			d.next()
			d.got = append(d.got, "1 s")
			d.pass(1 * second)
			d.got = append(d.got, "in progress")
			d.pass(9 * second)
		}, []string{"claim forA (unowned)", "1 s", "claim forA (unowned)", "in progress"}},
		{"claim is lost to another", ingest, "b", func(d *driver) {
			d.Wanted(forA, true)
			d.next()
			d.claim(forA, "b")
			d.Claimed(forA, false, d.now)
			d.pass(9*second, "b")
		}, []string{"claim forA (unowned)"}},
		{"another claims during recovery", ingest, "b", func(d *driver) {
			d.Wanted(forA, true)
			d.next()
			d.claim(forA, "a")
			d.claim(forA, "b")
			d.next()
			d.Claimed(forA, true, d.now)
		}, []string{"claim forA (unowned)", "drop forA (fenced)"}},
		{"another claims", ingest, "b", func(d *driver) {
			d.own(forA)
			d.claim(forA, "b")
			d.next()
			d.Dropped(forA, d.now)
			d.pass(9*second, "b")
		}, []string{"drop forA (fenced)"}},
		{"an append is refused", ingest, "b", func(d *driver) {
			d.own(forA)
			d.Lost(forA)
			d.next()
			d.Dropped(forA, d.now)
			d.next()
			d.got = append(d.got, "1 s")
			d.pass(1*second, "b")
		}, []string{"drop forA (fenced)", "1 s", "claim forA (incomplete)"}},
		{"an append is refused while the engine is connected", ingest, "b", func(d *driver) {
			d.ownBound(forB)
			d.Lost(forB)
			d.next()
			d.Dropped(forB, d.now)
			d.pass(1*second, "b")
		}, []string{"drop forB (fenced)", "claim forB (incomplete)"}},
		{"another claims and releases to this", ingest, "b", func(d *driver) {
			d.own(forA)
			d.claim(forA, "b")
			d.release(forA, "a")
			d.next()
			d.Dropped(forA, d.now)
			d.pass(1*second, "b")
		}, []string{"drop forA (fenced)", "claim forA (handed_over)"}},
		{"recovery fails", ingest, "b", func(d *driver) {
			d.Wanted(forA, true)
			d.next()
			d.claim(forA, "a")
			d.Claimed(forA, false, d.now)
			d.pass(1*second, "b")
		}, []string{"claim forA (unowned)", "claim forA (incomplete)"}},
		{"recovery fails, assigned to another since", ingest, "b", func(d *driver) {
			d.Wanted(forA, true)
			d.next()
			d.claim(forA, "a")
			d.Claimed(forA, false, d.now)
			d.beat("c")
			d.pass(1*second, "b", "c")
		}, []string{"claim forA (unowned)", `release forA to "c" (assigned)`}},
		{"results of nothing", ingest, "b", func(d *driver) {
			d.own(forA)
			d.Claimed(forA, false, d.now)
			d.Released(forA, 0, d.now)
			d.Dropped(forA, d.now)
			d.Lost(forB)
			d.pass(9*second, "b")
		}, nil},

		// Hand-overs.
		{"another joins", ingest, "b", func(d *driver) {
			d.own(forA)
			d.pass(10*second, "b")
			d.pass(7*second, "b", "c")
			d.Released(forA, 0, d.now)
			d.pass(1*second, "b", "c")
			d.release(forA, "c")
			d.Released(forA, d.seq, d.now)
			d.pass(9*second, "b", "c")
			d.claim(forA, "c")
			d.pass(9*second, "b", "c")
		}, []string{`release forA to "c" (assigned)`, `release forA to "c" (assigned)`}},
		{"another joins and has not settled", ingest, "b", func(d *driver) {
			d.own(forA)
			d.pass(6*second, "b", "c")
		}, nil},
		{"another joins in turns", ingest, "b", func(d *driver) {
			d.own(forA)
			for range 5 {
				d.pass(3*second, "b", "c")
				d.pass(3*second, "b")
			}
		}, nil},
		{"the release is read back late", ingest, "b", func(d *driver) {
			d.own(forA)
			d.pass(7*second, "b", "c")
			d.Released(forA, d.seq+1, d.now)
			d.pass(9*second, "b", "c")
			d.release(forA, "c")
			d.pass(9*second, "b", "c")
		}, []string{`release forA to "c" (assigned)`}},

		// Draining.
		{"drain", ingest, "bc", func(d *driver) {
			d.own(forA)
			d.ownBound("bound")
			d.Drain()
		}, []string{`release bound to "" (draining)`, `release forA to "c" (draining)`}},
		{"drain alone", ingest, "", func(d *driver) {
			d.own(forA)
			d.Drain()
		}, []string{`release forA to "" (draining)`}},
		{"drain after a failed claim", ingest, "b", func(d *driver) {
			d.Wanted(forA, true)
			d.next()
			d.claim(forA, "a")
			d.Claimed(forA, false, d.now)
			d.Drain()
			d.pass(1*second, "b")
		}, []string{"claim forA (unowned)", `release forA to "b" (draining)`}},

		// Connections.
		{"connected", ingest, "b", func(d *driver) { d.Connected(forB) }, []string{"claim forB (connected)"}},
		{"connected, owned by another", ingest, "b", func(d *driver) {
			d.claim(forB, "b")
			d.Connected(forB)
			d.next()
			d.Claimed(forB, false, d.now)
			d.pass(1*second, "b")
		}, []string{"claim forB (connected)", "claim forB (connected)"}},
		{"connected, claimed by another afterwards", ingest, "b", func(d *driver) {
			d.ownBound(forA)
			d.claim(forA, "b")
			d.next()
			d.Dropped(forA, d.now)
			d.pass(9*second, "b")
		}, []string{"drop forA (fenced)"}},
		{"connected again, claimed by another afterwards", ingest, "b", func(d *driver) {
			d.ownBound(forA)
			d.Connected(forA)
			d.claim(forA, "b")
			d.next()
			d.Dropped(forA, d.now)
			d.pass(9*second, "b")
		}, []string{"drop forA (fenced)"}},
		{"connected while ingested, then disconnected", ingest, "b", func(d *driver) {
			d.own(forA)
			d.Connected(forA)
			d.Wanted(forA, false)
			d.Disconnected(forA)
			d.pass(6*second, "b")
		}, []string{`release forA to "" (disconnected)`}},
		{"connected, released by another", ingest, "b", func(d *driver) {
			d.ownBound(forB)
			d.claim(forB, "b")
			d.next()
			d.Dropped(forB, d.now)
			d.pass(9*second, "b")
			d.release(forB, "")
		}, []string{"drop forB (fenced)", "claim forB (connected)"}},
		{"disconnected before the claim", ingest, "b", func(d *driver) {
			d.claim(forB, "b")
			d.Connected(forB)
			d.Disconnected(forB)
			d.pass(9*second, "b")
		}, nil},
		{"connected and wanted", ingest, "b", func(d *driver) {
			d.Wanted(forB, true)
			d.Connected(forB)
			d.pass(9*second, "b")
		}, nil},
		{"connected stays here", ingest, "bc", func(d *driver) {
			d.ownBound(forA)
			d.pass(90*second, "b", "c")
		}, nil},
		{"disconnected", ingest, "b", func(d *driver) {
			d.ownBound(forA)
			d.Disconnected(forA)
			d.pass(5*second, "b")
			d.got = append(d.got, "6 s")
			d.pass(1*second, "b")
		}, []string{"6 s", `release forA to "" (disconnected)`}},
		{"disconnected during the claim", ingest, "b", func(d *driver) {
			d.Connected(forA)
			d.next()
			d.Disconnected(forA)
			d.claim(forA, "a")
			d.Claimed(forA, true, d.now)
			d.pass(6*second, "b")
		}, []string{"claim forA (connected)", `release forA to "" (disconnected)`}},
		{"disconnected for a short time", ingest, "b", func(d *driver) {
			d.ownBound(forA)
			for range 3 {
				d.Disconnected(forA)
				d.pass(5*second, "b")
				d.Connected(forA)
				d.pass(5*second, "b")
			}
		}, nil},
		{"disconnected, released and claimed to be removed", ingest, "b", func(d *driver) {
			d.ownBound(forA)
			d.Disconnected(forA)
			d.pass(6*second, "b")
			d.release(forA, "")
			d.Released(forA, d.seq, d.now)
			d.pass(60*second, "b")
			d.claim(forA, "a")
			d.Claimed(forA, true, d.now)
		}, []string{`release forA to "" (disconnected)`, "claim forA (unwanted)", "remove forA (unwanted)"}},
		{"disconnected without another instance", ingest, "", func(d *driver) {
			d.ownBound(forA)
			d.Disconnected(forA)
			d.pass(59 * second)
			d.got = append(d.got, "60 s")
			d.pass(1 * second)
		}, []string{"60 s", "remove forA (unwanted)"}},

		// Removal.
		{"no longer wanted", ingest, "b", func(d *driver) {
			d.own(forB)
			d.Wanted(forB, false)
			d.pass(59*second, "b")
			d.got = append(d.got, "60 s")
			d.pass(1*second, "b")
		}, []string{"60 s", "remove forB (unwanted)"}},
		{"wanted again", ingest, "b", func(d *driver) {
			d.own(forA)
			d.Wanted(forA, false)
			d.pass(59*second, "b")
			d.Wanted(forA, true)
			d.pass(20*second, "b")
		}, nil},
		{"removed", ingest, "", func(d *driver) {
			d.own(forA)
			d.Wanted(forA, false)
			d.pass(60 * second)
			d.InStream(forA, false)
			d.release(forA, "")
			d.Released(forA, d.seq, d.now)
			d.pass(90 * second)
		}, []string{"remove forA (unwanted)"}},
		{"in the log, without owner", ingest, "b", func(d *driver) {
			d.InStream(forA, true)
			d.InStream(forB, true)
			d.pass(59*second, "b")
			d.got = append(d.got, "60 s")
			d.pass(1*second, "b")
			d.claim(forA, "a")
			d.Claimed(forA, true, d.now)
		}, []string{"60 s", "claim forA (unwanted)", "remove forA (unwanted)"}},
		{"owner of an unwanted worker dies", ingest, "b", func(d *driver) {
			d.claim(forA, "b")
			d.pass(60*second, "b")
			d.pass(62 * second)
			d.got = append(d.got, "3 s + 60 s")
			d.pass(1 * second)
		}, []string{"3 s + 60 s", "claim forA (unwanted)"}},
		{"without owner, unwanted later", ingest, "b", func(d *driver) {
			d.InStream(forB, true)
			d.Wanted(forB, true)
			d.pass(90*second, "b")
			d.Wanted(forB, false)
			d.pass(30*second, "b")
			d.pass(29 * second)
			d.got = append(d.got, "60 s")
			d.pass(1 * second)
		}, []string{"60 s", "claim forB (unwanted)"}},
		{"owner of an unwanted worker returns", ingest, "", func(d *driver) {
			beat := func() {
				d.revision++
				d.Instance("b", d.revision, Info{}, d.now)
				d.next()
			}
			beat()
			d.claim(forA, "b")
			d.pass(40 * second)
			beat()
			d.pass(62 * second)
			d.got = append(d.got, "3 s + 60 s")
			d.pass(1 * second)
		}, []string{"3 s + 60 s", "claim forA (unwanted)"}},
		{"claim of an unwanted worker failed", ingest, "", func(d *driver) {
			d.claim(forA, "a")
			d.pass(60 * second)
		}, []string{"claim forA (unwanted)"}},

		// Isolation.
		{"isolated", ingest, "b", func(d *driver) {
			d.own(forA)
			d.claim(forB, "b")
			d.Wanted(forB, true)
			d.next()
			d.now = d.now.Add(90 * second)
			d.Wanted("new", true)
			d.Connected("bound")
			d.beat("c")
			d.next()
		}, nil},
		{"isolated and fenced", ingest, "b", func(d *driver) {
			d.own(forA)
			d.now = d.now.Add(90 * second)
			d.claim(forA, "b")
		}, []string{"drop forA (fenced)"}},
		{"others return from an outage later", ingest, "b", func(d *driver) {
			d.Wanted(forA, true)
			d.claim(forA, "b")
			d.pass(9*second, "b")
			d.now = d.now.Add(90 * second)
			d.pass(2 * second)
			d.Wanted(forB, true)
			d.pass(1 * second)
			d.pass(9*second, "b")
		}, nil},
		{"others do not return from an outage", ingest, "b", func(d *driver) {
			d.Wanted(forA, true)
			d.claim(forA, "b")
			d.pass(9*second, "b")
			d.now = d.now.Add(90 * second)
			d.pass(4 * second)
		}, []string{"claim forA (owner_dead)"}},

		// Limits.
		{"hand-over fails", Config{Ingest: true, MaxHandOvers: 1}, "", func(d *driver) {
			d.own(forA)
			d.pass(7*second, "c")
			d.Released(forA, 0, d.now)
			d.pass(1*second, "c")
		}, []string{`release forA to "c" (assigned)`, `release forA to "c" (assigned)`}},
		{"hand-overs in progress", Config{Ingest: true, MaxHandOvers: 1}, "", func(d *driver) {
			d.own(forA)
			d.own(forB)
			d.pass(7*second, "c")
			d.release(min(forA, forB), "c")
			d.Released(min(forA, forB), d.seq, d.now)
			d.pass(9*second, "c")
			d.got = append(d.got, "claimed")
			d.claim(min(forA, forB), "c")
		}, sortedByName(`release forA to "c" (assigned)`, "claimed", `release forB to "c" (assigned)`)},
		{"claims in progress", Config{Ingest: true, MaxActions: 1}, "", func(d *driver) {
			d.Wanted(forA, true)
			d.Wanted(forB, true)
			d.pass(9 * second)
			d.got = append(d.got, "claimed")
			d.claim(min(forA, forB), "a")
			d.Claimed(min(forA, forB), true, d.now)
		}, sortedByName("claim forA (unowned)", "claimed", "claim forB (unowned)")},
		{"releases in progress", Config{Ingest: true, MaxActions: 1}, "", func(d *driver) {
			d.own(forA)
			d.own(forB)
			d.Drain()
			d.next()
			d.got = append(d.got, "released")
			d.release(min(forA, forB), "")
			d.Released(min(forA, forB), d.seq, d.now)
		}, sortedByName(`release forA to "" (draining)`, "released", `release forB to "" (draining)`)},
	} {
		t.Run(tt.name, func(t *testing.T) {
			var others []string
			if tt.others != "" {
				others = strings.Split(tt.others, "")
			}
			d := newDriver(tt.cfg, others...)
			d.next()
			tt.do(d)
			d.next()
			if diff := cmp.Diff(tt.want, d.got); diff != "" {
				t.Errorf("actions (-want +got):\n%s", diff)
			}
		})
	}
}

// sortedByName exchanges the actions for forA and forB if forB is first by name.
func sortedByName(first, between, last string) []string {
	if forB < forA {
		first, last = last, first
	}
	return []string{first, between, last}
}

func TestNextReturnsWhenItIsDue(t *testing.T) {
	d := newDriver(Config{Ingest: true}, "b")
	check := func(what string, want time.Duration) {
		t.Helper()
		d.next()
		if got := d.again.Sub(d.now); got != want {
			t.Errorf("%s: again after %v, want %v", what, got, want)
		}
	}
	check("isolation", 1500*time.Millisecond)
	if d.Isolated() {
		t.Error("isolated, want it to begin later")
	}
	d.now = d.now.Add(1400 * time.Millisecond)
	d.beat("a")
	check("end of the other's heartbeat", 1500*time.Millisecond)
	d.now = d.now.Add(time.Second)
	d.beat("a")
	check("end of the other's heartbeat", 600*time.Millisecond)
	d.now = d.now.Add(1500 * time.Millisecond)
	d.next()
	if !d.Isolated() {
		t.Error("not isolated, want it after TTL/2 without an own heartbeat")
	}
}

func TestStatus(t *testing.T) {
	d := newDriver(Config{Ingest: true}, "b")
	start := d.now
	d.own(forA)
	d.claim("other", "b")
	d.Wanted(forB, true)
	d.release(forB, "b")
	d.pass(4*second, "c")
	d.Instance("c", 99, Info{Ingest: true, Draining: true}, d.now)
	d.next()
	wantInstances := []InstanceStatus{
		{ID: "a", Live: true, Ingest: true},
		{ID: "b", Ingest: true, Since: start.Add(3 * second)},
		{ID: "c", Live: true, Ingest: true, Draining: true, Since: start.Add(1 * second)},
	}
	if diff := cmp.Diff(wantInstances, d.Instances()); diff != "" {
		t.Errorf("instances (-want +got):\n%s", diff)
	}
	for name, want := range map[string]bool{forA: true, forB: false, "other": false, "unknown": false} {
		if got := d.Ingested(name); got != want {
			t.Errorf("ingested %q: got %t", name, got)
		}
	}
}

func TestDrainedOnceNothingIsOwned(t *testing.T) {
	d := newDriver(Config{Ingest: true}, "b")
	d.own(forA)
	check := func(when string, want bool) {
		t.Helper()
		d.next()
		if got := d.Drained(); got != want {
			t.Errorf("%s: drained %t, want %t", when, got, want)
		}
	}
	check("ingesting", false)
	d.Drain()
	check("releasing", false)
	d.Released(forA, d.seq+1, d.now)
	check("released, not read back", false)
	d.release(forA, "b")
	check("released", true)
	d.claim(forB, "a")
	check("a claim that was sent before", false)
	d.release(forB, "b")
	d.Released(forB, d.seq, d.now)
	check("released, read back before", true)
}

func TestNotDrainedWithoutDrain(t *testing.T) {
	if newDriver(Config{Ingest: true}).Drained() {
		t.Error("drained, want only after Drain")
	}
}

// TestManyWorkersWaitForLimits claims more workers than may be claimed at a time: each is claimed once, in the order in
// which they came to wait.
func TestManyWorkersWaitForLimits(t *testing.T) {
	const workers, most = 100, 8
	d := newDriver(Config{Ingest: true, MaxActions: most})
	var want, got []string
	for i := range workers {
		name := fmt.Sprintf("worker-%02d", i)
		want = append(want, name)
		d.Wanted(name, true)
	}
	inProgress, _ := d.Next(d.now)
	for range 3 {
		d.Loaded(d.now) // makes it decide on all workers
		d.Next(d.now)
	}
	if got := len(d.limits[claims].waiting); got != workers-most {
		t.Errorf("%d workers wait, want %d", got, workers-most)
	}
	for {
		actions, _ := d.Next(d.now)
		inProgress = append(inProgress, actions...)
		if len(inProgress) > most {
			t.Fatalf("%d claims in progress, want at most %d", len(inProgress), most)
		}
		if len(inProgress) == 0 {
			break
		}
		a := inProgress[0]
		inProgress = inProgress[1:]
		if want := max(d.seq, most-1) - (most - 1); a.Seq != want {
			t.Errorf("%s: Action.Seq %d, want %d, the last record before the claim", a.Worker, a.Seq, want)
		}
		got = append(got, a.Worker)
		d.claim(a.Worker, "a")
		d.Claimed(a.Worker, true, d.now)
	}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("claimed (-want +got):\n%s", diff)
	}
}
