package budget

import (
	"net/netip"
	"sync"
)

// leftShare is how many times of what is left of a budget one address may use.
const leftShare = 7

// Parts are the parts of a budget that addresses use. Each may use seven times of what it leaves to all others: one alone seven eighths, and
// four 28 of 29 together. So there is room for an address that uses little. (These are the dynamic thresholds of Choudhury and Hahne, 1998, for
// the buffers of switches.) It is safe for concurrent use.
type Parts struct {
	total *Budget

	mu    sync.Mutex // guards parts
	parts map[netip.Prefix]*part
}

// part is the part of an address.
type part struct {
	Budget
	users int
}

// NewParts returns the parts of a budget.
func NewParts(total *Budget) *Parts { return &Parts{total: total, parts: make(map[netip.Prefix]*part)} }

// Open returns the part of a peer's address, which is a Budget that also reserves in the whole budget, until Close is called as often. Without
// a valid address it is the whole budget.
func (p *Parts) Open(peer netip.Addr) *Budget {
	if !peer.IsValid() || p.total == nil {
		return p.total
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	address := AddressOf(peer)
	of := p.parts[address]
	if of == nil {
		of = &part{Budget: Budget{whole: p.total}}
		p.parts[address] = of
	}
	of.users++
	return &of.Budget
}

// Close ends a use of the part of an address.
func (p *Parts) Close(peer netip.Addr) {
	if !peer.IsValid() || p.total == nil {
		return
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	address := AddressOf(peer)
	if of := p.parts[address]; of != nil {
		if of.users--; of.users == 0 {
			delete(p.parts, address)
		}
	}
}
