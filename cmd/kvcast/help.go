package main

import "strings"

// examples writes command lines for a command's help.
func examples(lines ...string) string {
	return "Examples:\n\n  " + strings.Join(lines, "\n  ") + "\n"
}

// Help shows what people do with the command.
func (*subscribeCmd) Help() string {
	return examples(
		"kvcast subscribe",
		"kvcast subscribe --from latest --worker vllm-0 --tier device",
		"kvcast subscribe --after 4f1c9a20d3b7e865:1042",
		"kvcast subscribe --from earliest -o json | jq -r 'select(.event.gap)'")
}

// Help shows what people do with the command.
func (*replayCmd) Help() string {
	return examples(
		"kvcast replay",
		"kvcast replay --after :1000 --until :2000 --worker vllm-0",
		"kvcast replay -o json > entries.jsonl") + `
A replay that can not be complete fails, and says which entries the server retains.`
}

// Help shows what people do with the command.
func (*snapshotCmd) Help() string {
	return examples(
		"kvcast snapshot --worker vllm-0",
		"kvcast snapshot -o json > blocks.jsonl")
}

// Help shows what people do with the command.
func (*workersCmd) Help() string {
	return examples(
		"kvcast workers",
		"kvcast workers --model Qwen/Qwen3-0.6B",
		"kvcast workers -o json | jq -r 'select(.state != \"WORKER_STATE_LIVE\").name'") + `
SOURCE is how the reading of an engine is doing: connecting, catching_up (its replay is read), live, repairing (a replay after a gap), suspect (nothing has come for long), stopped. A rank that is INCOMPLETE may hold blocks that are not known, or not hold some that are.`
}

// Help shows what people do with the command.
func (*statusCmd) Help() string {
	return examples("kvcast status", "kvcast status --addr kvcast.default.svc:50051 -o json")
}

// Help shows what people do with the command.
func (*simulateCmd) Help() string {
	return examples(
		"kvcast simulate --connect tcp://localhost:5557 --replay tcp://127.0.0.1:5558",
		"kvcast simulate --bind tcp://127.0.0.1:5557 --replay tcp://127.0.0.1:5558 --batches 1000",
		"kvcast simulate --trace conversation --speed 60 --engines 4 --policy prefix",
		"kvcast simulate --replay tcp://127.0.0.1:5558 --faults drop=0.01,restart@500")
}

// Help shows what people do with the command.
func (*decodeCmd) Help() string {
	return examples("kvcast decode payload.bin", "kvcast decode recording.jsonl.gz", "cat payload.bin | kvcast decode -")
}

// Help shows what people do with the command.
func (*demoCmd) Help() string { return examples("kvcast demo") }

// Help shows what people do with the command.
func (*versionCmd) Help() string { return examples("kvcast version") }
