# The text after ## describes a target; `make help` lists them.

GO ?= go
TOOLS := $(CURDIR)/bin/tools
# The shared cache can contain issues of other checkouts.
export GOLANGCI_LINT_CACHE := $(CURDIR)/bin/lint-cache
COUNT ?= 1
BENCH ?= .
FUZZTIME ?= 100000x
MINUTES ?= 10
KILLS ?= 200
SEED ?= 1
# The version of binaries and images: the tag of the commit, and a number of commits and a hash after it. Tags of other modules, such
# as client/v1.2.3, do not count.
VERSION ?= $(shell git describe --tags --match 'v[0-9]*' --always --dirty 2>/dev/null)

# Whether to build with cgo, and so with libzmq and the race detector: 1 or 0. Determined on first use.
CGO = $(eval CGO := $(shell CGO_ENABLED=$(CGO_ENABLED) tools/scripts/cgo.sh $(GO)))$(CGO)
go = CGO_ENABLED=$(CGO) $(GO)
race = $(if $(filter 1,$(CGO)),-race)

# Runs the tests of the classes that it is given, which tests declare: see go doc ./internal/core/testclass.
suite = CGO_ENABLED=$(CGO) $(GO) run ./test/run
CLASSES ?= quick
# Patterns of packages; work are all of kvcast, in each of its modules.
PACKAGES ?= work

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help demo demo-cluster demo-console demo-restart demo-router demo-llmd test test-all prepare live peers clients routers vllm tunnels observe console-test soak restarts cluster upgrades fuzz mutate run build build-static man docs dist dist-clients release-check release-trial cosign bench bench-report bench-scale costs bench-indexers lint fmt proto grpcurl kube-apiserver image chart-docs deploy-check libzmq clean

help: ## List the targets.
	@awk -F ':.*## ' '/^[a-z-]+:.*## / && !seen[$$1]++ { printf "  make %-19s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

demo: build ## Run engines, a server and a router that reconnects and resumes, and check the result.
	@bin/kvcast demo

demo-restart: build ## Kill a server with a journal in files, restart it, and check that a router resumes and nothing is lost.
	@bin/kvcast demo --restart

demo-cluster: build ## Kill one of three servers that share a journal in a NATS server, and check that the others read its engines and a router loses nothing.
	@bin/kvcast demo --cluster

demo-console: build ## Run engines with faults and routers, and print the address of the console.
	@bin/kvcast demo --console

demo-router: build ## Route a trace of requests by cached prefix and round robin, and compare the hit rates.
	$(go) run ./examples/router -demo bin/kvcast

demo-llmd: ## Run simulated engines, a server and pools of llm-d that read it, with faults and restarts, and check that their views are equal.
	@GO=$(GO) tools/scripts/routers.sh llmd
	$(suite) -class peers -run LLMDPool ./test/routers

test: ## Run the tests of class quick, with the race detector if there is cgo: a few minutes. CLASSES (quick) and PACKAGES (work) select others, RACE=0 is without it.
	$(suite) -class $(CLASSES) $(if $(RACE),-race=$(RACE)) $(PACKAGES)

test-all: VLLM := 1
test-all: libzmq prepare docs kube-apiserver $(TOOLS)/helm $(TOOLS)/helm-docs $(TOOLS)/kubeconform $(TOOLS)/ghostunnel ## Run each test there is at full size, and check that none was left out; needs root and etcd, and takes hours.
	$(suite) -forget
	$(suite) -class quick,exhaustive,packaging,peers,live -timeout 3h
	$(suite) -class process
	$(suite) -class process -full -race=0 -timeout 3h
	$(suite) -class cluster,soak -full -p 1 -timeout 3h
	$(suite) -check -class all
	$(MAKE) fuzz
	$(MAKE) dist
	$(MAKE) dist-clients
	$(MAKE) image

prepare: ## Prepare in bin what the tests of classes live, peers and process need of other projects: publishers, routers, clients, Chromium, Prometheus, valgrind; with VLLM=1 also vLLM, and the endpoint picker of the Gateway API Inference Extension.
	@$(MAKE) --no-print-directory -j8 prepare-live prepare-peers prepare-clients prepare-llmd prepare-python prepare-vllm_router prepare-smg prepare-lmcache prepare-mooncake prepare-rust prepare-packages \
		$(if $(filter 1,$(VLLM)),prepare-vllm prepare-epp)

# Parts of prepare that can run at the same time.
.PHONY: prepare-live prepare-peers prepare-clients prepare-vllm prepare-llmd prepare-epp prepare-python prepare-vllm_router prepare-smg prepare-lmcache prepare-mooncake prepare-rust prepare-packages
prepare-live prepare-peers prepare-clients prepare-vllm:
	@tools/scripts/$(@:prepare-%=%).sh
