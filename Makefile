# What each target does stands behind its ##; `make help` lists them.

GO ?= go
TOOLS := $(CURDIR)/bin/tools
SOURCES := $(shell git ls-files -co --exclude-standard '*.go' go.mod go.sum 2>/dev/null || echo go.mod)
COUNT ?= 1
BENCH ?= .
FUZZTIME ?= 20s
MINUTES ?= 10

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help demo demo-router test live clients soak fuzz mutate run build bench lint fmt proto grpcurl deps clean

help: ## List the targets.
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-11s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

demo: build ## Show the main job on this machine: engines, server, a router that is cut off and resumes.
	@bin/kvcast demo

demo-router: build ## Route a trace of requests by the engines' caches, and beside it round robin.
	$(GO) run ./examples/router -demo bin/kvcast

test: deps ## Run all tests with the race detector.
	@test -d bin/clients || echo "The examples in Python and Rust are not prepared, so their tests are skipped: make clients does it"
	@test -f bin/live/pins || echo "SGLang's own publisher is not here, so its test is skipped: make live fetches it"
	@# No test depends on the machine's speed. This limit is for one that hangs, on a machine ten times slower.
	$(GO) test -race -timeout 60m ./...
	@# What the race detector distorts or slows down: allocations, memory, small worlds explored exhaustively.
	$(GO) test -run 'Allocat|Memory|Exhaustive' ./client ./ingest/... ./pipeline

live: deps ## Test with SGLang's own publisher, which this fetches into bin/live.
	@tools/scripts/live.sh
	$(GO) test -race -count 1 -v -run LivePublisher ./cmd/kvcast

clients: deps ## Test the examples in Python and in Rust, which this prepares in bin/clients.
	@tools/scripts/clients.sh
	$(GO) test -race -count 1 -v -run 'ClientIn' ./cmd/kvcast

soak: deps ## Run a server under faults for MINUTES=10, and check it once a minute; ARGS=-race and others.
	$(GO) run ./test/soak -minutes $(MINUTES) $(ARGS)

fuzz: deps ## Fuzz what engines may send, and how entries are encoded, each target for FUZZTIME (20s).
	@for package in ./ingest/wire ./pipeline; do \
		for target in $$($(GO) test -list '^Fuzz' $$package | grep '^Fuzz'); do \
			$(GO) test -run '^$$' -fuzz "^$$target\$$" -fuzztime $(FUZZTIME) -fuzzminimizetime 20x $$package || exit 1; \
		done; \
	done

mutate: deps ## Negate conditions of journal and pipeline one at a time: some test must fail.
	tools/scripts/mutate.sh $(ARGS)

run: build ## Serve engines that connect to port 5557, until stopped.
	bin/kvcast serve

build: bin/kvcast ## Build bin/kvcast.

bin/kvcast: $(SOURCES) | deps
	$(GO) build -o $@ ./cmd/kvcast

bench: deps ## Run the benchmarks; BENCH=regexp chooses, COUNT=n repeats.
	$(GO) test -run '^$$' -bench '$(BENCH)' -benchmem -count $(COUNT) ./...

lint: deps $(TOOLS)/golangci-lint $(TOOLS)/buf ## Check code, contract, and that the contract breaks nobody.
	$(TOOLS)/golangci-lint run ./...
	$(TOOLS)/buf lint
	$(TOOLS)/buf format --diff --exit-code
	tools/scripts/breaking.sh $(TOOLS)/buf
	$(GO) mod tidy -diff

fmt: deps $(TOOLS)/golangci-lint $(TOOLS)/buf ## Format code and contract.
	$(TOOLS)/golangci-lint fmt ./...
	$(TOOLS)/buf format --write

proto: $(TOOLS)/buf $(TOOLS)/protoc-gen-go $(TOOLS)/protoc-gen-go-grpc ## Generate Go from the contract.
	PATH="$(TOOLS):$$PATH" $(TOOLS)/buf generate

grpcurl: $(TOOLS)/grpcurl ## Build bin/tools/grpcurl, to call the server by hand.

clean: ## Delete what was built.
	rm -rf bin

deps: # libzmq and pkg-config, where they are missing
	@tools/scripts/libzmq.sh

# Each tool is built when it is first needed, in the version that tools/go.mod pins.
tool = $(GO) -C tools build -o $@

$(TOOLS)/buf: tools/go.mod
	$(tool) github.com/bufbuild/buf/cmd/buf

$(TOOLS)/golangci-lint: tools/go.mod
	$(tool) github.com/golangci/golangci-lint/v2/cmd/golangci-lint

$(TOOLS)/gremlins: tools/go.mod
	$(tool) github.com/go-gremlins/gremlins/cmd/gremlins

$(TOOLS)/grpcurl: tools/go.mod
	$(tool) github.com/fullstorydev/grpcurl/cmd/grpcurl

$(TOOLS)/protoc-gen-go: tools/go.mod
	$(tool) google.golang.org/protobuf/cmd/protoc-gen-go

$(TOOLS)/protoc-gen-go-grpc: tools/go.mod
	$(tool) google.golang.org/grpc/cmd/protoc-gen-go-grpc
