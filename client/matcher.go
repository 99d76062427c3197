package client

import (
	"context"
	"errors"
	"io"
	"sync"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"

	kvcastv1 "github.com/kvcast/kvcast/proto/kvcast/v1"
)

// ErrMatcherClosed is the error of requests of a closed Matcher.
var ErrMatcherClosed = errors.New("the matcher is closed")

// maxInFlight bounds the requests of a Matcher that have no answer yet. Further requests wait.
const maxInFlight = 1024

// Matcher sends MatchRequests over one stream, which costs less than a call for each. Requests of several goroutines
// are in flight at the same time. It opens the stream with the first request, and another one after an error.
//
// The server answers in the order of the requests. A request that waits for a position therefore delays those after it.
type Matcher struct {
	client   *Client
	inFlight chan struct{}  // has an element for each request without an answer
	sending  chan struct{}  // has an element while a request is sent; acquired before mu
	done     sync.WaitGroup // goroutines of streams

	mu     sync.Mutex   // guards all below
	stream *matchStream // nil: none is open
	nextID uint64
	closed bool
}

// NewMatcher returns a Matcher, which the caller must close. It does not connect.
func (c *Client) NewMatcher() *Matcher {
	return &Matcher{client: c, inFlight: make(chan struct{}, maxInFlight), sending: make(chan struct{}, 1)}
}

// Close ends the requests without an answer with ErrMatcherClosed, and closes the stream and its connection.
func (m *Matcher) Close() {
	m.mu.Lock()
	m.closed = true
	if m.stream != nil {
		m.stream.cancel(ErrMatcherClosed)
	}
	m.mu.Unlock()
	m.done.Wait()
}

// Match sends a request and waits for the answer; see MatchPrefix. A request whose stream broke before the answer is
// sent over another stream, at most once more for each server. Match is safe for concurrent use.
func (m *Matcher) Match(ctx context.Context, req MatchRequest) (MatchResult, error) {
	msg, err := req.proto()
	if err != nil {
		return MatchResult{}, err
	}
	res, err := m.answer(ctx, &kvcastv1.MatchPrefixesRequest{Request: msg})
	if err != nil {
		return MatchResult{}, err
	}
	return newMatchResult(msg, res), nil
}

// NoteRouted is Client.NoteRouted over the stream, with at most 64 prompts. It does not tell how many were ignored. A Match that begins after it has
// returned is sure to see them, if it has the same server.
func (m *Matcher) NoteRouted(ctx context.Context, all ...Routed) error {
	if len(all) == 0 {
		return nil
	}
	req := new(kvcastv1.MatchPrefixesRequest)
	for i := range all {
		req.Routed = append(req.Routed, all[i].proto())
	}
	_, err := m.answer(ctx, req)
	return err
}

// answer sends a request, and waits for the answer.
func (m *Matcher) answer(ctx context.Context, req *kvcastv1.MatchPrefixesRequest) (*kvcastv1.MatchPrefixResponse, error) {
	select {
	case m.inFlight <- struct{}{}:
		defer func() { <-m.inFlight }()
	case <-ctx.Done():
		return nil, ctx.Err()
	}
	var lost *lostError
	for attempt := 0; ; attempt++ {
		call, err := m.send(ctx, req)
		if err == nil {
			select {
			case <-call.done:
				err = call.err
			case <-ctx.Done():
				return nil, ctx.Err()
			}
		}
		switch {
		case err == nil:
			return call.response, nil
		case errors.As(err, &lost) && attempt < m.client.servers():
			continue
		case errors.As(err, &lost):
			return nil, lost.err
		}
		return nil, err
	}
}

// lostError is the error of a request that can be sent again: another request, or the connection, caused the error.
type lostError struct{ err error }

func (e *lostError) Error() string { return e.err.Error() }

// matchCall is a request in flight. err or response is set before done is closed.
type matchCall struct {
	id       uint64
	response *kvcastv1.MatchPrefixResponse
	err      error
	done     chan struct{}
}

func (c *matchCall) end(err error) {
	c.err = err
	close(c.done)
}

