package server

import (
	"google.golang.org/grpc/encoding"
	"google.golang.org/grpc/encoding/proto" // registers the fallback
	"google.golang.org/grpc/mem"
)

// frame is a message that is encoded already.
type frame struct {
	data mem.BufferSlice
}

// codec passes frames through as they are, and leaves every other message
// (requests, health, reflection) to gRPC's own codec for protobuf.
type codec struct {
	encoding.CodecV2
}

func newCodec() codec { return codec{CodecV2: encoding.GetCodecV2(proto.Name)} }

// Marshal implements encoding.CodecV2.
func (c codec) Marshal(v any) (mem.BufferSlice, error) {
	if f, ok := v.(*frame); ok {
		return f.data, nil
	}
	return c.CodecV2.Marshal(v)
}
