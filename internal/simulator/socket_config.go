package simulator

import (
	"strings"
	"time"
)

// ReplayForm is the form of a replay socket's answers.
type ReplayForm int

// The forms.
const (
	// ReplayTopic has the topic before the seq: vLLM 0.26 and later, TensorRT-LLM and
	// llm-d-inference-sim.
	ReplayTopic ReplayForm = iota
	// ReplayPlain has no topic: vLLM before 0.26, and SGLang.
	ReplayPlain
)

// Mode is whether a PUB socket binds or connects.
type Mode int

// The modes.
const (
	// ModeAuto is vLLM's rule: bind if the host is * or ::, or the transport is ipc,
	// otherwise connect. In addition, a port that is 0 or * binds.
	ModeAuto Mode = iota
	// ModeBind binds.
	ModeBind
	// ModeConnect connects.
	ModeConnect
)

// binds reports whether a mode binds at an endpoint.
func (m Mode) binds(endpoint string) bool {
	if m != ModeAuto {
		return m == ModeBind
	}
	return strings.Contains(endpoint, "*") || strings.Contains(endpoint, "::") ||
		strings.HasPrefix(endpoint, "ipc://") ||
		strings.HasSuffix(endpoint, ":0")
}

// SocketConfig configures the sockets of an engine.
type SocketConfig struct {
	// Endpoint is the PUB socket's; empty means tcp://127.0.0.1:*.
	Endpoint string
	// Mode is whether the PUB socket binds or connects.
	Mode Mode
	// Topic is the first frame of each message, such as kv@10.0.0.5@model.
	Topic string
	// HWM is the number of messages that a subscriber may be behind before further ones are
	// dropped; 0 means vLLM's 100,000.
	HWM int

	// Replay is the endpoint that the ROUTER socket binds to; empty means none.
	Replay string
	// ReplayForm is the form of the answers to replay requests.
	ReplayForm ReplayForm
	// ReplayLimit is the number of batches buffered for replay; 0 means vLLM's 10,000.
	ReplayLimit int
	// ReplayHWM is the number of replies that a reader may be behind before further ones are
	// silently dropped; 0 means ZeroMQ's 1,000, as in vLLM.
	ReplayHWM int
	// ReplayPoll is the interval at which an idle publisher polls its ROUTER socket for a request:
	// 100 ms in vLLM. 0 means that requests are answered at once. The publisher also polls after
	// each batch.
	ReplayPoll time.Duration

	// Snapshot is the endpoint that the socket for snapshots binds to; empty means none. With it, batches have a
	// publisher id, or live topics an epoch, and those of a restarted engine another.
	Snapshot string
	// SnapshotForm is the form of the snapshots.
	SnapshotForm SnapshotForm
}

// SnapshotForm is the form of an engine's snapshots.
type SnapshotForm int

// The forms, as of November 2026.
const (
	// SnapshotVLLM is that of the proposal for vLLM, pull request 57789.
	SnapshotVLLM SnapshotForm = iota
	// SnapshotSGLang is that of SGLang's builds with a snapshot_endpoint: hashes and parents, of a set of blocks.
	SnapshotSGLang
)

func (c SocketConfig) withDefaults() SocketConfig {
	if c.Endpoint == "" {
		c.Endpoint = "tcp://127.0.0.1:*"
	}
	if c.HWM == 0 {
		c.HWM = 100_000
	}
	if c.ReplayLimit == 0 {
		c.ReplayLimit = 10_000
	}
	if c.ReplayHWM == 0 {
		c.ReplayHWM = 1_000
	}
	return c
}