prepare-llmd prepare-epp prepare-python prepare-vllm_router prepare-smg prepare-lmcache prepare-mooncake prepare-rust:
	@GO=$(GO) tools/scripts/routers.sh $(@:prepare-%=%)
prepare-packages:
	@tools/scripts/console.sh bin/console
	@tools/scripts/prometheus.sh bin/prometheus
	@tools/scripts/valgrind.sh

live: ## Fetch SGLang's publisher into bin/live, and test with it.
	@tools/scripts/live.sh
	$(suite) -class live ./cmd/kvcast

peers: ## Prepare peers of other ZeroMQ implementations in bin/peers, and test with them.
	@tools/scripts/live.sh
	@tools/scripts/peers.sh
	$(suite) -class peers ./test/interop

clients: ## Prepare the clients in bin/clients, and test them and the examples that use them.
	@tools/scripts/clients.sh
	$(suite) -class quick,peers ./test/conformance
	$(suite) -class peers -run Client ./cmd/kvcast

dist-clients: ## Write what would be published of the clients to bin/dist/clients: a wheel, a crate and a tarball.
	@tools/scripts/clients.sh
	tools/scripts/dist-clients.sh

routers: ## Prepare llm-d's pool, vLLM's message classes and router, SMG's client, Dynamo's crate and an endpoint picker in bin/routers, and test with them.
	@GO=$(GO) tools/scripts/routers.sh
	$(suite) -class peers ./test/routers

# VERSION is vLLM's here, if the command line has one.
vllm: vllm_version = $(if $(filter command,$(firstword $(origin VERSION))),$(VERSION),0.32.0)
vllm: ## Prepare vLLM's build for CPUs, VERSION (0.32.0), in bin/vllm (6 GB), and test with it: each answer that says EXACT is compared with what the engine reuses.
	@tools/scripts/vllm.sh $(vllm_version)
	@rm -f bin/test/vllm.md
	KVCAST_VLLM_VERSION=$(vllm_version) $(suite) -class peers -timeout 3h ./test/vllm; status=$$?; cat bin/test/vllm.md 2>/dev/null; exit $$status

tunnels: $(TOOLS)/ghostunnel ## Build ghostunnel, and test the commands of docs/tunnels.md with it.
	$(suite) -class packaging ./test/tunnel

observe: ## Test metrics, traces, the dashboard and the alert rules, with Prometheus in bin/prometheus if it is not installed.
	@tools/scripts/prometheus.sh bin/prometheus
	$(suite) -class quick,process ./test/observe

console-test: ## Test the console in headless Chromium, which is installed with apt if need be, and with axe-core from npm; ARGS are flags, such as -screenshots=DIR.
	@tools/scripts/console.sh bin/console
	$(suite) -class process ./test/console -- $(ARGS)

soak: ## Run a server under faults for MINUTES (10) and check it every minute; ARGS are further flags, such as -race or -transport=native.
	$(go) run ./test/soak -minutes $(MINUTES) $(ARGS)

restarts: ## Kill a server at KILLS (200) random points and at each kind of file operation, and fail those operations, restart it, and check that nothing is lost; ARGS are further flags, such as -seed=2.
	@# Tests wait for timers more than they compute.
	$(suite) -class quick,process,exhaustive -race=0 -parallel 5 -timeout 2h ./test/restart -- -kills $(KILLS) -lossless $(ARGS)

cluster: ## Kill, pause and isolate servers that share a journal in NATS servers, at random for MINUTES (10) with SEED (1), and check that nothing is lost; ARGS are further flags, such as -logs=DIR.
	$(suite) -class cluster -timeout 24h ./test/cluster -- -minutes $(MINUTES) -seed $(SEED) $(ARGS)
	@cat bin/test/takeover.md

upgrades: ## Upgrade servers with each kind of journal, and downgrade them, between this version and OTHER, the path of a build of kvcast (this version again), and print for how long routers got nothing.
	$(suite) -class process,cluster -race=0 -parallel 1 -timeout 1h ./test/upgrade -- $(if $(OTHER),-other $(abspath $(OTHER))) $(ARGS)
	@cat bin/test/upgrades.md

fuzz: ## Fuzz the decoders and encoders, each target with FUZZTIME (100000x) inputs; a duration can fail where it ends, see golang/go#75804.
	$(suite) -fuzz $(FUZZTIME) $(PACKAGES)

mutate: ## Negate conditions of journal and pipeline one at a time: some test must fail.
	CGO_ENABLED=$(CGO) tools/scripts/mutate.sh $(ARGS)

run: build ## Serve engines that connect to port 5557.
	bin/kvcast serve

build: ## Build bin/kvcast, with libzmq if there is cgo.
	$(go) build -o bin/kvcast ./cmd/kvcast

