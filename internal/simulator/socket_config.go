package simulator

import (
	"strings"
	"time"
)

// ReplayForm is how a replay socket answers.
type ReplayForm int

// The forms.
const (
	// ReplayTopic puts the topic before the seq: vLLM 0.26 and later,
	// TensorRT-LLM and llm-d-inference-sim.
	ReplayTopic ReplayForm = iota
	// ReplayPlain does not: vLLM before 0.26, and SGLang.
	ReplayPlain
)

// Mode is whether a PUB socket binds or connects.
type Mode int

// The modes.
const (
	// ModeAuto is vLLM's rule: bind where the host is * or ::, or the transport
	// is ipc or inproc, else connect. Beyond it, a port that is 0 or * binds.
	ModeAuto Mode = iota
	// ModeBind binds.
	ModeBind
	// ModeConnect connects.
	ModeConnect
)

// binds tells what a mode comes to at an endpoint.
func (m Mode) binds(endpoint string) bool {
	if m != ModeAuto {
		return m == ModeBind
	}
	return strings.Contains(endpoint, "*") || strings.Contains(endpoint, "::") ||
		strings.HasPrefix(endpoint, "ipc://") || strings.HasPrefix(endpoint, "inproc://") ||
		strings.HasSuffix(endpoint, ":0")
}

// SocketConfig says where and how events are published.
type SocketConfig struct {
	// Endpoint is the PUB socket's; empty means tcp://127.0.0.1:*.
	Endpoint string
	// Mode is whether it binds or connects.
	Mode Mode
	// Topic is the first frame of each message, such as kv@10.0.0.5@model.
	Topic string
	// HWM is the number of messages a subscriber may be behind before its next
	// ones are dropped; 0 means vLLM's 100,000.
	HWM int

	// Replay is the endpoint that the ROUTER socket binds to; empty means none.
	Replay string
	// ReplayForm is how it answers.
	ReplayForm ReplayForm
	// ReplayLimit is the number of batches it remembers; 0 means vLLM's 10,000.
	ReplayLimit int
	// ReplayHWM is the number of replies a reader may be behind before its next
	// ones are dropped without a word; 0 means ZeroMQ's 1,000, as at vLLM.
	ReplayHWM int
	// ReplayPoll is how often a publisher that has nothing to publish looks at its
	// ROUTER socket, for one request: 100 ms at vLLM. 0 means at once. After each
	// batch it looks in any case.
	ReplayPoll time.Duration
}

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
