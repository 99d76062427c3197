package feed

// Engine is what publishes events.
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

// FirstSeq is the seq of the first batch of an incarnation.
func (e Engine) FirstSeq() uint64 {
	if e == EngineLLMDSim {
		return 1
	}
	return 0
}

// Consolidate is what becomes of the events of a worker's several sources.
type Consolidate string

const (
	// ConsolidateDedup tells of a block once, as long as any source holds it.
	ConsolidateDedup Consolidate = "dedup"
	// ConsolidatePassthrough lets each source's events go on as they are, with their
	// own tiers.
	ConsolidatePassthrough Consolidate = "passthrough"
)
