# Targets that build kvcast's image, and deploy it with engines that connect to it: see deploy/manifests/zmq-listener.

# docker (with buildx), podman or buildah.
CONTAINER_TOOL ?= $(firstword $(notdir $(shell command -v docker podman buildah 2>/dev/null)) docker)
KUBECTL ?= kubectl
NAMESPACE ?= default
ZMQ_IMAGE_REGISTRY ?= ghcr.io/kvcast
ZMQ_IMAGE_NAME ?= kvcast
ZMQ_IMAGE_TAG ?= $(VERSION)
ZMQ_IMG ?= $(ZMQ_IMAGE_REGISTRY)/$(ZMQ_IMAGE_NAME):$(ZMQ_IMAGE_TAG)
ZMQ_IMAGE_PLATFORMS ?= linux/amd64,linux/arm64

image_args = --build-arg VERSION=$(VERSION) --build-arg REVISION=$$(git rev-parse HEAD)
listener := deploy/manifests/zmq-listener

.PHONY: zmq-image-build zmq-image-push deploy-zmq-all deploy-zmq-listener deploy-vllm deploy-sim \
	delete-zmq-all delete-zmq-listener delete-vllm delete-sim clean-zmq

ifeq ($(CONTAINER_TOOL),docker)
zmq-image-build: ## Build the image ZMQ_IMG for each of ZMQ_IMAGE_PLATFORMS with CONTAINER_TOOL.
	docker buildx build --platform $(ZMQ_IMAGE_PLATFORMS) $(image_args) -t $(ZMQ_IMG) .

zmq-image-push: ## Build the image ZMQ_IMG, and push it to its registry.
	docker buildx build --platform $(ZMQ_IMAGE_PLATFORMS) $(image_args) -t $(ZMQ_IMG) --push .

remove_image = docker image rm $(ZMQ_IMG)
else
# Older versions of podman and buildah do not set BUILDPLATFORM.
zmq-image-build: ## Build the image ZMQ_IMG for each of ZMQ_IMAGE_PLATFORMS with CONTAINER_TOOL.
	-$(CONTAINER_TOOL) manifest rm $(ZMQ_IMG)
	$(CONTAINER_TOOL) build --format docker --platform $(ZMQ_IMAGE_PLATFORMS) --build-arg BUILDPLATFORM=linux/$$($(GO) env GOHOSTARCH) $(image_args) --manifest $(ZMQ_IMG) .

zmq-image-push: zmq-image-build ## Build the image ZMQ_IMG, and push it to its registry.
	$(CONTAINER_TOOL) manifest push --all $(ZMQ_IMG) docker://$(ZMQ_IMG)

remove_image = $(CONTAINER_TOOL) manifest rm $(ZMQ_IMG)
endif

deploy-zmq-all: deploy-zmq-listener deploy-vllm deploy-sim ## Deploy the listener, vLLM and llm-d-inference-sim to NAMESPACE.

deploy-zmq-listener: ## Deploy kvcast with the image ZMQ_IMG to NAMESPACE, for engines to connect to at zmq-listener-service:5557.
	$(KUBECTL) apply -n $(NAMESPACE) -f $(listener)/service.yaml
	$(KUBECTL) set image --local -o yaml -f $(listener)/listener.yaml listener=$(ZMQ_IMG) | $(KUBECTL) apply -n $(NAMESPACE) -f -

deploy-vllm: ## Deploy vLLM to NAMESPACE; it connects to the listener.
	$(KUBECTL) apply -n $(NAMESPACE) -f $(listener)/vllm.yaml

deploy-sim: ## Deploy llm-d-inference-sim to NAMESPACE; it connects to the listener.
	$(KUBECTL) apply -n $(NAMESPACE) -f $(listener)/sim.yaml

delete-zmq-all: delete-sim delete-vllm delete-zmq-listener ## Delete the deployments of deploy-zmq-all from NAMESPACE.

delete-zmq-listener: ## Delete the listener from NAMESPACE.
	$(KUBECTL) delete -n $(NAMESPACE) --ignore-not-found -f $(listener)/listener.yaml -f $(listener)/service.yaml

delete-vllm: ## Delete vLLM from NAMESPACE.
	$(KUBECTL) delete -n $(NAMESPACE) --ignore-not-found -f $(listener)/vllm.yaml

delete-sim: ## Delete llm-d-inference-sim from NAMESPACE.
	$(KUBECTL) delete -n $(NAMESPACE) --ignore-not-found -f $(listener)/sim.yaml

clean-zmq: delete-zmq-all ## Delete the deployments from NAMESPACE, and the local image.
	-$(remove_image)
