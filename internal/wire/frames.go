package wire

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"math"
	"net"
	"strings"
	"unicode/utf8"
)

// ErrReply is a message of a replay socket that is not a reply.
var ErrReply = errors.New("not a replay reply")

// Topic is the topic of a publisher that connects to kvcast.
type Topic struct {
	// Pod names the worker. It may include a port.
	Pod string
	// Model may contain '@'.
	Model string
}

// Host returns the pod without its port.
func (t Topic) Host() string {
	if host, _, err := net.SplitHostPort(t.Pod); err == nil {
		return host
	}
	return strings.TrimSuffix(strings.TrimPrefix(t.Pod, "["), "]")
}

// ParseTopic parses kv@<pod[:port]>@<model>. SGLang may append an epoch in hexadecimal, and other suffixes.
func ParseTopic(topic []byte) (Topic, error) {
	name, epoch := CutTopic(topic)
	if len(bytes.Trim(epoch, "0123456789abcdefABCDEF")) != 0 {
		return Topic{}, fmt.Errorf("parse topic %q: epoch is not hexadecimal", topic)
	}
	prefix, rest, _ := bytes.Cut(name, []byte("@"))
	pod, model, _ := bytes.Cut(rest, []byte("@"))
	if string(prefix) != "kv" || len(pod) == 0 || len(model) == 0 || !utf8.Valid(topic) {
		return Topic{}, fmt.Errorf("parse topic %q: not kv@<pod[:port]>@<model>", topic)
	}
	return Topic{Pod: string(pod), Model: string(model)}, nil
}

// epochKey precedes an epoch in a topic.
const epochKey = "sgl-kv-epoch="

// TopicWithEpoch returns a topic with an epoch, as CutTopic splits it.
func TopicWithEpoch(name, epoch string) string { return name + "\x00" + epochKey + epoch }

// CutTopic splits a topic of any form into the part before the first NUL, and the epoch that SGLang appends, which identifies the engine's
// incarnation; empty if it is absent. The results are views of topic: CutTopic does not allocate, because it is called for each message.
func CutTopic(topic []byte) (name, epoch []byte) {
	name, rest, _ := bytes.Cut(topic, []byte{0})
	for len(rest) > 0 {
		var suffix []byte
		suffix, rest, _ = bytes.Cut(rest, []byte{0})
		if v, ok := bytes.CutPrefix(suffix, []byte(epochKey)); ok {
			epoch = v
		}
	}
	return name, epoch
}

// ParseReply parses a message that a DEALER receives from an engine's replay socket. It counts frames from the last one, because newer
// engines put a topic before the seq. end reports whether the message is the marker after the last batch, whose seq no batch has; then seq and payload are
// empty. vLLM's has no payload, and ATOM's has the oldest and the newest seq that it can replay. The payload is one of the frames.
func ParseReply(frames [][]byte) (seq uint64, payload []byte, end bool, err error) {
	if len(frames) < 2 {
		return 0, nil, false, fmt.Errorf("parse reply: %d frames: %w", len(frames), ErrReply)
	}
	payload = frames[len(frames)-1]
	number := frames[len(frames)-2]
	if len(number) != 8 {
		return 0, nil, false, fmt.Errorf("parse reply: seq of %d bytes: %w", len(number), ErrReply)
	}
	seq = binary.BigEndian.Uint64(number)
	if seq == math.MaxUint64 {
		return 0, nil, true, nil
	}
	return seq, payload, false, nil
}