# What releases are linked with.
ldflags = -s -w -X github.com/kvcast/kvcast/cmd/kvcast/internal/cli.version=$(VERSION)

# The platforms of build-static.
PLATFORMS := linux/amd64 linux/arm64 darwin/amd64 darwin/arm64

build-static: ## Build bin/kvcast-OS-ARCH without cgo for each platform: static, with the native transport alone.
	@for platform in $(PLATFORMS); do \
		os=$${platform%/*} arch=$${platform#*/}; \
		echo "bin/kvcast-$$os-$$arch"; \
		CGO_ENABLED=0 GOOS=$$os GOARCH=$$arch $(GO) build -trimpath \
			-ldflags '$(ldflags)' -o bin/kvcast-$$os-$$arch ./cmd/kvcast || exit 1; \
	done

man: ## Write the man page of VERSION to bin/kvcast.1.
	@mkdir -p bin
	CGO_ENABLED=0 $(GO) run -trimpath -ldflags '$(ldflags)' ./cmd/kvcast man >bin/kvcast.1

docs: man $(TOOLS)/buf $(TOOLS)/protoc-gen-reference ## Build the docs site in bin/docs, with a reference of the contract and the man page; needs python3 and npm.
	tools/scripts/docs.sh $(VERSION)

release-check: dist lint ## Check that the commit can be released as VERSION, such as v1.2.3, without releasing anything.
	tools/scripts/release-check.sh $(VERSION)

release-trial: $(TOOLS)/cyclonedx-gomod $(TOOLS)/helm ## Make a whole release of VERSION in a temporary clone, which publishes nothing, and use it; with signatures after make cosign.
	tools/scripts/release-trial.sh $(VERSION)

cosign: $(TOOLS)/cosign ## Build bin/tools/cosign, with which tools/scripts/sign.sh signs a release.

dist: build-static man $(TOOLS)/cyclonedx-gomod $(TOOLS)/helm ## Write archives of VERSION for each platform, their lists of modules, the Helm chart, checksums and provenance to bin/dist.
	tools/scripts/dist.sh $(VERSION) $(PLATFORMS)

bench: ## Run the benchmarks that match BENCH (.), COUNT (1) times, and with all of them, compare the index with its goals.
	$(go) test -run '^$$' -bench '$(BENCH)' -benchmem -count $(COUNT) work
	$(if $(filter .,$(BENCH)),$(go) run ./test/indexers/compare)

bench-report: ## Measure what the tables of the README and of docs/performance.md say, in seven rounds, and write them: half an hour on an idle machine. ARGS are flags, such as -rounds=3.
	$(go) run ./test/bench/report -suite report $(ARGS)

bench-scale: ## Measure how costs grow with the number of engines, blocks, subscribers and workers, and write that into docs/performance.md: needs 12 GB of memory.
	$(go) run ./test/bench/report -suite scale $(ARGS)

costs: ## Store the instructions and allocations of the hot path, which a test compares, in test/cost/testdata; installs valgrind with apt.
	@tools/scripts/valgrind.sh
	$(suite) -class process -race=0 ./test/cost -- -update

bench-indexers: ## Compare kvcast's index with those of SMG, Dynamo and llm-d, which are built in bin/indexers.
	@GO=$(GO) tools/scripts/indexers.sh
	$(go) run ./test/indexers/compare -peers bin/indexers

lint: $(TOOLS)/golangci-lint $(TOOLS)/buf ## Check the code and the contract, and that the contract is backward compatible.
	CGO_ENABLED=$(CGO) $(TOOLS)/golangci-lint run $(addsuffix /...,$(shell tools/scripts/modules.sh list))
	$(TOOLS)/buf lint
	$(TOOLS)/buf format --diff --exit-code
	tools/scripts/breaking.sh $(TOOLS)/buf
	GO=$(GO) tools/scripts/modules.sh tidy -diff
	GO=$(GO) tools/scripts/modules.sh vet

fmt: $(TOOLS)/golangci-lint $(TOOLS)/buf ## Format code and contract.
	$(TOOLS)/golangci-lint fmt ./...
	$(TOOLS)/buf format --write

proto: $(TOOLS)/buf $(TOOLS)/protoc-gen-go $(TOOLS)/protoc-gen-go-grpc $(TOOLS)/protoc-gen-go-fields ## Generate Go from the contract.
	PATH="$(TOOLS):$$PATH" $(TOOLS)/buf generate

grpcurl: $(TOOLS)/grpcurl ## Build bin/tools/grpcurl, which calls the server by hand.

kube-apiserver: bin/kube-apiserver bin/kubectl ## Build the Kubernetes API server and kubectl of tests into bin, which takes some minutes.

