package serve

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"net"
	"net/http"
	"time"

	"golang.org/x/sync/errgroup"

	"github.com/kvcast/kvcast/cmd/kvcast/internal/config"
	ingestconfig "github.com/kvcast/kvcast/ingest/config"
	"github.com/kvcast/kvcast/internal/adapter/dynamo"
	"github.com/kvcast/kvcast/internal/adapter/sglang"
	"github.com/kvcast/kvcast/internal/adapter/smg"
	"github.com/kvcast/kvcast/internal/adapter/vllm"
	kvindexerv1 "github.com/kvcast/kvcast/internal/peer/kv_indexer/v1"
)

// egress is what serves routers that do not use kvcast's API.
type egress struct {
	dynamo     *http.Server // nil: none
	dynamoPort net.Listener
	zmq        *vllm.Egress    // nil: none
	smg        *smg.Service    // nil: none
	running    context.Context // of zmq and smg
	stop       context.CancelFunc
}

// openEgress creates the parts of egress, and opens their ports.
func (s *Service) openEgress(ctx context.Context) (err error) {
	s.egress.running, s.egress.stop = context.WithCancel(context.WithoutCancel(ctx))
	if c := &s.cfg.Egress.ZMQ; c.Enabled() {
		firstSeq := uint64(0)
		if c.FirstSeq != config.FirstSeqZero {
			firstSeq = vllm.TimeSeq(time.Now())
		}
		s.egress.zmq, err = vllm.New(ctx, vllm.Config{
			Endpoints: endpoints(c), Topic: c.Topic, ArrayEvents: c.Events == config.EventArrays, FirstSeq: firstSeq,
			HistoryBatches: c.HistoryBatches, HistoryBytes: c.HistoryBytes, StateBytes: c.StateBytes, MaxConsumers: c.MaxConsumers,
			Logger: s.log, Registerer: s.registry,
		}, s.follower, s.follower.Index())
		if err != nil {
			return err
		}
	}
	s.openSMG()
	s.openSGLang()
	c := &s.cfg.Egress.Dynamo
	if c.Listen == "" {
		return nil
	}
	ids := make(map[string]uint64, len(c.WorkerIDs))
	for _, w := range c.WorkerIDs {
		ids[w.Worker] = w.ID
	}
	s.egress.dynamo = dynamo.NewServer(dynamo.Config{
		WorkerIDs: ids, WorkerIDLabel: c.WorkerIDLabel, GroupLabel: c.GroupLabel,
		Ready: s.server.Unready, Authorize: s.server.AuthorizeHTTP, Logger: s.log, Registerer: s.registry,
	}, s.follower.Index())
	s.egress.dynamoPort, err = listen(ctx, "--egress-dynamo-listen", c.Listen)
	return err
}

// openSMG adds SubscribeKvEvents to the gRPC port.
func (s *Service) openSMG() {
	c := &s.cfg.Egress.SMG
	if !c.Enabled {
		return
	}
	workers := make(map[string]string, len(c.Workers))
	for _, a := range c.Workers {
		workers[a.Authority] = a.Worker
	}
	s.egress.smg = smg.New(smg.Config{
		Workers: workers, HistoryBytes: c.HistoryBytes, StateBytes: c.StateBytes, MaxSubscribers: c.MaxSubscribers,
		StallTimeout: s.cfg.Server.StallTimeout, Logger: s.log, Registerer: s.registry,
	}, s.follower, s.follower.Index())
	for _, d := range smg.Descriptions() {
		s.server.RegisterAdapter(d, s.egress.smg)
	}
}

// openSGLang adds MatchExternalKvPrefix to the gRPC port.
func (s *Service) openSGLang() {
	c := &s.cfg.Egress.SGLang
	if !c.Enabled {
		return
	}
	addresses := make(map[string]string, len(c.Workers))
	for _, a := range c.Workers {
		addresses[a.Worker] = a.Address
	}
	s.server.RegisterAdapter(&kvindexerv1.KVIndexer_ServiceDesc, sglang.New(sglang.Config{
		Address: c.Address, Addresses: addresses, Acquire: s.server.AcquireMatch, Ready: s.server.Unready, Logger: s.log,
	}, s.follower.Index()))
}

