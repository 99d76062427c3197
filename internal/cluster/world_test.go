package cluster

import (
	"fmt"
	"slices"
	"time"

	"github.com/zeebo/xxh3"
)

// A world has instances with a machine each, a log with compare and swap, and engines that number their batches. What an
// instance has sent may land at any later time, as after a pause or from a dead process. Each instance reads the log in order, with any delay.

const worldTTL = 3 * time.Second

// limits are how often each fault or change may happen.
type limits struct {
	appends, crashes, starts, drains, suspicions, timeouts, failures, wants, connects, cuts uint8
}

type recordKind uint8

const (
	recordClaim recordKind = iota
	recordRelease
	recordBatch
	recordRemoved
)

// record is an entry of the log; its seq is its index plus one.
type record struct {
	kind   recordKind
	worker uint8
	by     string // the owner after a claim or release
	batch  uint8
}

type stage uint8

const (
	stageNone    stage = iota
	stageClaim         // a claim is in flight
	stageRecover       // the claim is in the log
	stageIngest        // batches are appended
	stageRelease       // a release waits for the append in flight, or is in flight
	stageRemove        // as stageRelease, with a removal before it
)

// publish is what was sent to the log.
type publish struct {
	writer   string
	expected uint16 // last seq of the worker
	records  []record
}

// lane is what an instance does for a worker.
type lane struct {
	stage   stage
	flight  *publish // not acknowledged
	to      string   // of a release
	claim   uint16   // seq of the claim
	chain   uint16   // expected last seq of the next record
	batches uint8    // of the engine, up to the last one appended or recovered
	last    uint16   // last seq of the worker that was read from the log
	decided uint64   // Action.Seq of the claim
	owned   uint64   // seq of the last ownership record that was read from the log
}

// node is an instance.
type node struct {
	id        string
	m         *Machine
	engines   Reach
	alive     bool
	now       time.Time // its own clock
	revision  uint64
	read      uint16 // records read from the log
	lanes     []lane
	connected []bool
	wanted    []bool // as it was told
	exited    bool   // its key was deleted
	actions   int    // actions begun so far; not part of the state
	key       []byte
}

// ownership is who owns a worker by the log.
type ownership struct {
	owner    string
	released bool
	last     uint16
	batches  uint8
	inStream bool
}

type world struct {
	cfg     Config
	nodes   []*node // of each slot, the last run
	former  []*node // former runs, whose keys still exist
	runs    uint8
	names   []string // of workers
	wanted  []bool
	log     []record
	owners  []ownership
	flights []*publish // of dead processes, or abandoned
	left    limits
	wrong   string
	trace   func(string)
	inPlace bool // do changes nodes in place
	// checkAgain checks when Next is to be called again.
	checkAgain bool
	// sendsLater lets time pass between the decision to claim and the choice of the expected seq.
	sendsLater bool
}

var worldStart = time.Date(2026, 1, 1, 0, 0, 0, 0, time.UTC)

func newWorld(cfg Config, nodes int, left limits, names []string, wanted, sendsLater bool) *world {
	w := &world{cfg: cfg, names: names, left: left, sendsLater: sendsLater, trace: func(string) {}}
	for range names {
		w.wanted = append(w.wanted, wanted)
		w.owners = append(w.owners, ownership{})
	}
	for i := range nodes {
		w.nodes = append(w.nodes, nil)
		w.start(i)
	}
	return w
}

func (w *world) fail(format string, args ...any) {
	if w.wrong == "" {
		w.wrong = fmt.Sprintf(format, args...)
	}
}

// start starts an instance, which reads all that exists.
func (w *world) start(i int) {
	w.runs++
	n := &node{id: fmt.Sprintf("%c%d", 'a'+i, w.runs), alive: true, now: worldStart, engines: ReachSome}
	cfg := w.cfg
	cfg.ID, cfg.Ingest = n.id, true
	n.m = New(cfg)
	n.m.Engines(n.engines)
	n.lanes, n.connected = make([]lane, len(w.names)), make([]bool, len(w.names))
	if old := w.nodes[i]; old != nil {
		w.former = append(slices.Clip(w.former), old)
	}
	w.nodes[i] = n
	n.wanted = slices.Clone(w.wanted)
	for worker, wanted := range n.wanted {
		n.m.Wanted(w.names[worker], wanted)
	}
	for _, other := range slices.Concat(w.former, w.nodes) {
		if other != nil && !other.exited {
			w.heartbeat(n, other)
		}
	}
	for int(n.read) < len(w.log) {
		w.readOne(n)
	}
	n.m.Loaded(n.now)
	w.next(n)
}

