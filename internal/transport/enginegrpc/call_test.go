package enginegrpc_test

import (
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"net"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"go.uber.org/goleak"
	"golang.org/x/net/http2"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/kvcast/kvcast/internal/core/testclass"
	"github.com/kvcast/kvcast/internal/transport"
	"github.com/kvcast/kvcast/internal/transport/enginegrpc"
	"github.com/kvcast/kvcast/internal/wire"
	"github.com/kvcast/kvcast/test/harness"
	"github.com/kvcast/kvcast/test/harness/enginetest"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

const (
	vllmMethod       = "/vllm.grpc.engine.VllmEngine/SubscribeKvEvents"
	tokenspeedMethod = "/tokenspeed.grpc.scheduler.TokenSpeedScheduler/SubscribeKvEvents"
	controlMethod    = "/openengine.v1.Control/SubscribeKvEvents"
	formerMethod     = "/openengine.v1.OpenEngine/SubscribeKvEvents"
)

type server struct {
	*enginetest.CallServer
	t *testing.T
}

func newServer(t *testing.T, methods ...string) server {
	t.Helper()
	s, err := enginetest.NewCallServer("127.0.0.1:0", methods...)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(s.Close)
	return server{s, t}
}

// accept waits for a call with these methods and requests.
func (s server) accept(method string, request message) call {
	s.t.Helper()
	c, err := s.Accept()
	if err != nil {
		s.t.Fatal(err)
	}
	if c.Method != method || string(c.Request) != string(request) {
		s.t.Fatalf("call of %s with %x, want %s with %x", c.Method, c.Request, method, request)
	}
	return call{c, s.t}
}

type call struct {
	*enginetest.Call
	t *testing.T
}

func (c call) send(all ...message) {
	c.t.Helper()
	for _, m := range all {
		if err := c.Send(m); err != nil {
			c.t.Fatal(err)
		}
	}
}

func (c call) header() {
	c.t.Helper()
	if err := c.SendHeader(); err != nil {
		c.t.Fatal(err)
	}
}

func (c call) end(err error) {
	c.t.Helper()
	if err := c.End(err); err != nil {
		c.t.Fatal(err)
	}
}

// from is a request of SMG.
func from(seq int64) message { return message{}.number(1, seq) }

// reader reads a Receiver as lines.
type reader struct {
	t *testing.T
	transport.Receiver
	lines []string
	err   error
}

func subscribe(t *testing.T, s enginegrpc.Subscription) *reader {
	t.Helper()
	return subscribeWithin(t, s, harness.Timeout)
}

func subscribeWithin(t *testing.T, s enginegrpc.Subscription, limit time.Duration) *reader {
	t.Helper()
	return subscribeBy(t, enginegrpc.New(enginegrpc.Config{}), s, limit)
}

// subscribeBy subscribes by a Transport.
func subscribeBy(t *testing.T, tr *enginegrpc.Transport, s enginegrpc.Subscription, limit time.Duration) *reader {
	t.Helper()
	if s.Ranks == nil {
		s.Ranks = []uint32{0}
	}
	r, err := tr.SubscribeWithin(s, limit)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := r.Close(); err != nil {
			t.Error(err)
		}
	})
	return &reader{t: t, Receiver: r}
}

// want waits for these lines.
func (r *reader) want(lines ...string) {
	r.t.Helper()
	for i, want := range lines {
		for len(r.lines) == 0 {
			if !r.read() {
				r.t.Fatalf("line %d is missing, want %q: %v", i, want, r.err)
			}
		}
		got := r.lines[0]
		r.lines = r.lines[1:]
		if !strings.HasPrefix(got, want) {
			r.t.Fatalf("line %d is %q, want %q", i, got, want)
		}
	}
}

func (r *reader) read() bool {
	limit := time.Now().Add(harness.Timeout)
	c, err := r.Next(func() time.Time { return limit })
	if err != nil {
		r.err = err
		return false
	}
	c.Each(func(e transport.Event) {
		switch e.Kind {
		case transport.Connected:
			r.lines = append(r.lines, fmt.Sprintf("connected, resumed %v", e.Resumed))
		case transport.Disconnected:
			r.lines = append(r.lines, fmt.Sprintf("disconnected, lost %v: %v", errors.Is(e.Err, transport.ErrLost), e.Err))
		case transport.Failed:
			r.lines = append(r.lines, fmt.Sprintf("failed: %v", e.Err))
		}
	}, func(m transport.Message) {
		seq := binary.BigEndian.Uint64(m.Frames[1])
		if m.Foreign {
			r.lines = append(r.lines, fmt.Sprintf("%d of another rank", seq))
			return
		}
		b, err := new(wire.Decoder).Decode(m.Frames[2])
		if err != nil {
			r.lines = append(r.lines, fmt.Sprintf("%d malformed", seq))
			return
		}
		r.lines = append(r.lines, fmt.Sprintf("%d of rank %d with %d events", seq, b.Rank, len(b.Events)))
	})
	r.Recycle(c)
	return true
}

