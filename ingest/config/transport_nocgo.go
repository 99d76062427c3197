//go:build !cgo

package config

// HasLibzmq reports whether this build has ZMQLib.
const HasLibzmq = false

// DefaultZMQ is the default implementation.
const DefaultZMQ = ZMQNative
