package config

// ZMQ is an implementation of ZeroMQ.
type ZMQ string

const (
	// ZMQNative is the implementation in Go: ZMTP 3.0 and 3.1 with the NULL mechanism, over TCP
	// and Unix sockets. Whatever peers send, its memory is bounded, and it loses no message.
	ZMQNative ZMQ = "native"
	// ZMQLib is libzmq, in builds with cgo. It also speaks older versions of ZMTP.
	ZMQLib ZMQ = "libzmq"
)

// Available reports whether the implementation exists and is in this build.
func (z ZMQ) Available() bool { return z == ZMQNative || z == ZMQLib && HasLibzmq }

// AllowedZMQ describes valid values of ZMQ in errors.
func AllowedZMQ() string {
	if HasLibzmq {
		return "native or libzmq"
	}
	return "native: libzmq is not in this build, which has no cgo"
}
