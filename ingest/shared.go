package ingest

import (
	"log/slog"
	"math/rand/v2"
	"sync"
	"time"

	"github.com/kvcast/kvcast/ingest/wire"
	"github.com/kvcast/kvcast/internal/zmqio"
)

// turnMessages is how many messages of a socket are read before its worker's lock
// is let go.
const turnMessages = 64

// shared is what all workers of an Ingest have in common.
type shared struct {
	sink    Sink
	sockets sockets
	replays *replays
	roster  *roster
	board   board
	budget  budget
	metrics *metrics
	intakes sync.Pool
	silence time.Duration // 0: it is no sign of anything
	grace   time.Duration
	log     *slog.Logger
}

// intake is what reading takes beside a socket. One goroutine has it for a turn;
// nothing of it leaves that goroutine.
type intake struct {
	decoder wire.Decoder
	counts  wire.Counts
	out     Batch
	batch   *zmqio.Batch
}

func newIntake() *intake { return &intake{batch: zmqio.NewBatch(turnMessages)} }

func (s *shared) intake() *intake {
	if in, ok := s.intakes.Get().(*intake); ok {
		return in
	}
	return newIntake()
}

func (s *shared) giveBack(in *intake) {
	in.batch.Release()
	s.intakes.Put(in)
}

// jitter returns a wait that is up to a fifth longer, so that many that began
// together do not stay together.
func jitter(wait time.Duration) time.Duration {
	return wait + time.Duration(rand.Int64N(int64(wait)/5+1))
}
