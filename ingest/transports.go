package ingest

import (
	"errors"
	"net/netip"
	"time"

	"github.com/kvcast/kvcast/ingest/config"
	"github.com/kvcast/kvcast/ingest/transport"
	"github.com/kvcast/kvcast/ingest/transport/native"
	"github.com/kvcast/kvcast/internal/zmtp"
)

// maxReadBytes bounds the received messages that wait to be processed, of each listener and of all
// sources, with package native.
const maxReadBytes = 16 << 20

// openTransports opens the transports that the config names.
func (s *shared) openTransports() error {
	open := make(map[config.ZMQ]transport.Transport)
	for _, z := range []struct {
		implementation config.ZMQ
		used           *transport.Transport
	}{{s.config.ConnectZMQ, &s.connecting}, {s.config.ListenZMQ, &s.listening}} {
		t := open[z.implementation]
		if t == nil {
			var err error
			if t, err = s.openTransport(z.implementation); err != nil {
				return err
			}
			open[z.implementation] = t
			s.transports = append(s.transports, t)
		}
		*z.used = t
	}
	return nil
}

func (s *shared) openTransport(z config.ZMQ) (transport.Transport, error) {
	if z == config.ZMQLib {
		return newLibzmq(config.MaxSockets, s.budgets.received)
	}
	return native.New(native.Config{
		Connections: s.config.MaxConnections, PerAddress: s.config.MaxConnectionsPerAddress,
		ReadBytes: min(s.config.ReceiveBufferBytes, maxReadBytes), OnReject: s.reject,
	}), nil
}

func (s *shared) closeTransports() error {
	var errs []error
	for _, t := range s.transports {
		errs = append(errs, t.Close())
	}
	return errors.Join(errs...)
}

// reject counts and logs the rejection of a peer that has connected to a listener.
func (s *shared) reject(peer netip.Addr, err *zmtp.Error) {
	s.metrics.peersRejected.WithLabelValues(string(err.Reason)).Inc()
	s.rejections.Lock()
	defer s.rejections.Unlock()
	if n, ok := s.rejections.limiter.allow(logPeer, time.Now()); ok {
		s.config.Logger.Warn("peer disconnected", "peer", peer, "reason", string(err.Reason), "error", err, "suppressed", n)
	}
}