// heartbeat gives a node another's heartbeat, or its own.
func (w *world) heartbeat(n, other *node) {
	n.revision++
	n.m.Instance(other.id, n.revision, Info{Ingest: true, Draining: other.m.draining, Engines: other.engines}, n.now)
}

// readOne gives a node the next record of the log.
func (w *world) readOne(n *node) {
	r := w.log[n.read]
	n.read++
	name := w.names[r.worker]
	n.lanes[r.worker].last = n.read
	if r.kind == recordClaim || r.kind == recordRelease {
		n.lanes[r.worker].owned = uint64(n.read)
	}
	switch r.kind {
	case recordClaim:
		n.m.ClaimRead(name, uint64(n.read), r.by, n.now)
	case recordRelease:
		n.m.ReleaseRead(name, uint64(n.read), r.by, n.now)
	case recordBatch:
		n.m.InStream(name, true)
	case recordRemoved:
		n.m.InStream(name, false)
	}
}

// next begins what the machine decides.
func (w *world) next(n *node) {
	actions, again := n.m.Next(n.now)
	n.actions += len(actions)
	if w.checkAgain {
		w.checkIdleUntil(n, again)
	}
	for _, a := range actions {
		w.trace("  " + n.id + ": " + a.String())
		worker := uint8(slices.Index(w.names, a.Worker))
		l := &n.lanes[worker]
		if want := map[Kind][]stage{Claim: {stageNone}, Drop: {stageIngest}, Remove: {stageIngest}, Release: {stageNone, stageIngest}}[a.Kind]; !slices.Contains(want, l.stage) {
			w.fail("%s: %v in stage %d", n.id, a, l.stage)
		}
		switch a.Kind {
		case Claim:
			l.stage, l.decided = stageClaim, a.Seq
			if !w.sendsLater {
				w.sendClaim(n, worker)
			}
		case Drop:
			w.abandon(l)
			l.stage = stageNone
			n.m.Dropped(a.Worker, n.now)
			w.next(n)
		case Release, Remove:
			if l.stage == stageNone {
				l.chain = l.last
			}
			l.to, l.stage = a.To, stageRelease
			if a.Kind == Remove {
				l.stage = stageRemove
			}
			w.release(n, worker)
		}
	}
}

// checkIdleUntil checks that nothing happens without an input before the time that Next has returned.
func (w *world) checkIdleUntil(n *node, again time.Time) {
	if !again.IsZero() && !again.After(n.now) {
		w.fail("%s: again after %v, want later", n.id, again.Sub(n.now))
	}
	before := again.Add(-1)
	if again.IsZero() {
		before = n.now.Add(24 * time.Hour)
	}
	if actions, _ := n.m.clone().Next(before); len(actions) > 0 {
		w.fail("%s: %v after %v, but Next is to be called again after %v", n.id, actions, before.Sub(n.now), again.Sub(n.now))
	}
}

// sendClaim sends a claim, unless an ownership record was read since the decision.
func (w *world) sendClaim(n *node, worker uint8) {
	l := &n.lanes[worker]
	if l.owned > l.decided {
		l.stage = stageNone
		n.m.Claimed(w.names[worker], false, n.now)
		return
	}
	l.flight = &publish{n.id, l.last, []record{{kind: recordClaim, worker: worker, by: n.id}}}
}

// release sends a release, unless an append is in flight.
func (w *world) release(n *node, worker uint8) {
	l := &n.lanes[worker]
	if l.flight != nil {
		return
	}
	p := &publish{writer: n.id, expected: l.chain}
	if l.stage == stageRemove {
		p.records = append(p.records, record{kind: recordRemoved, worker: worker})
	}
	p.records = append(p.records, record{kind: recordRelease, worker: worker, by: l.to})
	l.flight = p
}

