package main_test

import (
	"encoding/binary"
	"testing"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/encoding/protowire"
	"google.golang.org/protobuf/types/known/emptypb"

	"github.com/kvcast/kvcast/internal/core/testclass"
	"github.com/kvcast/kvcast/internal/simulator"
	"github.com/kvcast/kvcast/internal/wire"
)

// TestSGLangMatchesWithCredentials asks a server with tokens for the worker of a prompt, as SGLang's router does.
func TestSGLangMatchesWithCredentials(t *testing.T) {
	testclass.Process(t)
	t.Parallel()
	tokens := secretFile(t, "tokens", "router "+routersToken+"\n")
	file := secretFile(t, "kvcast.yaml", "egress: {sglang: {enabled: true, workers: [{worker: w, address: \"http://10.0.0.7:30000\"}]}}\n")
	p, err := simulator.NewPublisher(simulator.PublisherConfig{SocketConfig: simulator.SocketConfig{Replay: "tcp://127.0.0.1:*"}})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = p.Close() })
	publish(t, p, wire.Event{Kind: wire.KindStored, BlockHashes: []uint64{1, 2}, Tokens: []uint32{1, 2, 3, 4}, BlockSize: 2})
	s := serve(t, "--config", file, "--auth-tokens", tokens, "--worker", "name=w,model=m,connect="+p.Endpoint()+",replay="+p.ReplayEndpoint())
	s.AwaitLog(`msg=serving grpc=(\S+)`)
	conn, err := grpc.NewClient(s.Address(), grpc.WithTransportCredentials(insecure.NewCredentials()))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = conn.Close() })
	var packed []byte
	for _, hash := range []uint64{1, 2, 3} {
		packed = binary.LittleEndian.AppendUint64(packed, hash)
	}
	request := new(emptypb.Empty)
	request.ProtoReflect().SetUnknown(protowire.AppendBytes(protowire.AppendTag(nil, 1, protowire.BytesType), packed))
	const want = "\n\x1c\n\x15http://10.0.0.7:30000\x10\x02\x1a\x01w\x10\x02\x18\x03" // matches {address, 2 blocks, w}, best 2, read 3
	for token, code := range map[string]codes.Code{routersToken: codes.OK, "": codes.Unauthenticated, routersToken + "x": codes.Unauthenticated} {
		ctx := t.Context()
		if token != "" {
			ctx = metadata.AppendToOutgoingContext(ctx, "authorization", "Bearer "+token)
		}
		answer := new(emptypb.Empty)
		err := conn.Invoke(ctx, "/kv_indexer.v1.KVIndexer/MatchExternalKvPrefix", request, answer)
		if status.Code(err) != code {
			t.Errorf("token %q: got %v, want %s", token, err, code)
		}
		if got := string(answer.ProtoReflect().GetUnknown()); err == nil && got != want {
			t.Errorf("got  %q\nwant %q", got, want)
		}
	}
}
