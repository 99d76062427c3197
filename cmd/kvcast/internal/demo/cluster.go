package demo

import (
	"context"
	"errors"
	"fmt"
	"os"
	"slices"
	"strings"
	"time"

	nats "github.com/nats-io/nats-server/v2/server"
	"golang.org/x/sync/errgroup"
	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"

	"github.com/kvcast/kvcast/client"
	kvcastv1 "github.com/kvcast/kvcast/proto/kvcast/v1"
)

const (
	serverCount = 3
	// clusterEngines and clusterBatches are the number of engines, and of the batches of each: 17 s.
	clusterEngines, clusterBatches = 6, 1000
	// shareTimeout is how long the demo waits until the servers share the engines. They move engines to a new server when it
	// has run for twice the TTL of 3 s.
	shareTimeout = 10 * time.Second
	readersPoll  = 20 * time.Millisecond
)

// servers are the processes that share a stream.
type servers struct {
	addrs     []string
	processes []*process // nil: killed
	conns     []*grpc.ClientConn
}

// runCluster kills one of several servers that share a stream of a NATS server, and checks that the others read its engines,
// and that a router continues without a loss.
func (d *demo) runCluster(ctx context.Context) (err error) {
	d.heading("%d simulated engines publish their KV-cache events over ZeroMQ, and some messages are lost", clusterEngines)
	for i := range clusterEngines {
		if err := d.startEngine(ctx, i, clusterBatches); err != nil {
			return fmt.Errorf("start %s: %w", engineName(i), err)
		}
	}
	dir, err := os.MkdirTemp("", "kvcast-demo-")
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, os.RemoveAll(dir)) }()
	url, stopNATS, err := startNATS(dir)
	if err != nil {
		return err
	}
	defer stopNATS()
	ctx, cancel := context.WithTimeout(ctx, routeTimeout)
	defer cancel()
	s := &servers{}
	defer func() { err = errors.Join(err, s.kill()) }()
	if err := d.startServers(ctx, s, url); err != nil {
		return err
	}
	d.heading("the servers share the engines")
	readers, err := s.share(ctx)
	if err != nil {
		return err
	}
	d.printReaders(s, readers)
	victim := 0 // reads the most engines, and has the router
	for i, names := range readers {
		if len(names) > len(readers[victim]) {
			victim = i
		}
	}
	known := slices.Concat(s.addrs[victim:], s.addrs[:victim])
	c, err := client.New(strings.Join(known, ","), grpc.WithTransportCredentials(insecure.NewCredentials()))
	if err != nil {
		return err
	}
	router := newRouter(c)
	interruptions := 0
	router.interrupted = func(*client.Interruption) { interruptions++ }
	router.connect(ctx, client.FromEarliest())
	defer router.disconnect()
	d.heading("a router that knows all servers subscribes to server %d from the earliest entry: seq, time, worker, dp rank, event", victim+1)
	if err := router.receiveUntil(func() bool { return len(router.entries) >= disconnectAfter }, d.show()); err != nil {
		return err
	}

	at := router.at
	d.heading("kill -9 %d: server %d ends at once, with the router after position %s; the engines continue",
		s.processes[victim].cmd.Process.Pid, victim+1, at)
	err = s.processes[victim].kill()
	s.processes[victim] = nil
	if err != nil {
		return err
	}
	began := time.Now()
	if readers, err = s.await(ctx, func(r [][]string) bool { return count(r) == clusterEngines }); err != nil {
		return err
	}
	d.print("the others read all engines after %v\n", time.Since(began).Round(time.Millisecond))
	d.printReaders(s, readers)
	if err := router.receiveUntil(func() bool { return interruptions > 0 }, nil); err != nil { // what was sent before
		return err
	}
	received := len(router.entries)
	d.heading("the router has lost its connection after seq %d, and resumes at another server", router.at.Seq)
	if err := router.receiveUntil(func() bool { return len(router.entries) > received }, d.show()); err != nil {
		return err
	}

	d.heading("the engines finish, and report the contents of their caches")
	summaries, err := d.finish(ctx)
	if err != nil {
		return err
	}
	if err := router.receiveUntil(func() bool { return router.matches(summaries) == nil }, nil); err != nil {
		return errors.Join(err, router.matches(summaries))
	}
	check := d.newCheck()
	check.report(router.complete(), "the router has entries 1 to %d, each once and in order, %d before the server was killed and %d after", router.at.Seq, at.Seq, router.at.Seq-at.Seq)
	var changed error
	if router.at.Epoch != at.Epoch {
		changed = fmt.Errorf("it was %s and is %s", at.Epoch, router.at.Epoch)
	}
	check.report(changed, "the epoch is the same, %s, so the router needed no snapshot", at.Epoch)
	check.report(router.matches(summaries), "the router's view has exactly the blocks in the engines' caches")
	return errors.Join(check.failure, s.stop())
}

