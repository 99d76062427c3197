package feed

// Engine is the kind of program that publishes events.
type Engine string

// The engines.
const (
	EngineVLLM    Engine = "vllm"
	EngineSGLang  Engine = "sglang"
	EngineTRTLLM  Engine = "trtllm"
	EngineKVBM    Engine = "kvbm"
	EngineLLMDSim Engine = "llm-d-sim"
)

// Known reports whether e is one of the engines above.
func (e Engine) Known() bool {
	switch e {
	case EngineVLLM, EngineSGLang, EngineTRTLLM, EngineKVBM, EngineLLMDSim:
		return true
	default:
		return false
	}
}

// FirstSeq returns the seq of the first batch of an incarnation.
func (e Engine) FirstSeq() uint64 {
	if e == EngineLLMDSim {
		return 1
	}
	return 0
}

// Consolidate is how the events of a worker's several sources are consolidated.
type Consolidate string

const (
	// ConsolidateDedup emits a block once, while any source holds it.
	ConsolidateDedup Consolidate = "dedup"
	// ConsolidatePassthrough emits each source's events unchanged, in their own tiers.
	ConsolidatePassthrough Consolidate = "passthrough"
)
