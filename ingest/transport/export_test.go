package transport

import "github.com/pebbe/zmq4"

// OpenCopying is Open without access to libzmq's handle.
func OpenCopying(s *zmq4.Socket) (*Socket, error) { return open(s, false) }

// KeptFrames is the number of frames of a message that are kept.
const KeptFrames = keptFrames

// HandleKnown reports whether Open can access libzmq's handle.
var HandleKnown = handleKnown
