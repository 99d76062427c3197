package server

import (
	"context"
	"math/rand/v2"
	"time"

	"google.golang.org/protobuf/proto"

	"github.com/kvcast/kvcast/internal/core/index"
	"github.com/kvcast/kvcast/internal/core/kvblock"
	"github.com/kvcast/kvcast/internal/journal"
	kvcastv1 "github.com/kvcast/kvcast/proto/kvcast/v1"
	"github.com/kvcast/kvcast/server/internal/callerror"
)

func (s routerEvents) Subscribe(req *kvcastv1.SubscribeRequest, stream kvcastv1.RouterEventService_SubscribeServer) error {
	if err := s.checkServing(); err != nil {
		return err
	}
	if is, _ := s.outdated.get(); is {
		return outdatedError(s.journal.Bounds())
	}
	if err := checkClientID(req.GetClientId(), s.journal.Bounds()); err != nil {
		return err
	}
	release, err := s.quotas.subscribers.Acquire(stream.Context(), callerror.TooManySubs, s.journal.Bounds(), "subscribers are connected", "try again later")
	if err != nil {
		return err
	}
	defer release()
	if err := s.catchUp(stream.Context(), req.GetAfter()); err != nil {
		return err
	}
	c, err := s.openCursor(stream, req.GetFilter())
	if err != nil {
		return err
	}
	defer c.filter.release()
	mode, after, err := subscribeStart(req, c.bounds)
	if err != nil {
		return err
	}
	c.seq = after
	c.subscription = s.subscribers.add(stream.Context(), req, after, mode == kvcastv1.Accepted_MODE_SNAPSHOT)
	defer s.subscribers.remove(c.subscription)
	c.snapshots = req.GetGapPolicy() != kvcastv1.GapPolicy_GAP_POLICY_FAIL
	c.digests = req.GetProgressDigests()
	err = c.run(func(ctx context.Context) error {
		if err := c.accept(mode); err != nil {
			return err
		}
		if mode == kvcastv1.Accepted_MODE_SNAPSHOT {
			if err := c.snapshot(ctx); err != nil {
				return err
			}
		}
		return c.follow(ctx)
	})
	s.recordEnd(c.subscription, err)
	return err
}

// maxClientID is the maximum length of a client_id in bytes.
const maxClientID = 128

// checkClientID returns an error unless a client_id can be shown to people as it is.
func checkClientID(id string, b journal.Bounds) error {
	if len(id) > maxClientID {
		return callerror.InvalidField(b, "client_id", "it has %d bytes: at most %d are allowed", len(id), maxClientID)
	}
	for i := range len(id) {
		if id[i] < ' ' || id[i] > '~' {
			return callerror.InvalidField(b, "client_id", "%q is not allowed: want printable ASCII", id)
		}
	}
	return nil
}

// subscribeStart returns the mode in which a stream starts and the seq before its first entry.
func subscribeStart(req *kvcastv1.SubscribeRequest, b journal.Bounds) (mode kvcastv1.Accepted_Mode, after uint64, err error) {
	if _, ok := kvcastv1.GapPolicy_name[int32(req.GetGapPolicy())]; !ok {
		return 0, 0, callerror.InvalidField(b, "gap_policy", "%d is not allowed: want GAP_POLICY_SNAPSHOT or GAP_POLICY_FAIL", req.GetGapPolicy())
	}
	switch from := req.GetStart().(type) {
	case *kvcastv1.SubscribeRequest_Latest:
		return kvcastv1.Accepted_MODE_LATEST, b.Newest, nil
	case *kvcastv1.SubscribeRequest_Earliest:
		return kvcastv1.Accepted_MODE_EARLIEST, b.Oldest - 1, nil
	case *kvcastv1.SubscribeRequest_After:
		err := checkPosition(from.After, b)
		if callerror.Has(err, callerror.PositionCompacted, callerror.EpochMismatch) && req.GetGapPolicy() != kvcastv1.GapPolicy_GAP_POLICY_FAIL {
			return kvcastv1.Accepted_MODE_SNAPSHOT, 0, nil
		}
		return kvcastv1.Accepted_MODE_RESUME, from.After.GetSeq(), err
	}
	return kvcastv1.Accepted_MODE_SNAPSHOT, 0, nil
}

// maxCatchUp is how long a stream may wait for a position that another server has read already.
const maxCatchUp = 2 * time.Second

// catchUp waits until a position is read that the journal has, but this server has not read yet. It returns an error if
// that takes too long. For all other positions it returns nil.
func (s *Server) catchUp(ctx context.Context, p *kvcastv1.Position) error {
	b := s.journal.Bounds()
	if s.cfg.Newest == nil || p.GetSeq() <= b.Newest || checkEpoch(p, b) != nil {
		return nil
	}
	ctx, cancel := context.WithTimeout(ctx, maxCatchUp)
	defer cancel()
	newest, err := s.cfg.Newest(ctx)
	if err == nil && newest < p.GetSeq() {
		return nil
	}
	if err == nil {
		err = s.awaitPosition(ctx, p, maxCatchUp)
	}
	if err == nil || callerror.Has(err, callerror.ShuttingDown) {
		return err
	}
	b = s.journal.Bounds()
	return callerror.New(callerror.Behind, b, "position %d is not read yet: the newest entry is %d; try again, or another server", p.GetSeq(), b.Newest)
}