// abandon leaves what is in flight to land or not.
func (w *world) abandon(l *lane) {
	if l.flight != nil {
		w.flights = append(slices.Clip(w.flights), l.flight)
		l.flight = nil
	}
}

// land appends a publish to the log, or refuses it.
func (w *world) land(p *publish) bool {
	worker := p.records[0].worker
	o := &w.owners[worker]
	if o.last != p.expected {
		return false
	}
	for _, r := range p.records {
		if r.kind != recordClaim && (o.owner != p.writer || o.released) {
			w.fail("%s appended to %s, owned by %q", p.writer, w.names[worker], o.owner)
		}
		w.log = append(slices.Clip(w.log), r)
		o.last = uint16(len(w.log))
		switch r.kind {
		case recordClaim:
			o.owner, o.released = r.by, false
		case recordRelease:
			o.owner, o.released = r.by, true
		case recordBatch:
			if r.batch != o.batches+1 {
				w.fail("%s appended batch %d of %s after batch %d", p.writer, r.batch, w.names[worker], o.batches)
			}
			o.batches, o.inStream = r.batch, true
		case recordRemoved:
			o.inStream = false
		}
	}
	return true
}

type stepKind uint8

const (
	stepRead stepKind = iota
	stepSend
	stepLand
	stepRecovered
	stepRecoverFailed
	stepTimeout
	stepAppend
	stepTick      // TTL passes with all heartbeats
	stepSuspect   // TTL passes without the heartbeats of node j
	stepIsolate   // TTL passes without any heartbeat
	stepHeartbeat // of node j
	stepGone      // the key of former run j was deleted
	stepCrash
	stepStart
	stepDrain
	stepExit
	stepWant
	stepWanted // a node learns it
	stepConnect
	stepDisconnect
	stepReach // a node reaches engines no longer, or again
	stepLandFlight
)

var stepNames = [...]string{"read", "send", "land", "recovered", "recovery failed", "timeout", "append", "tick", "suspect", "isolate", "heartbeat",
	"gone", "crash", "start", "drain", "exit", "want", "wanted", "connect", "disconnect", "reach", "land flight"}

// step is something that can happen: to node i, about node or worker j.
type step struct {
	kind stepKind
	i, j uint8
}

func (s step) String() string { return fmt.Sprintf("%s %d %d", stepNames[s.kind], s.i, s.j) }

// steps returns what can happen.
func (w *world) steps(all []step) []step {
	can := func(left uint8, kind stepKind, i, j int) {
		if left > 0 {
			all = append(all, step{kind, uint8(i), uint8(j)})
		}
	}
	for k := range w.flights {
		can(1, stepLandFlight, k, 0)
	}
	for j := range w.names {
		can(w.left.wants, stepWant, 0, j)
	}
	for i, n := range w.nodes {
		if !n.alive {
			can(w.left.starts, stepStart, i, 0)
			continue
		}
		can(w.left.crashes, stepCrash, i, 0)
		if !n.m.draining {
			can(w.left.drains, stepDrain, i, 0)
		} else if n.m.Drained() {
			can(1, stepExit, i, 0)
		}
		if int(n.read) < len(w.log) {
			can(1, stepRead, i, 0)
		}
		can(1, stepTick, i, 0)
		can(w.left.suspicions, stepIsolate, i, 0)
		can(w.left.cuts, stepReach, i, 0)
		for j, other := range w.nodes {
			if i == j {
				continue
			}
			known := n.m.instances[other.id]
			switch {
			case other.exited && known != nil:
				can(1, stepGone, i, j)
			case other.alive && (known == nil || !known.live || known.info.Draining != other.m.draining || known.info.Engines != other.engines):
				can(1, stepHeartbeat, i, j)
			case other.alive:
				can(w.left.suspicions, stepSuspect, i, j)
			}
		}
		for j := range w.names {
			l := &n.lanes[j]
			if l.stage == stageClaim && l.flight == nil {
				can(1, stepSend, i, j)
			}
			if l.flight != nil {
				can(1, stepLand, i, j)
				can(w.left.timeouts, stepTimeout, i, j)
			} else if l.stage == stageIngest {
				can(w.left.appends, stepAppend, i, j)
			}
			if l.stage == stageRecover && n.read >= l.claim {
				can(1, stepRecovered, i, j)
				can(w.left.failures, stepRecoverFailed, i, j)
			}
			if n.wanted[j] != w.wanted[j] {
				can(1, stepWanted, i, j)
			}
			if n.connected[j] {
				can(w.left.connects, stepDisconnect, i, j)
			} else {
				can(w.left.connects, stepConnect, i, j)
			}
		}
	}
	return all
}

