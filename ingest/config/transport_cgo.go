//go:build cgo

package config

// HasLibzmq reports whether this build has ZMQLib.
const HasLibzmq = true

// DefaultZMQ is the default implementation.
const DefaultZMQ = ZMQLib