// checkPosition returns an error unless the entries after a position are retained.
func checkPosition(p *kvcastv1.Position, b journal.Bounds) error {
	if err := checkEpoch(p, b); err != nil {
		return err
	}
	return callerror.OfRead(b.CheckPosition(p.GetSeq()))
}

// checkEpoch returns an error if a position is of another epoch.
func checkEpoch(p *kvcastv1.Position, b journal.Bounds) error {
	if epoch := p.GetEpoch(); epoch != "" && epoch != b.Epoch {
		return callerror.New(callerror.EpochMismatch, b,
			"the position has epoch %.64q, the journal %q: the entries of the position's epoch are lost; start from a snapshot", epoch, b.Epoch)
	}
	return nil
}

func (s routerEvents) Replay(req *kvcastv1.ReplayRequest, stream kvcastv1.RouterEventService_ReplayServer) error {
	if err := s.checkServing(); err != nil {
		return err
	}
	release, err := s.quotas.replays.Acquire(stream.Context(), callerror.TooManySubs, s.journal.Bounds(), "replays are being sent", "try again later")
	if err != nil {
		return err
	}
	defer release()
	for _, p := range []*kvcastv1.Position{req.GetAfter(), req.GetUntil()} {
		if err := s.catchUp(stream.Context(), p); err != nil {
			return err
		}
	}
	c, err := s.openCursor(stream, req.GetFilter())
	if err != nil {
		return err
	}
	defer c.filter.release()
	after, until, err := replayRange(req, c.bounds)
	if err != nil {
		return err
	}
	c.seq = after
	mode := kvcastv1.Accepted_MODE_RESUME
	if req.GetAfter() == nil {
		mode = kvcastv1.Accepted_MODE_EARLIEST
	}
	return c.run(func(ctx context.Context) error {
		if err := c.accept(mode); err != nil {
			return err
		}
		for c.seq < until {
			if err := c.next(ctx, until); err != nil {
				return err
			}
		}
		if c.out.prev == until {
			return nil
		}
		// The filter excludes the last entries, so no message has the position at until yet.
		return c.out.sendPositioned(&kvcastv1.SubscribeResponse{}, until)
	})
}

// replayRange returns the seq before the first entry of a replay and the seq of the last entry.
func replayRange(req *kvcastv1.ReplayRequest, b journal.Bounds) (after, until uint64, err error) {
	after, until = b.Oldest-1, b.Newest
	if p := req.GetAfter(); p != nil {
		if err := checkPosition(p, b); err != nil {
			return 0, 0, err
		}
		after = p.GetSeq()
	}
	p := req.GetUntil()
	if p == nil {
		return after, until, nil
	}
	until = p.GetSeq()
	err = checkPosition(p, b)
	if req.GetAfter() != nil && until < after && !callerror.Has(err, callerror.EpochMismatch) {
		err = callerror.InvalidField(b, "until", "%d is not allowed: want %d (after) to %d (the newest)", until, after, b.Newest)
	}
	return after, until, err
}

// follow sends the entries after the cursor until the client ends the call, the connection reaches its maximum
// age, or the server shuts down and all entries are sent.
func (c *cursor) follow(ctx context.Context) (err error) {
	s, j := c.server, c.server.journal
	idle := time.NewTimer(c.progressDelay())
	defer idle.Stop()
	var aged <-chan time.Time // nil: never
	if timer := s.connectionAgeTimer(ctx); timer != nil {
		defer timer.Stop()
		aged = timer.C
	}
	var due *digests // to be sent when the cursor reaches their seq
	hasCaughtUp := false
	for {
		if due != nil && c.seq >= due.seq {
			if c.seq == due.seq {
				if err := c.sendDigests(due.workers); err != nil {
					return err
				}
			} else {
				c.intervals = 0 // a snapshot has moved the cursor beyond
			}
			due = nil
			idle.Reset(c.progressDelay())
		}
		draining := false // if draining is true before a read that returns no entry, all entries are sent
		select {
		case <-s.streams.draining:
			draining = true
		default:
		}
		before, prev := c.seq, c.out.prev
		c.subscription.seq.Store(c.seq)
		c.out.newest = j.Bounds().Newest
		until := uint64(0) // the newest
		if due != nil {
			until = due.seq
		}
		if err := c.next(ctx, until); err != nil {
			return err
		}
		if c.out.prev != prev && !c.digests {
			idle.Reset(c.progressDelay())
		}
		if c.seq != before {
			// Progress may be due between entries: the filter may have excluded all of them, and digests are
			// sent even while the stream is not idle.
			select {
			case <-aged:
				return callerror.AgeReached(j.Bounds())
			case <-idle.C:
				if due, err = c.progress(idle); err != nil {
					return err
				}
			default:
			}
			continue
		}
		if draining {
			return callerror.Draining(j.Bounds())
		}
		isBehind, outdated := s.outdated.get()
		if isBehind {
			return outdatedError(j.Bounds())
		}
		changed := j.Changed()
		if j.Bounds().Newest != c.seq { // an entry was appended before the call of Changed
			continue
		}
		if !hasCaughtUp && c.out.prev != c.seq { // the filter has excluded the last entries: the client does not know that it is up to date
			hasCaughtUp = true
			if due, err = c.progress(idle); err != nil {
				return err
			}
			continue
		}
		hasCaughtUp = true
		select {
		case <-changed:
		case <-s.streams.draining:
		case <-outdated:
		case <-aged:
			return callerror.AgeReached(j.Bounds())
		case <-idle.C:
			if due, err = c.progress(idle); err != nil {
				return err
			}
		case <-ctx.Done():
			return ctx.Err()
		}
	}
}