// wantEnd waits for the end.
func (r *reader) wantEnd(want error) {
	r.t.Helper()
	for len(r.lines) == 0 && r.read() {
	}
	if len(r.lines) > 0 || !errors.Is(r.err, want) {
		r.t.Fatalf("ended with %v, want %v; lines %q", r.err, want, r.lines)
	}
}

func smgEndpoint(s server) string { return "smg://" + s.Address() }

func last(seq uint64) *uint64 { return &seq }

func TestBatchesArriveInOrder(t *testing.T) {
	t.Parallel()
	s := newServer(t, vllmMethod)
	r := subscribe(t, enginegrpc.Subscription{Endpoint: smgEndpoint(s)})
	c := s.accept(vllmMethod, nil)
	c.header()
	r.want("connected, resumed false")
	loadOnly := message{}.number(1, 1).message(8, message{}.number(9, 1))
	c.send(loadOnly, smgStored(0, 1), loadOnly, smgStored(0, 2), smgStored(0, 3))
	r.want("1 of rank 0 with 1 events", "2 of rank 0", "3 of rank 0")
	c.end(nil)
	r.want("disconnected, lost false: the server ended the call")
	r.wantEnd(transport.ErrEnded)
}

func TestMethodOfTheServerIsFound(t *testing.T) {
	t.Parallel()
	s := newServer(t, tokenspeedMethod)
	r := subscribe(t, enginegrpc.Subscription{Endpoint: smgEndpoint(s), Last: last(9)})
	c := s.accept(tokenspeedMethod, from(8))
	c.send(smgStored(0, 9))
	r.want("connected, resumed true", "9 of rank 0")
	s = newServer(t, formerMethod)
	r = subscribe(t, enginegrpc.Subscription{Endpoint: "openengine://" + s.Address(), Rank: 3, Ranks: []uint32{2, 3}})
	c = s.accept(formerMethod, message{}.packed(1, 3))
	c.send(openBatch(3, 5, message{}.message(12, nil)))
	r.want("connected, resumed false", "5 of rank 3 with 1 events")
}

func TestServerWithoutTheCall(t *testing.T) {
	t.Parallel()
	s := newServer(t)
	for _, l := range []*uint64{nil, last(7)} {
		r := subscribe(t, enginegrpc.Subscription{Endpoint: smgEndpoint(s), Last: l})
		r.want("failed: rpc error: code = Unimplemented")
		r.wantEnd(transport.ErrEnded)
	}
}

func TestCallThatResumes(t *testing.T) {
	t.Parallel()
	for _, code := range []codes.Code{
		codes.OutOfRange, codes.DataLoss, codes.InvalidArgument, codes.FailedPrecondition, codes.Unknown, codes.Internal, codes.NotFound, codes.OK,
	} {
		for _, headers := range []bool{false, true} {
			s := newServer(t, vllmMethod)
			r := subscribe(t, enginegrpc.Subscription{Endpoint: smgEndpoint(s), Last: last(9)})
			c := s.accept(vllmMethod, from(8))
			if headers {
				c.header()
			}
			c.end(status.Error(code, "no such batch"))
			c = s.accept(vllmMethod, nil)
			c.header()
			r.want("connected, resumed false")
			c.send(smgStored(0, 40))
			r.want("40 of rank 0")
		}
	}
}

// The first seqs cannot be asked for, since 0 means none.
func TestFirstBatchesAreNotResumed(t *testing.T) {
	t.Parallel()
	s := newServer(t, vllmMethod)
	for seq := range uint64(2) {
		subscribe(t, enginegrpc.Subscription{Endpoint: smgEndpoint(s), Last: last(seq)})
		s.accept(vllmMethod, nil)
	}
	subscribe(t, enginegrpc.Subscription{Endpoint: smgEndpoint(s), Last: last(2)})
	s.accept(vllmMethod, from(1))
}

func TestOpenEngineThatCannotResume(t *testing.T) {
	t.Parallel()
	s := newServer(t, controlMethod)
	r := subscribe(t, enginegrpc.Subscription{Endpoint: "openengine://" + s.Address(), Last: last(9)})
	c := s.accept(controlMethod, message{}.packed(1, 0).number(3, 8))
	c.send(message{}.message(2, message{}.number(1, 2).text(2, "no replay")))
	c.end(nil)
	c = s.accept(controlMethod, message{}.packed(1, 0))
	c.send(openBatch(0, 12))
	r.want("connected, resumed false", "12 of rank 0")
	c.send(message{}.message(2, message{}.number(1, 12).text(2, "internal")))
	r.want("disconnected, lost false: the engine ended the call: error code 12: internal")
}