// startNATS starts a nats-server with JetStream in this process.
func startNATS(dir string) (url string, stop func(), err error) {
	s, err := nats.NewServer(&nats.Options{Host: "127.0.0.1", Port: nats.RANDOM_PORT, JetStream: true, StoreDir: dir, NoSigs: true, NoLog: true})
	if err != nil {
		return "", nil, err
	}
	s.Start()
	stop = func() {
		s.Shutdown()
		s.WaitForShutdown()
	}
	if !s.ReadyForConnections(routeTimeout) {
		stop()
		return "", nil, errors.New("nats-server does not serve")
	}
	return s.ClientURL(), stop, nil
}

// startServers starts the servers, and waits until they serve.
func (d *demo) startServers(ctx context.Context, s *servers, url string) error {
	for range serverCount {
		addr, err := freeAddress(ctx)
		if err != nil {
			return err
		}
		d.heading("kvcast serve --listen %s --journal %s", addr, url)
		p, err := d.startProcess(ctx, addr, url)
		if err != nil {
			return err
		}
		s.addrs, s.processes = append(s.addrs, addr), append(s.processes, p)
		conn, err := grpc.NewClient(addr, grpc.WithTransportCredentials(insecure.NewCredentials()))
		if err != nil {
			return err
		}
		s.conns = append(s.conns, conn)
	}
	var serving errgroup.Group
	for _, addr := range s.addrs {
		serving.Go(func() error { return awaitServing(ctx, addr) })
	}
	return serving.Wait()
}

// share waits until at least two servers read engines, at most for shareTimeout, and returns which engines each reads.
func (s *servers) share(ctx context.Context) ([][]string, error) {
	sharing, cancel := context.WithTimeout(ctx, shareTimeout)
	defer cancel()
	readers, err := s.await(sharing, func(r [][]string) bool {
		return count(r) == clusterEngines && !slices.ContainsFunc(r, func(names []string) bool { return len(names) == clusterEngines })
	})
	if err != nil && ctx.Err() == nil && count(readers) > 0 { // chance has assigned all engines to one of them
		err = nil
	}
	return readers, err
}

// await waits until a condition of the names of the engines that each server reads is true.
func (s *servers) await(ctx context.Context, condition func([][]string) bool) ([][]string, error) {
	poll := time.NewTicker(readersPoll)
	defer poll.Stop()
	var last [][]string
	for {
		readers, err := s.readers(ctx)
		if err == nil {
			last = readers
			if condition(readers) {
				return readers, nil
			}
		}
		select {
		case <-poll.C:
		case <-ctx.Done():
			return last, fmt.Errorf("wait for the servers to read the engines: %w", errors.Join(err, ctx.Err()))
		}
	}
}

// readers returns the names of the engines that each server reads.
func (s *servers) readers(ctx context.Context) ([][]string, error) {
	names := make([][]string, len(s.conns))
	for i, conn := range s.conns {
		if s.processes[i] == nil {
			continue
		}
		list, err := kvcastv1.NewRouterEventServiceClient(conn).ListWorkers(ctx, &kvcastv1.ListWorkersRequest{})
		if err != nil {
			return nil, err
		}
		for _, w := range list.GetWorkers() {
			if len(w.GetSources()) > 0 {
				names[i] = append(names[i], w.GetName())
			}
		}
	}
	return names, nil
}

func count(readers [][]string) (n int) {
	for _, names := range readers {
		n += len(names)
	}
	return n
}

func (d *demo) printReaders(s *servers, readers [][]string) {
	for i, names := range readers {
		switch {
		case s.processes[i] == nil:
		case len(names) == 0:
			d.print("server %d reads no engine\n", i+1)
		default:
			d.print("server %d reads %s\n", i+1, strings.Join(names, ", "))
		}
	}
}

// stop ends the servers as Ctrl-C does.
func (s *servers) stop() (err error) {
	for i, p := range s.processes {
		if p != nil {
			err = errors.Join(err, p.stop())
			s.processes[i] = nil
		}
	}
	return err
}

// kill ends the servers that have not ended, and closes the connections.
func (s *servers) kill() (err error) {
	for _, conn := range s.conns {
		err = errors.Join(err, conn.Close())
	}
	for _, p := range s.processes {
		if p != nil {
			err = errors.Join(err, p.kill())
		}
	}
	return err
}
