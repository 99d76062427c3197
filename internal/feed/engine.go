package feed

import "slices"

// Engine is the kind of program that publishes events.
type Engine string

// The known engines.
const (
	EngineVLLM    Engine = "vllm"
	EngineSGLang  Engine = "sglang"
	EngineTRTLLM  Engine = "trtllm"
	EngineKVBM    Engine = "kvbm"
	EngineLLMDSim Engine = "llm-d-sim"
	// EngineLMCache is LMCache's multiprocess server, a pool: see Worker.Pool.
	EngineLMCache Engine = "lmcache"
	// EngineLMCacheCoordinator is LMCache's coordinator, which knows what several servers of LMCache hold, a pool.
	EngineLMCacheCoordinator Engine = "lmcache-coordinator"
	// EngineMooncake is a Mooncake store, which is read as a pool: see Worker.Pool.
	EngineMooncake Engine = "mooncake"
	// EngineWorkers is a store that cannot be asked, a pool that holds what workers announce: see Worker.Pool.
	EngineWorkers Engine = "workers"
)

// Known reports whether the engine is one of the constants.
func (e Engine) Known() bool {
	return slices.Contains([]Engine{EngineVLLM, EngineSGLang, EngineTRTLLM, EngineKVBM, EngineLLMDSim}, e) || e.IsPool()
}

// IsPool reports whether the engine is a store that workers load from.
func (e Engine) IsPool() bool { return e == EngineLMCache || e.HasContents() }

// HasContents reports whether the engine is a pool whose contents are known from other workers.
func (e Engine) HasContents() bool {
	return e == EngineLMCacheCoordinator || e == EngineMooncake || e == EngineWorkers
}

// FirstSeq returns the engine seq of the first batch after a start of the engine.
func (e Engine) FirstSeq() uint64 {
	if e == EngineLLMDSim || e.IsPool() {
		return 1
	}
	return 0
}

// Consolidate is how the pipeline combines the events of a worker with several sources.
type Consolidate string

const (
	// ConsolidateDedup emits a store when the first source stores a block, and a remove when the last source
	// removes it.
	ConsolidateDedup Consolidate = "dedup"
	// ConsolidatePassthrough emits the events of each source with their own tiers and names. Copies of a block are counted in
	// each tier, whichever source stores them: after two stores, the first remove is not emitted.
	ConsolidatePassthrough Consolidate = "passthrough"
)
