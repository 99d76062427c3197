package enginegrpc

import (
	"errors"
	"net"
	"net/netip"
	"sync"
	"sync/atomic"

	"github.com/kvcast/kvcast/internal/transport"
	"github.com/kvcast/kvcast/internal/transport/ledger"
)

const (
	// freeBytes is how much of a response is read before there is memory for it: all of most responses, so that calls rarely
	// have to wait, and more than gRPC reads of the next response meanwhile.
	freeBytes = 2 * windowBytes
	// maxGrowth is how many times larger than a response a payload can be: an event without blocks takes 4 bytes in a response,
	// and a store of one block without tokens 6 bytes.
	maxGrowth = 32
	// messageBytes is the memory of a message without its payload, approximately.
	messageBytes = 512
)

// errEvicted is why a connection was closed to free memory.
var errEvicted = errors.New("responses of all engines exceed their memory, and this one's is not complete")

// claimBytes returns the memory of a response of n bytes and of its payload. While a response is received, gRPC has it twice, which
// is not more.
func claimBytes(n int) int64 {
	return messageBytes + int64(n) + min(maxGrowth*int64(n), transport.MaxPayloadBytes)
}

// conn is the connection of a call. Of each response it reads freeBytes, and what follows once the Transport has memory for the
// largest response: gRPC does not expose the size of a response before all of it was read.
type conn struct {
	net.Conn
	transport *Transport
	address   netip.Prefix // of the peer
	closed    chan struct{}
	evicted   atomic.Bool

	mu   sync.Mutex // guards all below; locked before the ledger's
	read int        // bytes since the last response, with the frames of HTTP/2
	// claim is for the response that is being received; nil for none.
	claim    *ledger.Claim
	isClosed bool
}

func (c *conn) Read(b []byte) (int, error) {
	if claim := c.claimRest(); claim != nil && !await(claim, c.closed) {
		return 0, net.ErrClosed
	}
	n, err := c.Conn.Read(b)
	if c.evicted.Load() {
		return 0, errEvicted
	}
	c.mu.Lock()
	if c.read += n; c.claim != nil {
		c.claim.Arrived(c.read)
	}
	c.mu.Unlock()
	return n, err
}

// claimRest returns the claim for the rest of the response; nil if it needs none yet.
func (c *conn) claimRest() *ledger.Claim {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.claim == nil && c.read >= freeBytes && !c.isClosed {
		c.claim = ledger.NewClaim(c.address, claimBytes(transport.MaxPayloadBytes), c.evict)
		c.transport.memory.Request(c.claim)
	}
	return c.claim
}

// evict closes the connection, and gRPC closes it again, which releases the claim. It is called with the ledger's mutex locked.
func (c *conn) evict() bool {
	c.evicted.Store(true)
	_ = c.Conn.Close()
	return true
}

// answered counts what was read as that of a response that is not one of the call, unless such a response has claimed memory.
func (c *conn) answered() {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.claim == nil {
		c.read = 0
	}
}

// takeClaim returns the claim of a response of n bytes that has arrived. The caller must release it.
func (c *conn) takeClaim(n int) *ledger.Claim {
	c.mu.Lock()
	defer c.mu.Unlock()
	claim := c.claim
	c.claim, c.read = nil, 0
	if claim == nil {
		claim = ledger.NewClaim(c.address, claimBytes(n), nil)
		c.transport.memory.Request(claim)
	}
	return claim
}

func (c *conn) Close() error {
	c.mu.Lock()
	if !c.isClosed {
		c.isClosed = true
		close(c.closed)
	}
	if c.claim != nil {
		c.transport.memory.Release(c.claim)
		c.claim = nil
	}
	c.mu.Unlock()
	return c.Conn.Close()
}