// progressDelay returns the time until the next Progress. Jitter spreads the messages to many subscribers.
func (c *cursor) progressDelay() time.Duration {
	p := c.server.cfg.ProgressInterval
	return p - time.Duration(rand.Int64N(int64(p)/5+1))
}

// digestIntervals is the number of progress intervals from one Progress with digests to the next: they are larger.
const digestIntervals = 10

// progress sends Progress, or returns the digests to send later if the client requested digests, and they are due.
func (c *cursor) progress(idle *time.Timer) (*digests, error) {
	if c.digests {
		if c.intervals++; c.intervals%digestIntervals == 1 {
			return c.readDigests(), nil
		}
	}
	idle.Reset(c.progressDelay())
	return nil, c.sendProgress(nil)
}

// sendProgress sends Progress, unless the server is outdated: the client would believe that it is up to date.
func (c *cursor) sendProgress(workers []*kvcastv1.WorkerDigest) error {
	if is, _ := c.server.outdated.get(); is {
		return outdatedError(c.server.journal.Bounds())
	}
	c.server.metrics.progress.Inc()
	return c.out.sendPositioned(&kvcastv1.SubscribeResponse{Progress: &kvcastv1.Progress{Workers: workers}}, c.seq)
}

// sendHeartbeat sends Progress without a position.
func (c *cursor) sendHeartbeat() error {
	c.server.metrics.progress.Inc()
	return c.out.sendUnpositioned(&kvcastv1.SubscribeResponse{Progress: &kvcastv1.Progress{}})
}

// digests are the workers' digests at a seq.
type digests struct {
	seq     uint64
	workers []*kvcastv1.WorkerDigest
}

// readDigests returns the digests of all workers at one seq, which is at or after the cursor.
func (c *cursor) readDigests() *digests {
	workers, seq := c.server.index.Workers(c.filter.worker)
	out := &digests{seq: seq}
	for i := range workers {
		out.workers = appendDigests(out.workers, &workers[i], c.filter.tiers)
	}
	return out
}

// appendDigests appends a digest for each selected tier of each rank that has had blocks; for a rank without, a digest
// of the first selected tier. A worker without ranks has a digest of rank 0.
func appendDigests(to []*kvcastv1.WorkerDigest, w *index.Worker, tiers kvblock.Tiers) []*kvcastv1.WorkerDigest {
	ranks := w.Ranks
	if len(ranks) == 0 {
		ranks = make([]index.Rank, 1)
	}
	selected := uint8(tiers >> 1) // without bit 0, which is for events without a tier
	for i := range ranks {
		r := &ranks[i]
		used := r.UsedTiers & selected
		if used == 0 {
			used = selected & -selected
		}
		for tier, d := range r.Blocks {
			if used&(1<<tier) != 0 {
				digest := &kvcastv1.WorkerDigest{
					Worker: w.Name, DpRank: r.Rank, Tier: kvcastv1.Tier(tier + 1), Blocks: d.Blocks, Digest: d.XOR, Seq: w.LastSeq,
				}
				if tier < len(r.GroupBlocks) {
					digest.GroupBlocks, digest.GroupDigest = &r.GroupBlocks[tier].Blocks, r.GroupBlocks[tier].XOR
				}
				to = append(to, digest)
			}
		}
	}
	return to
}

// sendDigests sends the digests in one Progress, or in several if they exceed the size of a response. All digests
// of a worker are in one message.
func (c *cursor) sendDigests(workers []*kvcastv1.WorkerDigest) error {
	first, bytes := 0, 0
	for i, d := range workers {
		size := proto.Size(d) + 4 // tag and length
		sameWorker := i > first && d.GetWorker() == workers[i-1].GetWorker()
		if i > first && !sameWorker && bytes+size > c.server.cfg.ResponseBytes {
			if err := c.sendProgress(workers[first:i]); err != nil {
				return err
			}
			first, bytes = i, 0
		}
		bytes += size
	}
	return c.sendProgress(workers[first:])
}
