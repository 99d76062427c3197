package zmtp

// Reason classifies an Error. Its value is a metric label.
type Reason string

// The reasons.
const (
	// ReasonProtocol: the peer violates ZMTP, or speaks another protocol.
	ReasonProtocol Reason = "protocol"
	// ReasonVersion: the peer speaks ZMTP 2.0 or older.
	ReasonVersion Reason = "version"
	// ReasonMechanism: the peer requires a security mechanism other than NULL.
	ReasonMechanism Reason = "mechanism"
	// ReasonSocketType: the peer's socket type does not go with this side's.
	ReasonSocketType Reason = "socket_type"
	// ReasonRefused: the peer sent an ERROR command.
	ReasonRefused Reason = "refused"
	// ReasonFrames: a message exceeds Limits.Frames.
	ReasonFrames Reason = "frames"
	// ReasonBytes: a message exceeds Limits.Bytes.
	ReasonBytes Reason = "bytes"
	// ReasonCommands: the peer sends commands faster than Limits.Commands.
	ReasonCommands Reason = "commands"
	// ReasonHandshake: the handshake was not completed within Limits.Handshake.
	ReasonHandshake Reason = "handshake"
	// ReasonHeartbeat: the peer did not answer a PING within Limits.Heartbeat.
	ReasonHeartbeat Reason = "heartbeat"
)

// Error is why a Session failed. The connection must be closed.
type Error struct {
	Reason Reason
	Detail string
}

func (e *Error) Error() string { return e.Detail }
