package server

import (
	"context"
	"math/rand/v2"
	"time"

	"google.golang.org/grpc/keepalive"
)

// connectionAge is how old connections may grow. A client stays with its server
// for as long as its connection lives; where servers come and go behind a load
// balancer, it has to choose anew at times.
//
// gRPC asks a client to leave (GOAWAY), and when a grace is over closes the
// connection beneath its calls, which looks like a broken network. So Subscribe
// streams end by themselves in between, and say why. Counted from the beginning
// of a connection:
//
//	0.9 to 1.1 max                   GOAWAY: new calls use another connection
//	1.1 max + 0.25 to 1 grace        Subscribe streams end, not all at once
//	1 grace after that, at least     the connection is closed, whatever is on it
//
// A stream must not end before the GOAWAY: its client would come back over the
// same connection. gRPC counts from the end of the handshake, and streams from
// its beginning, which a quarter of the grace makes up for.
type connectionAge struct {
	max   time.Duration // 0: they may grow to any age
	grace time.Duration
}

// keepalive has gRPC do its part.
func (a connectionAge) keepalive(p keepalive.ServerParameters) keepalive.ServerParameters {
	if a.max > 0 {
		p.MaxConnectionAge = a.max
		// Its grace begins with the GOAWAY, which may be early.
		p.MaxConnectionAgeGrace = a.max/5 + 2*a.grace
	}
	return p
}

// over returns a timer for the time when a Subscribe stream is to end, or nil.
func (a connectionAge) over(ctx context.Context) *time.Timer {
	opened, ok := openedAt(ctx)
	if a.max == 0 || !ok {
		return nil
	}
	end := opened.Add(a.max + a.max/10 + a.grace/4 + rand.N(a.grace*3/4+1))
	return time.NewTimer(time.Until(end))
}