// do takes a step. Unless w.inPlace, it replaces the node that changes, which other worlds may share.
func (w *world) do(s step) {
	if s.kind == stepLandFlight {
		p := w.flights[s.i]
		w.flights = slices.Delete(slices.Clone(w.flights), int(s.i), int(s.i)+1)
		w.land(p)
		return
	}
	if s.kind == stepWant {
		w.left.wants--
		w.wanted = slices.Clone(w.wanted)
		w.wanted[s.j] = !w.wanted[s.j]
		return
	}
	if s.kind == stepStart {
		w.left.starts--
		w.start(int(s.i))
		return
	}
	n := w.nodes[s.i]
	if !w.inPlace {
		n = n.clone()
		w.nodes[s.i] = n
	}
	n.key = nil
	switch s.kind {
	case stepRead:
		w.readOne(n)
	case stepSend:
		w.sendClaim(n, s.j)
	case stepLand:
		w.landOf(n, s.j)
		return
	case stepRecovered:
		w.recovered(n, s.j)
	case stepRecoverFailed:
		w.left.failures--
		n.lanes[s.j].stage = stageNone
		n.m.Claimed(w.names[s.j], false, n.now)
	case stepTimeout:
		w.left.timeouts--
		w.timeout(n, s.j)
	case stepAppend:
		w.left.appends--
		l := &n.lanes[s.j]
		l.flight = &publish{n.id, l.chain, []record{{kind: recordBatch, worker: s.j, batch: l.batches + 1}}}
		return
	case stepTick:
		w.tick(n, nil, true)
	case stepSuspect:
		w.left.suspicions--
		w.tick(n, w.nodes[s.j], true)
	case stepIsolate:
		w.left.suspicions--
		w.tick(n, nil, false)
	case stepHeartbeat:
		w.heartbeat(n, w.nodes[s.j])
	case stepGone:
		n.m.InstanceGone(w.nodes[s.j].id)
	case stepCrash, stepExit:
		if s.kind == stepCrash {
			w.left.crashes--
		}
		n.alive, n.exited = false, s.kind == stepExit
		for j := range n.lanes {
			w.abandon(&n.lanes[j])
		}
		return
	case stepDrain:
		w.left.drains--
		n.m.Drain()
	case stepWanted:
		n.wanted[s.j] = w.wanted[s.j]
		n.m.Wanted(w.names[s.j], w.wanted[s.j])
	case stepConnect:
		w.left.connects--
		n.connected[s.j] = true
		n.m.Connected(w.names[s.j])
	case stepDisconnect:
		w.left.connects--
		n.connected[s.j] = false
		n.m.Disconnected(w.names[s.j])
	case stepReach:
		w.left.cuts--
		n.engines = ReachSome + ReachNone - n.engines
		n.m.Engines(n.engines)
	default:
	}
	w.next(n)
}

func (w *world) landOf(n *node, worker uint8) {
	l := &n.lanes[worker]
	p := l.flight
	l.flight = nil
	ok := w.land(p)
	seq := uint16(len(w.log))
	name := w.names[worker]
	switch kind := p.records[len(p.records)-1].kind; {
	case kind == recordClaim && ok:
		l.stage, l.claim = stageRecover, seq
	case kind == recordClaim:
		l.stage = stageNone
		n.m.Claimed(name, false, n.now)
	case kind == recordRelease:
		l.stage = stageNone
		if !ok {
			seq = 0
		}
		n.m.Released(name, uint64(seq), n.now)
	case ok: // a batch
		l.chain = seq
		l.batches++
		if l.stage != stageIngest {
			w.release(n, worker)
		}
	case l.stage == stageIngest:
		n.m.Lost(name)
	default: // a batch before a release
		l.stage = stageNone
		n.m.Released(name, 0, n.now)
	}
	w.next(n)
}

