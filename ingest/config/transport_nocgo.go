//go:build !cgo

package config

// HasLibzmq reports whether this build has ZMQLib.
const HasLibzmq = false

// DefaultConnectZMQ is the default implementation for connecting to engines.
const DefaultConnectZMQ = ZMQNative