bin/kube-apiserver bin/kubectl: tools/kubernetes/go.mod
	version=$$(GOWORK=off $(GO) -C tools/kubernetes list -m -f '{{.Version}}' k8s.io/kubernetes) && \
	CGO_ENABLED=0 GOWORK=off $(GO) -C tools/kubernetes build -ldflags "-s -w -X k8s.io/component-base/version.gitVersion=$$version" \
		-o $(CURDIR)/$@ k8s.io/kubernetes/cmd/$(@F)

image: ## Build the images with buildah, without a registry, and check them; needs root.
	tools/scripts/image.sh

chart-docs: $(TOOLS)/helm-docs ## Write the table of values into the README of the Helm chart.
	$(TOOLS)/helm-docs --chart-search-root deploy/helm --log-level warning

deploy-check: kube-apiserver $(TOOLS)/helm $(TOOLS)/helm-docs $(TOOLS)/kubeconform ## Create the manifests and the variants of the Helm chart on a Kubernetes API server; needs etcd.
	@command -v etcd >/dev/null || { echo "deploy-check: etcd is not installed: run apt-get install etcd-server" >&2; exit 1; }
	$(suite) -class packaging ./test/kubernetes ./internal/discovery/kubernetes
	@echo "checked on $$(bin/kube-apiserver --version): the listener's manifests; $$(ls deploy/helm/kvcast/ci | wc -l) variants of the Helm chart by lint, schemas, dry run, creation, Pod Security and kvcast serve --check; roles of discovery; the commands of docs/kubernetes.md"

clean: ## Delete bin.
	rm -rf bin

libzmq: ## Install what cgo needs with apt or brew: libzmq's headers, pkg-config and, with apt, a C compiler.
	@tools/scripts/libzmq.sh $(GO)

include deploy/deploy.mk

# Tools are built on first use, in the versions that tools/go.mod pins. Their modules are not in go.work.
tool = GOWORK=off $(GO) -C tools build -o $@

# The program of buf is in npm's packages of its authors: to compile it takes minutes.
$(TOOLS)/buf: tools/buf/package-lock.json
	@command -v npm >/dev/null || { echo "buf: npm is not installed: install Node.js" >&2; exit 1; }
	@rm -rf bin/buf
	@mkdir -p bin/buf $(TOOLS)
	@cp tools/buf/package*.json bin/buf
	npm --prefix bin/buf ci --no-audit --no-fund --ignore-scripts --include=dev --include=optional
	@mv bin/buf/node_modules/@bufbuild/buf-*/bin/buf $@
	@rm -rf bin/buf
	@touch $@

$(TOOLS)/helm: tools/deploy/go.mod
	@# The version of Kubernetes that helm template takes for the cluster's, as in helm's own Makefile.
	CGO_ENABLED=0 GOWORK=off $(GO) -C tools/deploy build -trimpath -ldflags '-s -w $(foreach package,chartutil lint/rules,\
		-X helm.sh/helm/v3/pkg/$(package).k8sVersionMajor=1 -X helm.sh/helm/v3/pkg/$(package).k8sVersionMinor=34)' -o $@ helm.sh/helm/v3/cmd/helm

$(TOOLS)/cyclonedx-gomod: tools/deploy/go.mod
	CGO_ENABLED=0 GOWORK=off $(GO) -C tools/deploy build -trimpath -ldflags '-s -w' -o $@ github.com/CycloneDX/cyclonedx-gomod/cmd/cyclonedx-gomod

$(TOOLS)/helm-docs: tools/deploy/go.mod
	CGO_ENABLED=0 GOWORK=off $(GO) -C tools/deploy build -trimpath -ldflags '-s -w' -o $@ github.com/norwoodj/helm-docs/cmd/helm-docs

$(TOOLS)/kubeconform: tools/deploy/go.mod
	CGO_ENABLED=0 GOWORK=off $(GO) -C tools/deploy build -trimpath -ldflags '-s -w' -o $@ github.com/yannh/kubeconform/cmd/kubeconform

$(TOOLS)/cosign: tools/cosign/go.mod
	CGO_ENABLED=0 GOWORK=off $(GO) -C tools/cosign build -ldflags '-s -w' -o $@ github.com/sigstore/cosign/v3/cmd/cosign

$(TOOLS)/ghostunnel: tools/tunnel/go.mod
	@# Without cgo, this version does not compile.
	CGO_ENABLED=1 GOWORK=off $(GO) -C tools/tunnel build -ldflags '-s -w' -o $@ github.com/ghostunnel/ghostunnel

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

$(TOOLS)/protoc-gen-go-fields: tools/protoc-gen-go-fields/main.go tools/go.mod
	$(tool) ./protoc-gen-go-fields

$(TOOLS)/protoc-gen-reference: tools/protoc-gen-reference/main.go tools/go.mod
	$(tool) ./protoc-gen-reference
