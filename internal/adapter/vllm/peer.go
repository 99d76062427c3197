package vllm

import (
	"net"
	"net/netip"
	"sync"

	"golang.org/x/sync/semaphore"

	"github.com/kvcast/kvcast/internal/budget"
)

// peerShare is the part of the connections that one address may use: 1 of peerShare.
const peerShare = 4

// peers are the addresses of consumers that have connections. An address has a part of each limit only, so that others are
// served while it uses up its part.
type peers struct {
	most       int   // connections of an address
	stateBytes int64 // Config.StateBytes

	mu  sync.Mutex // guards all below, and peer.connections
	all map[netip.Prefix]*peer
}

// peer is an address of consumers.
type peer struct {
	connections int
	states      *semaphore.Weighted // that are being built
	memory      *budget.Budget      // of states
}

// newPeer returns an address that may use half of the memory for states.
func newPeer(stateBytes int64) *peer {
	return &peer{states: semaphore.NewWeighted(1), memory: budget.New("", stateBytes/2)}
}

func newPeers(connections int, stateBytes int64) *peers {
	return &peers{most: max(1, connections/peerShare), stateBytes: stateBytes, all: make(map[netip.Prefix]*peer)}
}

// add counts a connection and returns its peer, unless the address has too many.
func (p *peers) add(address net.Addr) (_ *peer, ok bool) {
	p.mu.Lock()
	defer p.mu.Unlock()
	key := budget.PeerOf(address)
	found := p.all[key]
	if found == nil {
		found = newPeer(p.stateBytes)
		p.all[key] = found
	}
	if found.connections >= p.most {
		return nil, false
	}
	found.connections++
	return found, true
}

// remove ends a connection that add has counted.
func (p *peers) remove(address net.Addr) {
	p.mu.Lock()
	defer p.mu.Unlock()
	key := budget.PeerOf(address)
	if p.all[key].connections--; p.all[key].connections == 0 {
		delete(p.all, key)
	}
}
