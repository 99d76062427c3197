module github.com/kvcast/kvcast/internal/core

go 1.26.0

require (
	github.com/google/go-cmp v0.7.0
	github.com/kvcast/kvcast/proto v0.1.0
	github.com/zeebo/xxh3 v1.1.0
	go.uber.org/goleak v1.3.0
	google.golang.org/protobuf v1.36.12
	pgregory.net/rapid v1.3.0
)

require (
	github.com/klauspost/cpuid/v2 v2.2.10 // indirect
	golang.org/x/net v0.60.0 // indirect
	golang.org/x/sys v0.48.0 // indirect
	golang.org/x/text v0.42.0 // indirect
	google.golang.org/genproto/googleapis/rpc v0.0.0-20260817212433-ac3dfec99bb1 // indirect
	google.golang.org/grpc v1.85.0 // indirect
)

replace github.com/kvcast/kvcast/proto => ../../proto
