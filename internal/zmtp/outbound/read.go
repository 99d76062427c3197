package outbound

import (
	"context"
	"errors"
	"net"
	"os"
	"sync"
	"time"

	"github.com/kvcast/kvcast/internal/zmtp"
)

// acceptRetry is the wait after an error of a listener, such as of missing descriptors.
const acceptRetry = 100 * time.Millisecond

// Accept calls serve with each connection of a listener, in a goroutine, until ctx ends, which closes the listener. It returns when all
// calls have returned.
func Accept(ctx context.Context, l net.Listener, serve func(net.Conn)) {
	var serving sync.WaitGroup
	defer serving.Wait()
	stop := context.AfterFunc(ctx, func() { _ = l.Close() })
	defer stop()
	for {
		c, err := l.Accept()
		switch {
		case err == nil:
			serving.Go(func() { serve(c) })
		case ctx.Err() != nil:
			return
		default:
			Wait(ctx, acceptRetry)
		}
	}
}

// Wait waits for a time, or until ctx ends.
func Wait(ctx context.Context, d time.Duration) {
	timer := time.NewTimer(d)
	defer timer.Stop()
	select {
	case <-timer.C:
	case <-ctx.Done():
	}
}

// Read calls on with each event of a connection, until the connection fails, the session refuses what the peer sends, or on returns an
// error. write writes what the session sends; messages may be written between its calls.
func Read(c net.Conn, s *zmtp.Session, write func([]byte) error, on func(*zmtp.Event) error) error {
	var event zmtp.Event
	buffer, have := make([]byte, 512), 0
	for {
		if err := write(s.Out()); err != nil {
			return err
		}
		s.Sent(time.Now())
		if err := c.SetReadDeadline(s.Deadline()); err != nil {
			return err
		}
		got, err := c.Read(buffer[have:])
		if errors.Is(err, os.ErrDeadlineExceeded) {
			if err := s.Tick(time.Now()); err != nil {
				return err
			}
			continue
		}
		if err != nil {
			return err
		}
		have += got
		used := 0
		for {
			n, err := s.Next(time.Now(), buffer[used:have], &event)
			if err != nil {
				return err
			}
			if event.Kind == zmtp.Incomplete {
				break
			}
			if err := write(s.Out()); err != nil { // READY, before messages
				return err
			}
			if err := on(&event); err != nil {
				return err
			}
			used += n
		}
		need := s.Need(buffer[used:have])
		have = copy(buffer, buffer[used:have])
		if need > len(buffer) {
			buffer = append(buffer[:have], make([]byte, need-have)...)
		}
	}
}
