package jetstream

// IsShared reports whether other processes may append to the stream.
func (j *Journal) IsShared() bool { return j.shared != nil }

// IsUnanswered is isUnanswered.
var IsUnanswered = isUnanswered
