package main_test

import (
	"errors"
	"io"
	"testing"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/types/known/emptypb"

	"github.com/kvcast/kvcast/internal/core/testclass"
)

// TestSMGNeedsTheCredentialsOfARouter subscribes to events as SMG does, at a server with tokens, until it is stopped.
func TestSMGNeedsTheCredentialsOfARouter(t *testing.T) {
	testclass.Process(t)
	t.Parallel()
	tokens := secretFile(t, "tokens", "router "+routersToken+"\n")
	s := serve(t, "--auth-tokens", tokens, "--emit-token-ids", "--retain-token-ids", "--egress-smg-enabled", "--bind", "tcp://127.0.0.1:*")
	conn, err := grpc.NewClient(s.Address(), grpc.WithAuthority("unknown"), grpc.WithTransportCredentials(insecure.NewCredentials()))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = conn.Close() })
	call := func(method, token string) codes.Code {
		ctx := t.Context()
		if token != "" {
			ctx = metadata.AppendToOutgoingContext(ctx, "authorization", "Bearer "+token)
		}
		stream, err := conn.NewStream(ctx, &grpc.StreamDesc{ServerStreams: true}, method)
		if err == nil {
			err = errors.Join(ignoreEOF(stream.SendMsg(new(emptypb.Empty))), stream.CloseSend())
		}
		if err == nil {
			err = stream.RecvMsg(new(emptypb.Empty))
		}
		return status.Code(err)
	}
	const engine = "/vllm.grpc.engine.VllmEngine/"
	for _, tt := range []struct {
		name, method, token string
		want                codes.Code
	}{
		{"a router", engine + "SubscribeKvEvents", routersToken, codes.NotFound},
		{"a router at SGLang's service", "/sglang.grpc.scheduler.SglangScheduler/SubscribeKvEvents", routersToken, codes.NotFound},
		{"another method", engine + "Generate", routersToken, codes.Unimplemented},
		{"no token", engine + "SubscribeKvEvents", "", codes.Unauthenticated},
		{"a wrong token", engine + "SubscribeKvEvents", routersToken + "x", codes.Unauthenticated},
	} {
		if got := call(tt.method, tt.token); got != tt.want {
			t.Errorf("%s: got %s, want %s", tt.name, got, tt.want)
		}
	}
}

// ignoreEOF drops the error that says that RecvMsg has the status.
func ignoreEOF(err error) error {
	if errors.Is(err, io.EOF) {
		return nil
	}
	return err
}