func endpoints(c *config.ZMQ) (all []vllm.EndpointConfig) {
	if c.Bind != "" {
		all = append(all, vllm.EndpointConfig{Bind: c.Bind})
	}
	for _, consumer := range c.Connect {
		all = append(all, vllm.EndpointConfig{Connect: consumer})
	}
	for _, p := range c.Publishers {
		bind, _ := ingestconfig.ParseEndpoint(p.Bind, true)
		replay, hasReplay := ingestconfig.ParseEndpoint(p.Replay, true)
		for i := range p.DPSize {
			e := vllm.EndpointConfig{Worker: p.Worker, Rank: uint32(p.FirstRank + i), Bind: bind.OfRank(i).String()}
			if hasReplay {
				e.Replay = replay.OfRank(i).String()
			}
			all = append(all, e)
		}
	}
	return all
}

// closeEgress closes what openEgress has opened, if it is not served.
func (s *Service) closeEgress() error {
	err := closePort(s.egress.dynamoPort)
	if s.egress.zmq != nil {
		err = errors.Join(err, s.egress.zmq.Close())
	}
	return err
}

// runEgress runs a part when the engines have been read, or stops it if closePorts is called before. It ends when closePorts is called.
func (s *Service) runEgress(run func(context.Context) error, stop func() error) error {
	select {
	case <-s.serving:
		return run(s.egress.running)
	case <-s.egress.running.Done():
		return stop()
	}
}

// stopSMG ends the streams of SubscribeKvEvents, for which the gRPC port would wait.
func (s *Service) stopSMG() {
	if s.egress.smg != nil {
		s.egress.smg.Stop()
	}
}

func (s *Service) serveDynamo() error {
	port := dynamo.LimitConnections(s.egress.dynamoPort, s.registry)
	if c := s.credentials.forHTTP(); c != nil {
		port = tls.NewListener(port, c)
	}
	if err := s.egress.dynamo.Serve(port); !errors.Is(err, http.ErrServerClosed) {
		return fmt.Errorf("serve the port for Dynamo: %w", err)
	}
	return nil
}

// servePorts serves the admin port and egress until closePorts is called or one of them fails.
func (s *Service) servePorts() error {
	var ports errgroup.Group
	serve := func(exists bool, serve func() error) {
		if !exists {
			return
		}
		ports.Go(func() error {
			defer s.closePorts()
			return serve()
		})
	}
	serve(s.adminPort != nil, s.serveAdmin)
	serve(s.egress.dynamo != nil, s.serveDynamo)
	serve(s.egress.zmq != nil, func() error { return s.runEgress(s.egress.zmq.Run, s.egress.zmq.Close) })
	serve(s.egress.smg != nil, func() error { return s.runEgress(s.egress.smg.Run, func() error { return nil }) })
	return ports.Wait()
}

// closePorts closes what servePorts serves.
func (s *Service) closePorts() {
	_ = s.admin.Close() // the errors are of ports that are closed already
	if s.egress.dynamo != nil {
		_ = s.egress.dynamo.Close()
	}
	s.egress.stop()
}

// logEgress logs where egress is served.
func (s *Service) logEgress() {
	if s.egress.dynamoPort != nil {
		s.log.Info("serving", "dynamo", s.egress.dynamoPort.Addr().String())
	}
	if s.egress.zmq == nil {
		return
	}
	for _, e := range s.egress.zmq.Bound() {
		s.log.Info("publishing", "endpoint", e.Bind, "consumer", e.Connect, "replay", e.Replay, "worker", e.Worker, "rank", e.Rank)
	}
}
