// Package routers tests egress with the consumers' own code: llm-d's pool of KV events in a module of its own (llmd), a subscriber with the
// message classes of vLLM in Python (testdata/subscriber.py), vLLM's router, SMG's generated client in Python (testdata/gateway.py), and its relay of engines' events as a source of kvcast (testdata/relay.py), and the types of Dynamo's crate in Rust (testdata/dynamo). make routers prepares them;
// without them, the tests are skipped.
package routers