func (w *world) recovered(n *node, worker uint8) {
	l := &n.lanes[worker]
	l.stage, l.chain, l.batches = stageIngest, l.claim, 0
	for _, r := range w.log[:l.claim] {
		if r.worker == worker && r.kind == recordBatch {
			l.batches = r.batch
		}
	}
	n.m.Claimed(w.names[worker], true, n.now)
}

func (w *world) timeout(n *node, worker uint8) {
	l := &n.lanes[worker]
	w.abandon(l)
	switch l.stage {
	case stageClaim:
		l.stage = stageNone
		n.m.Claimed(w.names[worker], false, n.now)
	case stageIngest:
		n.m.Lost(w.names[worker])
	default:
		l.stage = stageNone
		n.m.Released(w.names[worker], 0, n.now)
	}
}

// tick lets TTL pass for a node, with the heartbeats of all others that live except one, or with none.
func (w *world) tick(n, without *node, heartbeats bool) {
	for range 3 {
		n.now = n.now.Add(worldTTL / 3)
		if !heartbeats {
			w.next(n)
			continue
		}
		w.heartbeat(n, n)
		w.next(n)
		for _, other := range w.nodes {
			if other != n && other != without && other.alive {
				w.heartbeat(n, other)
				w.next(n)
			}
		}
	}
}

// settle lets all that is in progress end and time pass without faults, and returns what is wrong then. settles has the
// keys of worlds that are known to settle, if it is not nil.
func (w *world) settle(settles map[uint64]struct{}) string {
	w.inPlace = true
	for i, n := range w.nodes {
		w.nodes[i] = n.clone()
	}
	var keys []uint64
	defer func() {
		for _, key := range keys {
			settles[key] = struct{}{} // a world that does not settle ends the test
		}
	}()
	quiet := 0
	for range 200 {
		before := w.begun() + len(w.log)
		if settles != nil {
			key := xxh3.Hash(w.appendKey(nil))
			if _, ok := settles[key]; ok {
				return ""
			}
			keys = append(keys, key)
		}
		for len(w.flights) > 0 {
			w.do(step{kind: stepLandFlight})
		}
		for i, n := range w.nodes {
			if !n.alive {
				continue
			}
			for j := range w.names {
				if n.wanted[j] != w.wanted[j] {
					w.do(step{stepWanted, uint8(i), uint8(j)})
				}
			}
			for j, other := range w.nodes {
				if other.exited {
					w.do(step{stepGone, uint8(i), uint8(j)})
				}
			}
			for range 3 {
				for int(w.nodes[i].read) < len(w.log) {
					w.do(step{kind: stepRead, i: uint8(i)})
				}
				for j := range w.names {
					if l := &w.nodes[i].lanes[j]; l.stage == stageClaim && l.flight == nil {
						w.do(step{stepSend, uint8(i), uint8(j)})
					}
					if w.nodes[i].lanes[j].flight != nil {
						w.do(step{stepLand, uint8(i), uint8(j)})
					}
				}
			}
			for int(w.nodes[i].read) < len(w.log) {
				w.do(step{kind: stepRead, i: uint8(i)})
			}
			for j := range w.names {
				if w.nodes[i].lanes[j].stage == stageRecover {
					w.do(step{stepRecovered, uint8(i), uint8(j)})
				}
			}
			w.do(step{kind: stepTick, i: uint8(i)})
		}
		if w.wrong != "" {
			return w.wrong
		}
		if w.begun()+len(w.log) != before {
			quiet = 0
		} else if quiet++; quiet == w.quietRounds() {
			return w.check()
		}
	}
	return "actions without end"
}

// quietRounds is after how many rounds of TTL no timer runs.
func (w *world) quietRounds() int {
	c := w.cfg.withDefaults()
	return int((c.Settle+c.Grace+c.Retry+c.TTL)/c.TTL) + 2
}

