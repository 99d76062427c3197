package wire

import (
	"bytes"
	"errors"
	"fmt"
	"net"
	"strings"
	"unicode/utf8"
)

// ErrTopic is a topic of another form than kv@<pod[:port]>@<model>.
var ErrTopic = errors.New("not kv@<pod[:port]>@<model>")

// ErrEpoch is a topic whose engine epoch is no hexadecimal number.
var ErrEpoch = errors.New("epoch is not hexadecimal")

const (
	epochSuffix    = "sgl-kv-epoch="
	snapshotSuffix = "sgl-kv-snapshot="
)

// Topic is what the topic of a publisher that connects to us says.
type Topic struct {
	// Pod names the worker, its port included where there is one.
	Pod string
	// Model may hold '@'.
	Model string
	// Epoch names the engine's life, and Snapshot one of its snapshots; both are
	// SGLang's, and empty where absent.
	Epoch    string
	Snapshot string
}

// Host returns the pod without its port.
func (t Topic) Host() string {
	if host, _, err := net.SplitHostPort(t.Pod); err == nil {
		return host
	}
	return strings.TrimSuffix(strings.TrimPrefix(t.Pod, "["), "]")
}

// ParseTopic reads kv@<pod[:port]>@<model>, with what SGLang appends to it. An
// error is an ErrTopic or an ErrEpoch.
func ParseTopic(topic []byte) (Topic, error) {
	name, epoch, snapshot := CutTopic(topic)
	if !isHex(epoch) {
		return Topic{}, fmt.Errorf("parse topic %q: %w", topic, ErrEpoch)
	}
	prefix, rest, _ := bytes.Cut(name, []byte("@"))
	pod, model, _ := bytes.Cut(rest, []byte("@"))
	if string(prefix) != "kv" || len(pod) == 0 || len(model) == 0 || !utf8.Valid(topic) {
		return Topic{}, fmt.Errorf("parse topic %q: %w", topic, ErrTopic)
	}
	return Topic{
		Pod:      string(pod),
		Model:    string(model),
		Epoch:    string(epoch),
		Snapshot: string(snapshot),
	}, nil
}

// CutTopic takes a topic of any form apart: the part before the first NUL, and
// the epoch and the snapshot that SGLang appends, empty where absent. All are
// parts of topic; nothing is allocated, so that it can be asked of each message.
func CutTopic(topic []byte) (name, epoch, snapshot []byte) {
	name, rest, _ := bytes.Cut(topic, []byte{0})
	for len(rest) > 0 {
		var suffix []byte
		suffix, rest, _ = bytes.Cut(rest, []byte{0})
		if v, ok := bytes.CutPrefix(suffix, []byte(epochSuffix)); ok {
			epoch = v
		} else if v, ok := bytes.CutPrefix(suffix, []byte(snapshotSuffix)); ok {
			snapshot = v
		}
	}
	return name, epoch, snapshot
}

func isHex(b []byte) bool {
	for _, c := range b {
		switch {
		case '0' <= c && c <= '9', 'a' <= c && c <= 'f', 'A' <= c && c <= 'F':
		default:
			return false
		}
	}
	return true
}