// After these ends, the next call must not resume.
func TestEndsWithLosses(t *testing.T) {
	t.Parallel()
	for name, end := range map[string]func(call){
		"data loss":    func(c call) { c.end(status.Error(codes.DataLoss, "the publisher restarted")) },
		"out of range": func(c call) { c.end(status.Error(codes.OutOfRange, "too slow")) },
		"too long":     func(c call) { _ = c.Send(make(message, transport.MaxPayloadBytes+1)) },
		"no protobuf":  func(c call) { c.send(message("\x0a\xff")) },
	} {
		t.Run(name, func(t *testing.T) {
			s := newServer(t, vllmMethod)
			r := subscribe(t, enginegrpc.Subscription{Endpoint: smgEndpoint(s)})
			c := s.accept(vllmMethod, nil)
			c.send(smgStored(0, 1))
			r.want("connected", "1 of rank 0")
			end(c)
			r.want("disconnected, lost true")
			r.wantEnd(transport.ErrEnded)
		})
	}
}

func TestOtherRanks(t *testing.T) {
	t.Parallel()
	s := newServer(t, vllmMethod)
	first := subscribe(t, enginegrpc.Subscription{Endpoint: smgEndpoint(s), Rank: 0, Ranks: []uint32{0, 1}})
	c := s.accept(vllmMethod, nil)
	second := subscribe(t, enginegrpc.Subscription{Endpoint: smgEndpoint(s), Rank: 1, Ranks: []uint32{0, 1}})
	d := s.accept(vllmMethod, nil)
	for _, c := range []call{c, d} {
		c.send(smgStored(0, 7), smgStored(1, 1), smgStored(2, 3), smgStored(-1, 4), smgStored(0, 8), smgStored(1, 2))
	}
	first.want("connected", "7 of rank 0", "3 of another rank", "4 of another rank", "8 of rank 0")
	second.want("connected", "1 of rank 1", "2 of rank 1")
}

func TestBatchThatCannotBeConvertedIsMalformed(t *testing.T) {
	t.Parallel()
	s := newServer(t, vllmMethod)
	r := subscribe(t, enginegrpc.Subscription{Endpoint: smgEndpoint(s)})
	c := s.accept(vllmMethod, nil)
	c.send(message{}.number(1, 4).text(3, "\xff"), smgStored(0, 5))
	r.want("connected", "4 malformed", "5 of rank 0")
}

// A server that sends its headers with the first batch counts as connected after a time, and so does one that has accepted to
// resume.
func TestServerThatSendsNothing(t *testing.T) {
	t.Parallel()
	const limit = 5 * time.Second // it includes the time in which the call arrives
	s := newServer(t, vllmMethod)
	r := subscribeWithin(t, enginegrpc.Subscription{Endpoint: smgEndpoint(s)}, limit)
	c := s.accept(vllmMethod, nil)
	r.want("connected, resumed false")
	c.send(smgStored(0, 1))
	r.want("1 of rank 0")
	r = subscribeWithin(t, enginegrpc.Subscription{Endpoint: smgEndpoint(s), Last: last(5)}, limit)
	c = s.accept(vllmMethod, from(4))
	r.want("connected, resumed true")
	c.end(status.Error(codes.InvalidArgument, "no such batch"))
	r.want("disconnected, lost true")
}

// TestServerThatIsAway is asked to resume again, since it may be able to.
func TestServerThatIsAway(t *testing.T) {
	t.Parallel()
	s := newServer(t, vllmMethod)
	for _, code := range []codes.Code{codes.Unavailable, codes.PermissionDenied, codes.Unauthenticated} {
		r := subscribe(t, enginegrpc.Subscription{Endpoint: smgEndpoint(s), Last: last(9)})
		s.accept(vllmMethod, from(8)).end(status.Error(code, "no"))
		r.want("failed: rpc error: code = " + code.String() + " desc = no")
	}
}

