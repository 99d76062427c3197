package conformance

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"slices"
	"strings"
	"sync"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/keepalive"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/encoding/protojson"
	"google.golang.org/protobuf/proto"

	kvcastv1 "github.com/kvcast/kvcast/proto/kvcast/v1"
)

// play is the state of a script that servers play.
type play struct {
	script *Script

	mu       sync.Mutex // guards all below
	streams  int        // streams that have begun
	answers  int
	matching int
	ended    time.Time     // when the last stream has ended
	wrong    []string      // what the client did and the script does not expect
	lines    int           // that the client has reported
	reported chan struct{} // closed and replaced with each line
}

// report counts a line that the client has reported.
func (p *play) report() {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.lines++
	close(p.reported)
	p.reported = make(chan struct{})
}

// awaitLines waits until the client has reported n lines.
func (p *play) awaitLines(ctx context.Context, n int) error {
	for {
		p.mu.Lock()
		lines, next := p.lines, p.reported
		p.mu.Unlock()
		if lines >= n {
			return nil
		}
		select {
		case <-next:
		case <-ctx.Done():
			return ctx.Err()
		}
	}
}

// complain records what the client has done wrong, and returns it as an error.
func (p *play) complain(format string, args ...any) error {
	what := fmt.Sprintf(format, args...)
	p.mu.Lock()
	defer p.mu.Unlock()
	p.wrong = append(p.wrong, what)
	return status.Error(codes.InvalidArgument, "the script does not expect this: "+what)
}

// complaints returns the requests that the script does not expect, and how many expected ones are missing.
func (p *play) complaints() []string {
	p.mu.Lock()
	defer p.mu.Unlock()
	wrong := slices.Clone(p.wrong)
	for _, part := range []struct {
		name      string
		got, want int
	}{
		{"Subscribe streams", p.streams, len(p.script.Streams)},
		{"unary calls", p.answers, len(p.script.Answers)},
		{"MatchPrefixes streams", p.matching, len(p.script.MatchStreams)},
	} {
		if part.got < part.want {
			wrong = append(wrong, fmt.Sprintf("got %d %s, want %d", part.got, part.name, part.want))
		}
	}
	return wrong
}

// next returns the number of the next call of a kind, and counts it.
func (p *play) next(count *int) int {
	p.mu.Lock()
	defer p.mu.Unlock()
	*count++
	return *count - 1
}

// server plays the calls of one address.
type server struct {
	kvcastv1.UnimplementedRouterEventServiceServer
	*play
	number   int
	grpc     *grpc.Server
	listener *cuttable
	served   chan error
}

// listen starts a server.
func (p *play) listen(number int, creds credentials.TransportCredentials) (*server, error) {
	l, err := new(net.ListenConfig).Listen(context.Background(), "tcp", "127.0.0.1:0")
	if err != nil {
		return nil, err
	}
	s := &server{play: p, number: number, listener: &cuttable{Listener: l}, served: make(chan error, 1)}
	s.grpc = grpc.NewServer(
		grpc.Creds(creds),
		grpc.KeepaliveEnforcementPolicy(keepalive.EnforcementPolicy{MinTime: 9 * time.Second}), // as in kvcast servers
		grpc.UnaryInterceptor(func(ctx context.Context, req any, info *grpc.UnaryServerInfo, _ grpc.UnaryHandler) (any, error) {
			if err := s.authorize(ctx); err != nil {
				return nil, err
			}
			return s.unary(req.(proto.Message), info.FullMethod[strings.LastIndexByte(info.FullMethod, '/')+1:])
		}),
		grpc.StreamInterceptor(func(srv any, stream grpc.ServerStream, _ *grpc.StreamServerInfo, handler grpc.StreamHandler) error {
			if err := s.authorize(stream.Context()); err != nil {
				return err
			}
			return handler(srv, stream)
		}),
	)
	kvcastv1.RegisterRouterEventServiceServer(s.grpc, s)
	go func() { s.served <- s.grpc.Serve(s.listener) }()
	return s, nil
}

func (s *server) stop() {
	s.grpc.Stop()
	<-s.served // its error is that of a listener that is closed
}

func (s *server) authorize(ctx context.Context) error {
	if s.script.Token == "" {
		return nil
	}
	if got := metadata.ValueFromIncomingContext(ctx, "authorization"); len(got) != 1 || got[0] != "Bearer "+s.script.Token {
		return (&End{Code: codes.Unauthenticated, Reason: "UNAUTHENTICATED", Message: "the token is missing or wrong"}).status()
	}
	return nil
}

// check compares a request with the one expected.
func (s *server) check(what string, number int, got proto.Message, expect json.RawMessage) error {
	want := got.ProtoReflect().New().Interface()
	if err := parses(expect, want); err != nil {
		return err
	}
	if number != s.number {
		return s.complain("%s came to server %d, want server %d", what, s.number, number)
	}
	if !proto.Equal(got, want) {
		return s.complain("%s is %s, want %s", what, line(got), line(want))
	}
	return nil
}

