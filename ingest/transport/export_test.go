package transport

// KeptFrames is the number of frames of a message that are kept.
const KeptFrames = keptFrames

// Send is send.
func (s *Socket) Send(frames ...any) error { return s.send(frames...) }