func (w *world) begun() (n int) {
	for _, node := range w.nodes {
		n += node.actions
	}
	return n
}

// check returns what is wrong in a world that has settled.
func (w *world) check() string {
	var candidates, reaching []*instance
	for _, n := range w.nodes {
		if n.alive && !n.m.draining {
			candidates = append(candidates, newInstance(n.id))
			if n.engines == ReachSome {
				reaching = append(reaching, candidates[len(candidates)-1])
			}
		}
	}
	if len(reaching) > 0 {
		candidates = reaching
	}
	for j, name := range w.names {
		o := &w.owners[j]
		var ingests, connected []string
		for _, n := range w.nodes {
			if !n.alive {
				continue
			}
			if n.lanes[j].stage == stageIngest {
				ingests = append(ingests, n.id)
			}
			if n.connected[j] && !n.m.draining {
				connected = append(connected, n.id)
			}
			if n.m.draining && !n.m.Drained() {
				return n.id + " does not drain"
			}
			got := n.m.workers[name]
			if got == nil {
				got = new(worker)
			}
			if got.owner != o.owner || got.released != (o.released && o.owner != "") {
				return fmt.Sprintf("%s: owner of %s %+v, want %+v", n.id, name, got, *o)
			}
			for _, l := range n.m.limits {
				if l.inProgress != 0 {
					return fmt.Sprintf("%s: limits %+v, want nothing in progress", n.id, n.m.limits)
				}
			}
		}
		var owners []string // who may own it
		switch {
		case len(candidates) == 0:
		case w.wanted[j]:
			owners = []string{first(candidates, name).id}
		default:
			owners = connected
		}
		switch {
		case len(owners) == 0 && len(ingests) > 0:
			return fmt.Sprintf("%s: ingested by %v, want none", name, ingests)
		case len(owners) == 0 && len(candidates) > 0:
			if o.owner != "" || o.inStream {
				return fmt.Sprintf("%s: %+v, want it removed", name, *o)
			}
			for _, n := range w.nodes {
				if _, known := n.m.workers[name]; n.alive && known && !n.connected[j] {
					return n.id + " does not forget " + name
				}
			}
		case len(owners) > 0 && (len(ingests) != 1 || !slices.Contains(owners, ingests[0]) || o.owner != ingests[0] || o.released):
			return fmt.Sprintf("%s: ingested by %v, %+v, want one of %v", name, ingests, *o, owners)
		case len(owners) > 0:
			i := slices.IndexFunc(w.nodes, func(n *node) bool { return n.id == ingests[0] })
			w.left.appends++
			before := len(w.log)
			w.do(step{stepAppend, uint8(i), uint8(j)})
			w.do(step{stepLand, uint8(i), uint8(j)})
			if len(w.log) == before {
				return name + ": the append of its owner was refused"
			}
		}
	}
	return w.wrong
}

// clone returns a copy that shares the nodes: a step clones those that it changes.
func (w *world) clone() *world {
	c := *w
	c.nodes, c.owners = slices.Clone(w.nodes), slices.Clone(w.owners)
	return &c
}

func (n *node) clone() *node {
	c := *n
	c.key = nil
	c.lanes, c.connected, c.wanted = slices.Clone(n.lanes), slices.Clone(n.connected), slices.Clone(n.wanted)
	c.m = n.m.clone()
	return &c
}

func (m *Machine) clone() *Machine {
	c := *m
	c.instances = make(map[string]*instance, len(m.instances))
	for id, i := range m.instances {
		copied := *i
		c.instances[id] = &copied
	}
	c.self = c.instances[m.cfg.ID]
	c.candidates = nil
	for _, i := range m.candidates {
		if k := c.instances[i.id]; k != nil {
			i = k
		}
		c.candidates = append(c.candidates, i)
	}
	c.workers, c.dirty = make(map[string]*worker, len(m.workers)), make(map[string]*worker)
	for name, w := range m.workers {
		copied := *w
		c.workers[name] = &copied
	}
	for i := range c.limits {
		c.limits[i].waiting = slices.Clone(m.limits[i].waiting)
	}
	return &c
}