// line returns a message in one line.
func line(m proto.Message) string {
	text, err := protojson.Marshal(m)
	if err != nil {
		return err.Error()
	}
	return string(text)
}

// end ends a call as the script says.
func (s *server) end(e *End) error {
	switch {
	case e.Cut:
		s.listener.cut()
		return status.Error(codes.Unavailable, "the connection is cut")
	case e.GoAway:
		go s.grpc.GracefulStop()
	}
	return e.status()
}

func (s *server) unary(req proto.Message, name string) (proto.Message, error) {
	n := s.next(&s.answers)
	if n >= len(s.script.Answers) || s.script.Answers[n].Method != name {
		return nil, s.complain("call %d is %s: %s", n, name, line(req))
	}
	a := s.script.Answers[n]
	if err := s.check(fmt.Sprintf("answers[%d]", n), a.Server, req, a.Expect); err != nil {
		return nil, err
	}
	if a.End != nil {
		return nil, s.end(a.End)
	}
	res := methods[name].response()
	return res, parses(a.Response, res)
}

// Subscribe implements kvcastv1.RouterEventServiceServer.
func (s *server) Subscribe(req *kvcastv1.SubscribeRequest, stream kvcastv1.RouterEventService_SubscribeServer) error {
	n := s.next(&s.streams)
	if n >= len(s.script.Streams) {
		return s.complain("stream %d is not expected: %s", n, line(req))
	}
	now := s.script.Streams[n]
	if err := s.check(fmt.Sprintf("streams[%d]", n), now.Server, req, now.Expect); err != nil {
		return err
	}
	s.mu.Lock()
	waited := time.Since(s.ended)
	s.mu.Unlock()
	if least := time.Duration(now.NotBefore) * time.Millisecond; waited < least {
		return s.complain("streams[%d] came %v after the one before, want %v or later", n, waited, least)
	}
	for _, text := range now.Send {
		select {
		case <-time.After(time.Duration(now.Pause) * time.Millisecond):
		case <-stream.Context().Done():
			return stream.Context().Err()
		}
		m := new(kvcastv1.SubscribeResponse)
		if err := parses(text, m); err != nil {
			return err
		}
		if err := stream.Send(m); err != nil {
			return err
		}
	}
	if now.End == nil {
		<-stream.Context().Done()
		return stream.Context().Err()
	}
	if err := s.awaitLines(stream.Context(), now.End.AfterLines); err != nil {
		return err
	}
	s.mu.Lock()
	s.ended = time.Now()
	s.mu.Unlock()
	return s.end(now.End)
}

// MatchPrefixes implements kvcastv1.RouterEventServiceServer.
func (s *server) MatchPrefixes(stream kvcastv1.RouterEventService_MatchPrefixesServer) error {
	n := s.next(&s.matching)
	if n >= len(s.script.MatchStreams) {
		return s.complain("MatchPrefixes stream %d is not expected", n)
	}
	now := s.script.MatchStreams[n]
	if now.Server != s.number {
		return s.complain("match_streams[%d] came to server %d, want server %d", n, s.number, now.Server)
	}
	unused := slices.Clone(now.Answers)
	var waiting []*kvcastv1.MatchPrefixesRequest
	for together := max(now.Together, 1); ; together = 1 {
		for len(waiting) < together {
			req, err := stream.Recv()
			if errors.Is(err, io.EOF) {
				return nil
			}
			if err != nil {
				return err
			}
			waiting = append(waiting, req)
		}
		req := waiting[0]
		waiting = waiting[1:]
		i := slices.IndexFunc(unused, func(a MatchAnswer) bool { return answers(a, req) })
		if i < 0 {
			return s.complain("match_streams[%d] does not answer this: %s", n, line(req))
		}
		a := unused[i]
		unused = slices.Delete(unused, i, i+1)
		if a.End != nil {
			return s.end(a.End)
		}
		res := &kvcastv1.MatchPrefixesResponse{Id: req.GetId(), Response: new(kvcastv1.MatchPrefixResponse)}
		if a.WrongID {
			res.Id++
		}
		if err := parses(a.Response, res.GetResponse()); err != nil {
			return err
		}
		if err := stream.Send(res); err != nil {
			return err
		}
	}
}

// answers reports whether an answer is that to a request.
func answers(a MatchAnswer, req *kvcastv1.MatchPrefixesRequest) bool {
	want := new(kvcastv1.MatchPrefixesRequest)
	if parses(a.Expect, want) != nil {
		return false
	}
	want.Id = req.GetId()
	return proto.Equal(req, want)
}
