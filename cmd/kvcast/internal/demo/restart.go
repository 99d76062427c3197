package demo

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"os/exec"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
	healthv1 "google.golang.org/grpc/health/grpc_health_v1"

	"github.com/kvcast/kvcast/client"
)

// process is kvcast serve as a separate process.
type process struct {
	cmd   *exec.Cmd
	stdin io.Closer // the process ends when it is closed
}

// serveProcess starts kvcast serve, and waits until it serves at addr.
func (d *demo) serveProcess(ctx context.Context, addr, journal string) (*process, error) {
	p, err := d.startProcess(ctx, addr, journal)
	if err != nil {
		return nil, err
	}
	if err := awaitServing(ctx, addr); err != nil {
		return nil, errors.Join(err, p.kill())
	}
	return p, nil
}

// startProcess starts kvcast serve.
func (d *demo) startProcess(ctx context.Context, addr, journal string) (*process, error) {
	program, err := os.Executable()
	if err != nil {
		return nil, err
	}
	args := []string{"--end-with-stdin", "serve", "--listen", addr, "--admin", "", "--log-level", "error", "--journal", journal}
	for i, e := range d.engines {
		args = append(args, "--worker", fmt.Sprintf("name=%s,model=demo,block_size=16,connect=%s,replay=%s", engineName(i), e.Endpoint(), e.ReplayEndpoint()))
	}
	p := &process{cmd: exec.CommandContext(ctx, program, args...)}
	p.cmd.Stderr = d.out
	if p.stdin, err = p.cmd.StdinPipe(); err != nil {
		return nil, err
	}
	return p, p.cmd.Start()
}

// awaitServing waits until the server at an address serves.
func awaitServing(ctx context.Context, addr string) error {
	conn, err := grpc.NewClient(addr, grpc.WithTransportCredentials(insecure.NewCredentials()))
	if err != nil {
		return err
	}
	defer func() { _ = conn.Close() }()
	ctx, cancel := context.WithTimeoutCause(ctx, routeTimeout, errors.New("the server does not serve"))
	defer cancel()
	stream, err := healthv1.NewHealthClient(conn).Watch(ctx, &healthv1.HealthCheckRequest{}, grpc.WaitForReady(true))
	for err == nil {
		var health *healthv1.HealthCheckResponse
		if health, err = stream.Recv(); health.GetStatus() == healthv1.HealthCheckResponse_SERVING {
			return nil
		}
	}
	return fmt.Errorf("wait for the server at %s: %w", addr, errors.Join(err, context.Cause(ctx)))
}

// kill ends the process with SIGKILL.
func (p *process) kill() error {
	if err := p.cmd.Process.Kill(); err != nil {
		return err
	}
	_ = p.cmd.Wait() // the error is that it was killed
	return nil
}

// stop ends the process as Ctrl-C does.
func (p *process) stop() error { return errors.Join(p.stdin.Close(), p.cmd.Wait()) }

// freeAddress returns an address of this host whose port is free.
func freeAddress(ctx context.Context) (string, error) {
	l, err := new(net.ListenConfig).Listen(ctx, "tcp", "127.0.0.1:0")
	if err != nil {
		return "", err
	}
	return l.Addr().String(), l.Close()
}

// runRestart kills a server with a durable journal, restarts it, and checks that a router resumes without a loss.
func (d *demo) runRestart(ctx context.Context) (err error) {
	d.heading("%d simulated engines publish their KV-cache events over ZeroMQ, and some messages are lost", engineCount)
	for i := range engineCount {
		if err := d.startEngine(ctx, i, batches); err != nil {
			return fmt.Errorf("start %s: %w", engineName(i), err)
		}
	}
	dir, err := os.MkdirTemp("", "kvcast-demo-")
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, os.RemoveAll(dir)) }()
	if d.addr, err = freeAddress(ctx); err != nil {
		return err
	}
	d.heading("kvcast serve --listen %s --journal file:%s", d.addr, dir)
	server, err := d.serveProcess(ctx, d.addr, "file:"+dir)
	if err != nil {
		return err
	}
	defer func() {
		if server != nil {
			err = errors.Join(err, server.kill())
		}
	}()
	conn, err := grpc.NewClient(d.addr, grpc.WithTransportCredentials(insecure.NewCredentials()))
	if err != nil {
		return err
	}
	defer func() { _ = conn.Close() }()
	ctx, cancel := context.WithTimeout(ctx, routeTimeout)
	defer cancel()
	router := newRouter(client.FromConn(conn))
	router.connect(ctx, client.FromEarliest())
	defer func() { router.disconnect() }()

	d.heading("a router subscribes from the earliest entry: seq, time, worker, dp rank, event")
	if err := router.receiveUntil(func() bool { return len(router.entries) >= disconnectAfter }, d.show()); err != nil {
		return err
	}
	at := router.at
	router.disconnect()

	d.heading("kill -9 %d: the server ends at once, with the router after position %s; the engines continue", server.cmd.Process.Pid, at)
	if err := server.kill(); err != nil {
		return err
	}
	before := d.engines[0].Summary().Batches
	began := time.Now()
	if server, err = d.serveProcess(ctx, d.addr, "file:"+dir); err != nil {
		return err
	}
	d.heading("the same command again: the server serves after %v; meanwhile %s has published %d batches",
		time.Since(began).Round(time.Millisecond), engineName(0), d.engines[0].Summary().Batches-before)

	router.connect(ctx, client.FromEarliest())
	if err := router.receiveUntil(func() bool { return len(router.entries) > disconnectAfter }, d.show()); err != nil {
		return err
	}
	d.heading("the router resumes after its position; the engines finish, and report the contents of their caches")
	summaries, err := d.finish(ctx)
	if err != nil {
		return err
	}
	if err := router.receiveUntil(func() bool { return router.matches(summaries) == nil }, nil); err != nil {
		return errors.Join(err, router.matches(summaries))
	}
	c := d.newCheck()
	c.report(router.complete(), "the router has entries 1 to %d, each once and in order, %d before the server was killed and %d after", router.at.Seq, at.Seq, router.at.Seq-at.Seq)
	var epoch error
	if router.at.Epoch != at.Epoch {
		epoch = fmt.Errorf("it was %s and is %s", at.Epoch, router.at.Epoch)
	}
	c.report(epoch, "the epoch is the same, %s, so the router needed no snapshot", at.Epoch)
	c.report(router.matches(summaries), "the router's view has exactly the blocks in the engines' caches")
	err = server.stop()
	server = nil
	return errors.Join(c.failure, err)
}
