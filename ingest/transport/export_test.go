package transport

import "github.com/pebbe/zmq4"

// OpenCopying is Open where libzmq's handle is out of reach.
func OpenCopying(s *zmq4.Socket) (*Socket, error) { return open(s, false) }

// KeptFrames is how many frames of a message are kept.
const KeptFrames = keptFrames

// HandleKnown tells whether Open reaches libzmq's handle.
var HandleKnown = handleKnown
