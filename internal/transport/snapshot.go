package transport

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"os"
	"time"

	"golang.org/x/sync/semaphore"
)

const (
	// maxSnapshots is how many snapshots are received at a time.
	maxSnapshots = 4
	// MaxWorkerSnapshots is how many snapshots of one worker are received at a time, so that the slow snapshots of one engine
	// leave slots for the others.
	MaxWorkerSnapshots = maxSnapshots / 2
	// firstSnapshotReply is how many times longer the beginning of a snapshot may take than a reply of a replay
	// socket: the engine makes the snapshot first.
	firstSnapshotReply = 3
	// maxSnapshotTime bounds a snapshot from its request to its end, without the time that its frames take to be applied.
	maxSnapshotTime = time.Minute
	// MaxSnapshotBytes bounds the frames of a snapshot together: as many as an engine sends by default.
	MaxSnapshotBytes = 256 << 20
	// snapshotFrameBytes is what a frame counts for beside its bytes, so that empty frames are bounded too.
	snapshotFrameBytes = 64
)

// Errors of Requests.Snapshot.
var (
	// ErrSnapshotTooLarge means that a snapshot has more than MaxSnapshotBytes.
	ErrSnapshotTooLarge = errors.New("snapshot is too large")
	// ErrSnapshotTooSlow means that the engine took longer than a minute to send a snapshot.
	ErrSnapshotTooSlow = errors.New("snapshot takes too long")
)

// SnapshotRequest is a request for a snapshot of an engine's cache.
type SnapshotRequest struct {
	Endpoint string
	// Frames are the frames of the request.
	Frames [][]byte
	// Worker has a slot for each of the MaxWorkerSnapshots of a worker; nil for no bound of its own.
	Worker *semaphore.Weighted
	// Waited and Sent are those of Request.
	Waited func(time.Duration)
	Sent   func()
}

// Snapshot sends a request for a snapshot, and calls each with every frame of the replies, as they arrive, until each reports that it is
// done, or returns an error. more reports whether the frame's message has further ones. The frames are received one by one, so that the
// memory does not depend on the size of the snapshot. Its bytes and its time are bounded.
func (r *Requests) Snapshot(ctx context.Context, q SnapshotRequest, each func(frame []byte, more bool) (done bool, err error)) error {
	x := &exchange{Requests: r, Request: Request{Endpoint: q.Endpoint, Waited: q.Waited, Sent: q.Sent}}
	release, err := x.acquireSnapshot(ctx, cmp.Or(q.Worker, semaphore.NewWeighted(1)))
	if err != nil {
		return err
	}
	defer release()
	return x.send(ctx, "request snapshot", func(address string) (Receiver, error) {
		return r.Frames.RequestFrames(address, q.Frames...)
	}, func(receiver Receiver) error { return x.runSnapshot(ctx, receiver, each) })
}

// acquireSnapshot waits for a slot of the worker, and then for one of all workers, so that no more requests of a worker
// wait for those than may have one. It returns ErrReplayBusy if both are not free in time.
func (x *exchange) acquireSnapshot(ctx context.Context, worker *semaphore.Weighted) (release func(), err error) {
	until := time.Now().Add(slotPatience)
	if !worker.TryAcquire(1) {
		if err := x.wait(ctx, slotPatience, func(ctx context.Context) error { return worker.Acquire(ctx, 1) }); err != nil {
			return nil, err
		}
	}
	if err := x.acquire(ctx, x.snapshots, time.Until(until)); err != nil {
		worker.Release(1)
		return nil, err
	}
	return func() { x.release(); worker.Release(1) }, nil
}

var errSnapshotTime = fmt.Errorf("%w: not complete within %v", ErrSnapshotTooSlow, maxSnapshotTime)

// runSnapshot reads the frames.
func (x *exchange) runSnapshot(ctx context.Context, r Receiver, each func([]byte, bool) (bool, error)) error {
	stop := context.AfterFunc(ctx, r.Interrupt)
	defer stop()
	end := time.Now().Add(maxSnapshotTime)
	silence := firstSnapshotReply * x.timeout
	left := x.SnapshotBytes
	for {
		until := time.Now().Add(silence)
		if until.After(end) {
			until = end
		}
		if time.Until(end) <= 0 {
			return errSnapshotTime
		}
		c, err := r.Next(func() time.Time { return until })
		switch {
		case errors.Is(err, ErrEnded):
			return ErrReplayRefused
		case errors.Is(err, os.ErrDeadlineExceeded) && !until.Before(end):
			return errSnapshotTime
		case errors.Is(err, os.ErrDeadlineExceeded):
			return fmt.Errorf("%w for %v", ErrReplaySilent, silence)
		case err != nil:
			return err
		}
		done := false
		for i := 0; i < len(c.Messages) && !done && err == nil; i++ {
			m := &c.Messages[i]
			silence = x.timeout
			if left -= int64(m.Bytes()) + snapshotFrameBytes; left < 0 {
				err = fmt.Errorf("%w: more than %d bytes", ErrSnapshotTooLarge, x.SnapshotBytes)
				break
			}
			began := time.Now()
			done, err = each(m.Frames[0], m.More)
			end = end.Add(time.Since(began)) // the engine may wait for kvcast
		}
		for _, e := range c.Events {
			if e.Kind != Connected && err == nil && !done {
				err = e.Err // why the connection ended; ErrEnded follows if that is unknown
			}
		}
		r.Recycle(c)
		if done || err != nil {
			return err
		}
	}
}
