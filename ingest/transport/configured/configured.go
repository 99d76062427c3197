// Package configured opens the transports that a config names, from the implementations of package
// transport in this build.
package configured

import (
	"errors"
	"net/netip"

	"github.com/kvcast/kvcast/ingest/config"
	"github.com/kvcast/kvcast/ingest/transport"
	"github.com/kvcast/kvcast/ingest/transport/native"
	"github.com/kvcast/kvcast/internal/budget"
	"github.com/kvcast/kvcast/internal/zmtp"
)

// maxReadBytes bounds the received messages that wait to be processed, of each listener and of all
// sources, with package native.
const maxReadBytes = 16 << 20

// Transports are the transports of a config.
type Transports struct {
	// Connecting is the transport of workers, and Listening that of listeners. They may be the same.
	Connecting, Listening transport.Transport
}

// Open opens the transports of a config that has defaults and is valid. received bounds the bytes that
// wait in the receivers of package libzmq. onReject is called for each peer that package native
// disconnects from a listener. The caller must close the Transports, after all their sockets.
func Open(c config.Config, received *budget.Budget, onReject func(peer netip.Addr, err *zmtp.Error)) (*Transports, error) {
	open := func(z config.ZMQ) (transport.Transport, error) {
		if z == config.ZMQLib {
			return newLibzmq(config.MaxSockets, received)
		}
		return native.New(native.Config{
			Connections: c.MaxConnections, PerAddress: c.MaxConnectionsPerAddress,
			ReadBytes: min(c.ReceiveBufferBytes, maxReadBytes), OnReject: onReject,
		}), nil
	}
	connecting, err := open(c.ConnectZMQ)
	if err != nil {
		return nil, err
	}
	t := &Transports{Connecting: connecting, Listening: connecting}
	if c.ListenZMQ != c.ConnectZMQ {
		if t.Listening, err = open(c.ListenZMQ); err != nil {
			return nil, errors.Join(err, connecting.Close())
		}
	}
	return t, nil
}

// Close closes the transports.
func (t *Transports) Close() error {
	err := t.Connecting.Close()
	if t.Listening != t.Connecting {
		err = errors.Join(err, t.Listening.Close())
	}
	return err
}
