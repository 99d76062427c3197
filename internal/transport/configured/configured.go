// Package configured opens the transports that a config names, from the implementations of package transport in this build.
package configured

import (
	"errors"
	"net/netip"
	"time"

	"github.com/kvcast/kvcast/ingest/config"
	"github.com/kvcast/kvcast/internal/budget"
	"github.com/kvcast/kvcast/internal/transport"
	"github.com/kvcast/kvcast/internal/transport/enginegrpc"
	"github.com/kvcast/kvcast/internal/transport/native"
	"github.com/kvcast/kvcast/internal/zmtp"
)

// maxReadBytes bounds the received messages that wait to be processed, of each listener and of all sources, with package native.
const maxReadBytes = 16 << 20

// maxSnapshotReadBytes bounds the memory of the frames of all snapshots that are being received, beside that of
// frames of more than 32 KiB: native.Config.LargeBytes.
const maxSnapshotReadBytes = 2 << 20

// maxCallBytes bounds the responses of all engines that are read by gRPC, and their messages that wait to be processed.
const maxCallBytes = 64 << 20

// Transports are the transports of a config.
type Transports struct {
	// Connecting is the transport of workers, and Listening that of listeners. They may be the same, unless they are native: peers that connect to
	// a listener then have no part in the memory of messages of workers.
	Connecting, Listening transport.Transport
	// Replaying is the transport of the replay sockets that peers of listeners name.
	Replaying transport.Transport
	// Snapshots requests snapshots. It is native, because libzmq receives whole messages only.
	Snapshots transport.FrameRequester
	// calls is the transport of workers that are read by gRPC.
	calls *enginegrpc.Transport
}

// Open opens the transports of a config that has defaults and is valid. received bounds the bytes that
// wait in the receivers of package libzmq. onReject is called for each peer that package native
// disconnects from a listener. delay returns how late goroutines run at present: peers of a machine that is as busy may be slower. The caller
// must close the Transports, after all their sockets.
func Open(c config.Config, received *budget.Budget, delay func() time.Duration, onReject func(peer netip.Addr, err *zmtp.Error)) (*Transports, error) {
	grace := func() time.Duration { return native.DefaultGrace + transport.DelayFactor*delay() }
	open := func(z config.ZMQ) (transport.Transport, error) {
		if z == config.ZMQLib {
			return newLibzmq(config.MaxSockets, received)
		}
		return native.New(native.Config{
			Connections: c.MaxConnections, PerAddress: c.MaxConnectionsPerAddress,
			ReadBytes: min(c.ReceiveBufferBytes, maxReadBytes), PeerTTL: c.PeerTTL, OnReject: onReject, Grace: grace,
		}), nil
	}
	connecting, err := open(c.ConnectZMQ)
	if err != nil {
		return nil, err
	}
	t := &Transports{
		Connecting: connecting, Listening: connecting,
		Snapshots: native.New(native.Config{ReadBytes: min(c.ReceiveBufferBytes, maxSnapshotReadBytes), Grace: grace}),
		calls:     enginegrpc.New(enginegrpc.Config{Bytes: min(c.ReceiveBufferBytes, maxCallBytes)}),
	}
	if c.ListenZMQ != c.ConnectZMQ || c.ListenZMQ != config.ZMQLib {
		if t.Listening, err = open(c.ListenZMQ); err != nil {
			return nil, errors.Join(err, connecting.Close())
		}
	}
	if t.Replaying = connecting; c.ConnectZMQ != config.ZMQLib && c.ListenZMQ != config.ZMQLib {
		t.Replaying = t.Listening
	}
	return t, nil
}

// Subscribe reads one dp rank of a source: over ZeroMQ at the rank's endpoint, as transport.Transport.Subscribe does, or by gRPC.
// endpoint is the result of config.Resolve for that of s.
func (t *Transports) Subscribe(s enginegrpc.Subscription, endpoint, topic string, onDrop func(n int)) (transport.Receiver, error) {
	if e, ok := config.ParseSource(endpoint); ok && e.Called() {
		return t.calls.Subscribe(s)
	}
	return t.Connecting.Subscribe(endpoint, topic, onDrop)
}

// Close closes the transports.
func (t *Transports) Close() error {
	err := t.Connecting.Close()
	if t.Listening != t.Connecting {
		err = errors.Join(err, t.Listening.Close())
	}
	return err
}
