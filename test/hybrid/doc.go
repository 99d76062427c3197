// Package hybrid plays recordings of vLLM with several attention groups, and compares the rule of package index/hybrid with what
// the engine reused.
package hybrid
