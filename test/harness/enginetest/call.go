package enginetest

import (
	"context"
	"errors"
	"fmt"
	"net"
	"sync"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/types/known/emptypb"

	"github.com/kvcast/kvcast/test/harness"
)

// CallServer is a gRPC server whose calls the test serves, message by message. It has the methods that the test names, and no others.
type CallServer struct {
	address string
	server  *grpc.Server
	calls   chan *Call
	closed  chan struct{}
	close   func()
}

// Call is a call of a server-streaming method.
type Call struct {
	// Method is the full name, and Request the encoded request.
	Method  string
	Request []byte
	stream  grpc.ServerStream
	ended   chan error
	done    chan struct{} // closed when the handler returns
}

// NewCallServer listens at an address, such as 127.0.0.1:0.
func NewCallServer(address string, methods ...string) (*CallServer, error) {
	l, err := new(net.ListenConfig).Listen(context.Background(), "tcp", address)
	if err != nil {
		return nil, err
	}
	s := &CallServer{address: l.Addr().String(), calls: make(chan *Call, 100), closed: make(chan struct{})}
	known := make(map[string]bool)
	for _, m := range methods {
		known[m] = true
	}
	s.server = grpc.NewServer(grpc.MaxSendMsgSize(1<<30), grpc.UnknownServiceHandler(func(_ any, stream grpc.ServerStream) error {
		method, _ := grpc.MethodFromServerStream(stream)
		if !known[method] {
			return status.Errorf(codes.Unimplemented, "no method %s", method)
		}
		return s.serve(method, stream)
	}))
	var serving sync.WaitGroup
	serving.Go(func() { _ = s.server.Serve(l) })
	s.close = sync.OnceFunc(func() {
		close(s.closed)
		s.server.Stop()
		serving.Wait()
	})
	return s, nil
}

func (s *CallServer) serve(method string, stream grpc.ServerStream) error {
	request := new(emptypb.Empty) // its unknown fields are the request's fields
	if err := stream.RecvMsg(request); err != nil {
		return err
	}
	c := &Call{Method: method, Request: request.ProtoReflect().GetUnknown(), stream: stream, ended: make(chan error), done: make(chan struct{})}
	defer close(c.done)
	select {
	case s.calls <- c:
	case <-s.closed:
		return status.Error(codes.Unavailable, "the server is closed")
	}
	select {
	case err := <-c.ended:
		return err
	case <-stream.Context().Done():
		return stream.Context().Err()
	case <-s.closed:
		return status.Error(codes.Unavailable, "the server is closed")
	}
}

// Address returns HOST:PORT.
func (s *CallServer) Address() string { return s.address }

// Accept waits for the next call.
func (s *CallServer) Accept() (*Call, error) {
	select {
	case c := <-s.calls:
		return c, nil
	case <-time.After(harness.Timeout):
		return nil, errors.New("no call came")
	}
}

// Close breaks all connections, and stops listening.
func (s *CallServer) Close() { s.close() }

// SendHeader sends the headers, which are otherwise sent with the first message.
func (c *Call) SendHeader() error { return c.stream.SendHeader(nil) }

// Send sends an encoded message.
func (c *Call) Send(message []byte) error {
	m := new(emptypb.Empty)
	m.ProtoReflect().SetUnknown(message)
	return c.stream.SendMsg(m)
}

// End ends the call, with an error of package status or nil.
func (c *Call) End(err error) error {
	select {
	case c.ended <- err:
		<-c.done
		return nil
	case <-c.done:
		return fmt.Errorf("the call has ended: %w", context.Cause(c.stream.Context()))
	}
}

// Done is closed when the call has ended.
func (c *Call) Done() <-chan struct{} { return c.done }
