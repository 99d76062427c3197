package sequence

import (
	"slices"
	"time"
)

// step is an event that may occur in a world.
type step struct {
	name string
	can  func(w *world) bool
	do   func(w *world)
}

var steps = []step{
	{"publish", func(w *world) bool { return w.left.batches > 0 }, func(w *world) { w.left.batches--; w.publish(true) }},
	{
		"another engine publishes",
		func(w *world) bool { return w.left.others > 0 },
		func(w *world) { w.left.others--; w.other.add(w.otherBegan); w.otherBegan++ },
	},
	{
		"publish, lost",
		func(w *world) bool { return w.left.batches > 0 && w.left.losses > 0 && w.publishing() },
		func(w *world) { w.left.batches--; w.left.losses--; w.publish(false) },
	},
	{
		"publish, not stored",
		func(w *world) bool { return w.left.batches > 0 && w.left.unstored > 0 },
		func(w *world) {
			w.left.batches--
			w.left.unstored--
			w.publish(true)
			w.stored &^= 1 << (w.next - 1)
			w.lossless = false
		},
	},
	{"arrive", func(w *world) bool { return w.current.inFlight != 0 }, func(w *world) { w.arrive(&w.current) }},
	{
		"arrive on the former connection",
		func(w *world) bool { return w.former.inFlight != 0 },
		func(w *world) { w.arrive(&w.former) },
	},
	{
		"arrive twice",
		func(w *world) bool { return w.current.inFlight != 0 && w.left.duplicates > 0 },
		func(w *world) {
			w.left.duplicates--
			seq := w.current.inFlight.lowest()
			w.arriveAs(&w.current, seq, false)
			w.arrive(&w.current)
		},
	},
	{
		"arrive, malformed",
		func(w *world) bool { return w.current.inFlight != 0 && w.left.malformed > 0 },
		func(w *world) { w.left.malformed--; w.arriveAs(&w.current, w.current.inFlight.pop(), true) },
	},
	{
		"overrun",
		func(w *world) bool { return w.current.inFlight != 0 && w.current.known && w.left.overruns > 0 },
		func(w *world) {
			w.left.overruns--
			w.lossless = w.lossless && !w.resumes
			w.current.inFlight = 0
			w.do(w.m.Overrun(w.now))
		},
	},
	{"connect", (*world).canConnect, (*world).connect},
	{
		"cut",
		func(w *world) bool { return w.left.cuts > 0 && w.publishing() },
		func(w *world) { w.left.cuts--; w.close() },
	},
	{"restart", func(w *world) bool { return w.left.restarts > 0 }, func(w *world) { w.left.restarts--; w.restart() }},
	{
		"disconnect",
		func(w *world) bool { return w.current.closed && w.current.id != 0 },
		func(w *world) { w.disconnect(&w.current, false) },
	},
	{
		"disconnect the former connection",
		func(w *world) bool { return w.former.closed && w.former.id != 0 },
		func(w *world) { w.disconnect(&w.former, false) },
	},
	{
		"disconnect before the last batches",
		func(w *world) bool {
			return w.listens && w.current.closed && w.current.id != 0 && w.current.inFlight != 0
		},
		func(w *world) { w.disconnect(&w.current, true) },
	},
	{
		"crash",
		func(w *world) bool { return w.left.crashes > 0 },
		func(w *world) { w.left.crashes--; w.crash(w.durable[0]) },
	},
	{
		"crash, one call not stored",
		func(w *world) bool { return w.left.crashes > 0 && w.durable[1] != w.durable[0] },
		func(w *world) { w.left.crashes--; w.crash(w.durable[1]) },
	},
	{
		"crash, two calls not stored",
		func(w *world) bool { return w.left.crashes > 0 && w.durable[2] != w.durable[1] },
		func(w *world) { w.left.crashes--; w.crash(w.durable[2]) },
	},
	{"send", func(w *world) bool { return w.request != nil && !w.sent }, (*world).send},
	{"reply", func(w *world) bool { return w.replies != 0 }, (*world).reply},
	{
		"reply, lost",
		func(w *world) bool { return w.replies != 0 && w.left.holes > 0 },
		func(w *world) {
			w.left.holes--
			w.lossy = true
			w.replies.pop()
			// The same hole twice, or a hole before the first reply, looks like a forgotten batch.
			w.lossless = w.lossless && w.left.holes > 0 && w.m.repair.request.replies > 0
		},
	},
	{
		"end",
		func(w *world) bool {
			return w.request != nil && w.sent && w.replies == 0 && w.snapshot == snapshotDone
		},
		func(w *world) { w.end(OutcomeComplete) },
	},
	{"snapshot", func(w *world) bool { return w.snapshot != snapshotDone }, (*world).restore},
	{"cut off, silent", (*world).cutOff, func(w *world) { w.end(OutcomeSilent) }},
	{"cut off, failed", (*world).cutOff, func(w *world) { w.end(OutcomeFailed) }},
	{
		"silent",
		func(w *world) bool { return w.request != nil && w.left.failures > 0 },
		func(w *world) { w.left.failures--; w.end(OutcomeSilent) },
	},
	{
		"failed",
		func(w *world) bool { return w.request != nil && w.left.failures > 0 },
		func(w *world) { w.left.failures--; w.end(OutcomeFailed) },
	},
	{
		"forget",
		func(w *world) bool {
			// An engine with snapshots keeps at least its last batch.
			return w.left.forgets > 0 && w.stored != 0 && (w.offers == noSnapshots || w.stored&(w.stored-1) != 0)
		},
		func(w *world) {
			w.left.forgets--
			w.stored.pop()
			w.lossless = w.lossless && w.offers == snapshotsOfPublisher && !w.snapshotSent
		},
	},
	{
		"ask for what is lost",
		func(w *world) bool { return w.left.rereads > 0 && !w.m.lossAt().IsZero() },
		func(w *world) { w.left.rereads--; w.askForLoss() },
	},
	{
		"silence",
		func(w *world) bool {
			return w.left.silences > 0 && w.m.cfg.Silence > 0 && w.m.Connected() && w.m.repair == nil
		},
		func(w *world) {
			w.left.silences--
			w.m.heardAt = w.now.Add(-w.m.cfg.Silence)
			w.do(w.m.Tick(w.now, true))
		},
	},
	{
		"wait",
		func(w *world) bool { return w.left.waits > 0 },
		func(w *world) {
			w.left.waits--
			w.now = w.now.Add(time.Minute)
			w.do(w.m.Tick(w.now, true))
		},
	},
}

func stepNamed(name string) step {
	return steps[slices.IndexFunc(steps, func(s step) bool { return s.name == name })]
}