// send sends a request. It opens a stream if there is none.
func (m *Matcher) send(ctx context.Context, req *kvcastv1.MatchPrefixesRequest) (*matchCall, error) {
	select {
	case m.sending <- struct{}{}:
		defer func() { <-m.sending }()
	case <-ctx.Done():
		return nil, ctx.Err()
	}
	call := &matchCall{done: make(chan struct{})}
	s, err := m.current(call)
	if err != nil {
		return nil, err
	}
	if s.add(call) {
		// An error means that the stream has ended. Its receiver gets the reason, and ends all calls.
		_ = s.Send(&kvcastv1.MatchPrefixesRequest{Id: call.id, Request: req.GetRequest(), Routed: req.GetRouted()})
	}
	return call, nil
}

// current returns the open stream for a call, and numbers the call.
func (m *Matcher) current(call *matchCall) (*matchStream, error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.closed {
		return nil, ErrMatcherClosed
	}
	if m.stream == nil {
		if err := m.open(); err != nil {
			return nil, err
		}
	}
	m.nextID++
	call.id = m.nextID
	return m.stream, nil
}

// open opens a stream. The caller must hold mu.
func (m *Matcher) open() error {
	conn, err := m.client.connect()
	if err != nil {
		return err
	}
	ctx, cancel := context.WithCancelCause(context.Background())
	stream, err := kvcastv1.NewRouterEventServiceClient(conn).MatchPrefixes(ctx)
	if err != nil {
		cancel(nil)
		conn.close()
		conn.failed()
		return &lostError{newError(err)}
	}
	s := &matchStream{BidiStreamingClient: stream, cancel: cancel}
	m.stream = s
	m.done.Go(func() {
		defer conn.close()
		defer cancel(nil)
		err := s.receive()
		conn.failed()
		if errors.Is(context.Cause(ctx), ErrMatcherClosed) {
			err = ErrMatcherClosed
		}
		m.mu.Lock()
		m.stream = nil
		m.mu.Unlock()
		s.fail(err)
	})
	return nil
}

// matchStream is an open stream with its requests in flight.
type matchStream struct {
	grpc.BidiStreamingClient[kvcastv1.MatchPrefixesRequest, kvcastv1.MatchPrefixesResponse]
	cancel context.CancelCauseFunc

	mu    sync.Mutex   // guards all below
	calls []*matchCall // in the order of the requests
	ended error        // why the stream has ended; nil: it has not
}

// add adds a call. If the stream has ended, it ends the call and returns false.
func (s *matchStream) add(c *matchCall) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.ended != nil {
		c.end(&lostError{s.ended})
		return false
	}
	s.calls = append(s.calls, c)
	return true
}

// first removes the first call and returns it; nil if there is none.
func (s *matchStream) first() (c *matchCall) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if len(s.calls) > 0 {
		c, s.calls = s.calls[0], s.calls[1:]
	}
	return c
}

// receive passes answers to their calls until the stream ends, and returns the reason.
func (s *matchStream) receive() error {
	for {
		res, err := s.Recv()
		switch {
		case errors.Is(err, io.EOF):
			return ErrEnded
		case err != nil:
			return newError(err)
		}
		c := s.first()
		if c == nil {
			return errMatchOrder
		}
		if c.id != res.GetId() {
			c.end(errMatchOrder)
			return errMatchOrder
		}
		c.response = res.GetResponse()
		close(c.done)
	}
}

var errMatchOrder = &ViolationError{What: "answers are not in the order of requests"}

// fail ends all calls with the error that ended the stream. The server ends a stream at the first request that it
// cannot answer, so later requests can be sent again.
func (s *matchStream) fail(err error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.ended = err
	var status *Error
	isConnection := errors.Is(err, ErrEnded) || errors.As(err, &status) && status.Code == codes.Unavailable
	for i, c := range s.calls {
		switch {
		case errors.Is(err, ErrMatcherClosed) || i == 0 && !isConnection:
			c.end(err)
		default:
			c.end(&lostError{err})
		}
	}
	s.calls = nil
}
