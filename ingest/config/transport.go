package config

import "slices"

// ZMQ is an implementation of ZeroMQ.
type ZMQ string

const (
	// ZMQNative is the implementation in Go: ZMTP 3.0 and 3.1 with the NULL mechanism, over TCP
	// and Unix sockets. Whatever peers send, its memory is bounded, and it loses no message.
	ZMQNative ZMQ = "native"
	// ZMQLib is libzmq, in builds with cgo. It also speaks older versions of ZMTP.
	ZMQLib ZMQ = "libzmq"
)

// ZMQs returns the implementations of this build, beginning with first.
func ZMQs(first ZMQ) []ZMQ {
	all := []ZMQ{first}
	for _, z := range []ZMQ{ZMQNative, ZMQLib} {
		if z != first && (z != ZMQLib || HasLibzmq) {
			all = append(all, z)
		}
	}
	return all
}

func (z ZMQ) available() bool { return slices.Contains(ZMQs(ZMQNative), z) }

// AllowedZMQ describes valid values of ZMQ in errors.
func AllowedZMQ() string {
	if HasLibzmq {
		return "native or libzmq"
	}
	return "native: libzmq is not in this build, which has no cgo"
}