func TestAnotherServer(t *testing.T) {
	t.Parallel()
	l, err := new(net.ListenConfig).Listen(t.Context(), "tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	address := l.Addr().String()
	// A server that is not one, and a port at which nothing listens.
	r := subscribeWithin(t, enginegrpc.Subscription{Endpoint: "smg://" + address}, 100*time.Millisecond)
	r.want("failed: call " + address + ": the server did not answer in time")
	r.wantEnd(transport.ErrEnded)
	if err := l.Close(); err != nil {
		t.Fatal(err)
	}
	r = subscribe(t, enginegrpc.Subscription{Endpoint: "smg://" + address})
	r.want("failed: rpc error: code = Unavailable desc = connection error")
	for _, endpoint := range []string{"tcp://h:1", "smg://h", "openengine://*:1", ""} {
		if _, err := enginegrpc.New(enginegrpc.Config{}).Subscribe(enginegrpc.Subscription{Endpoint: endpoint}); err == nil {
			t.Errorf("%q: no error", endpoint)
		}
	}
}

// A server whose headers do not end is disconnected.
func TestEndlessHeaders(t *testing.T) {
	t.Parallel()
	l, err := new(net.ListenConfig).Listen(t.Context(), "tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = l.Close() }()
	sent := make(chan int64, 1)
	go func() {
		n := int64(0)
		defer func() { sent <- n }()
		c, err := l.Accept()
		if err != nil {
			return
		}
		defer func() { _ = c.Close() }()
		if _, err := io.ReadFull(c, make([]byte, len(http2.ClientPreface))); err != nil {
			return
		}
		f := http2.NewFramer(c, c)
		if f.WriteSettings() != nil {
			return
		}
		for {
			if frame, err := f.ReadFrame(); err != nil {
				return
			} else if frame.Header().Type == http2.FrameHeaders {
				break
			}
		}
		// A header that is not indexed, over and over: \x00, a name and a value of one byte each.
		block := []byte(strings.Repeat("\x00\x01a\x01b", 3000))
		for err = f.WriteHeaders(http2.HeadersFrameParam{StreamID: 1, BlockFragment: block}); err == nil; n += int64(len(block)) {
			err = f.WriteContinuation(1, false, block)
		}
	}()
	r := subscribe(t, enginegrpc.Subscription{Endpoint: "smg://" + l.Addr().String()})
	r.want("failed: ")
	r.wantEnd(transport.ErrEnded)
	if n := <-sent; n > 64<<20 {
		t.Errorf("%d bytes of headers were read", n)
	}
}

// largeEvent returns a field of a batch that stores a block of so many tokens, each of which takes 3 bytes, and 5 in vLLM's form.
func largeEvent(n int) message {
	tokens := make([]int64, n)
	for i := range tokens {
		tokens[i] = 1 << 16
	}
	block := message{}.number(1, 1).packed(2, tokens...).number(3, int64(n))
	return message{}.message(3, message{}.message(2, message{}.message(1, block)))
}

// A server whose batches are not read has to wait.
func TestSlowReaderStopsTheServer(t *testing.T) {
	t.Parallel()
	s := newServer(t, vllmMethod)
	r := subscribe(t, enginegrpc.Subscription{Endpoint: smgEndpoint(s)})
	c := s.accept(vllmMethod, nil)
	event := largeEvent(1 << 18) // 768 KiB, and 1.25 MiB in vLLM's form
	const most = 5
	batches := int64(testclass.Size(12, 40))
	var sent atomic.Int64
	enough := make(chan struct{})
	done := make(chan struct{})
	go func() {
		defer close(done)
		for i := range batches {
			if c.Send(append(message{}.number(1, i), event...)) != nil {
				return
			}
			if sent.Add(1) == 1 {
				close(enough)
			}
		}
	}()
	<-enough
	r.want("connected")
	for i := range batches {
		if lead := sent.Load() - i; lead > most {
			t.Fatalf("%d batches were sent that are not read, want at most %d", lead, most)
		}
		r.want(fmt.Sprintf("%d of rank 0 with 1 events", i))
	}
	<-done
}

// Interrupt ends receiving after what has arrived, in each state of a call.
func TestInterrupt(t *testing.T) {
	t.Parallel()
	s := newServer(t, vllmMethod)
	r := subscribe(t, enginegrpc.Subscription{Endpoint: smgEndpoint(s)})
	c := s.accept(vllmMethod, nil)
	r.Interrupt() // while the call begins
	<-c.Done()
	r.wantInterrupted()
	r = subscribe(t, enginegrpc.Subscription{Endpoint: smgEndpoint(s), Last: last(5)})
	c = s.accept(vllmMethod, from(4))
	c.send(smgStored(0, 5))
	r.want("connected", "5 of rank 0")
	r.Interrupt()
	<-c.Done()
	r.wantInterrupted()
}

// wantInterrupted waits for the end after Interrupt, before which the end of the connection may be passed on.
func (r *reader) wantInterrupted() {
	r.t.Helper()
	for r.read() {
	}
	for _, line := range r.lines {
		if !strings.HasSuffix(line, transport.ErrInterrupted.Error()) {
			r.t.Errorf("line %q after an interrupt", line)
		}
	}
	if !errors.Is(r.err, transport.ErrInterrupted) {
		r.t.Errorf("ended with %v", r.err)
	}
}
