# The image of kvcast: by default the static binary alone, with the native implementation of ZeroMQ. The target libzmq
# has Debian and both implementations:
#
#   docker build --build-arg VERSION=v1.2.3 .
#   docker build --build-arg VERSION=v1.2.3 --target libzmq .
#
# The default target is cross-compiled, so that building it for another architecture needs no emulation.

ARG GO=1.26
ARG DEBIAN=trixie

FROM --platform=$BUILDPLATFORM golang:${GO}-${DEBIAN} AS build
WORKDIR /src
# Caches of another place, such as a volume, are used if these are given.
ARG GOCACHE=/root/.cache/go-build
ARG GOMODCACHE=/go/pkg/mod
COPY go.work go.work.sum go.mod go.sum ./
COPY client/go.mod client/go.sum client/
COPY internal/core/go.mod internal/core/go.sum internal/core/
COPY proto/go.mod proto/go.sum proto/
RUN go mod download
COPY . .
ARG TARGETOS
ARG TARGETARCH
ARG VERSION
RUN CGO_ENABLED=0 GOOS=$TARGETOS GOARCH=$TARGETARCH go build -trimpath -buildvcs=false \
	-ldflags "-s -w -X github.com/kvcast/kvcast/cmd/kvcast/internal/cli.version=$VERSION" -o /out/kvcast ./cmd/kvcast && \
	tools/scripts/licenses.sh /out/kvcast >/out/THIRD_PARTY_LICENSES && \
	mkdir -p /out/state

FROM golang:${GO}-${DEBIAN} AS build-libzmq
RUN apt-get update && apt-get install -y --no-install-recommends gcc libc6-dev libzmq3-dev pkg-config && rm -rf /var/lib/apt/lists/*
WORKDIR /src
ARG GOCACHE=/root/.cache/go-build
ARG GOMODCACHE=/go/pkg/mod
COPY go.work go.work.sum go.mod go.sum ./
COPY client/go.mod client/go.sum client/
COPY internal/core/go.mod internal/core/go.sum internal/core/
COPY proto/go.mod proto/go.sum proto/
RUN go mod download
COPY . .
ARG VERSION
RUN CGO_ENABLED=1 go build -trimpath -buildvcs=false \
	-ldflags "-s -w -X github.com/kvcast/kvcast/cmd/kvcast/internal/cli.version=$VERSION" -o /out/kvcast ./cmd/kvcast && \
	tools/scripts/licenses.sh /out/kvcast >/out/THIRD_PARTY_LICENSES && \
	mkdir -p /out/state

FROM debian:${DEBIAN}-slim AS libzmq
RUN apt-get update && apt-get install -y --no-install-recommends ca-certificates libzmq5 && rm -rf /var/lib/apt/lists/*
COPY --from=build-libzmq /out/kvcast /usr/local/bin/kvcast
COPY --from=build-libzmq /src/LICENSE /out/THIRD_PARTY_LICENSES /usr/share/doc/kvcast/
# A journal in files, --journal file:/var/lib/kvcast, is a volume there. A new volume takes the owner of this directory.
COPY --from=build-libzmq --chown=65532:65532 /out/state /var/lib/kvcast
ARG VERSION
ARG REVISION
LABEL org.opencontainers.image.title="kvcast" \
	org.opencontainers.image.description="Relays KV-cache events of LLM engines to routers, with libzmq" \
	org.opencontainers.image.source="https://github.com/kvcast/kvcast" \
	org.opencontainers.image.licenses="Apache-2.0" \
	org.opencontainers.image.version="$VERSION" \
	org.opencontainers.image.revision="$REVISION"
# The loopback address of a container cannot be reached by probes and Prometheus. The variable overrides the configuration
# file: set KVCAST_ADMIN to another address, or to nothing for no admin port.
ENV KVCAST_ADMIN=:9464
EXPOSE 5557 9464 50051
USER 65532:65532
ENTRYPOINT ["/usr/local/bin/kvcast"]
CMD ["serve"]

FROM scratch AS static
# To verify TLS connections to NATS servers.
COPY --from=build /etc/ssl/certs/ca-certificates.crt /etc/ssl/certs/ca-certificates.crt
COPY --from=build /out/kvcast /usr/local/bin/kvcast
COPY --from=build /src/LICENSE /out/THIRD_PARTY_LICENSES /usr/share/doc/kvcast/
COPY --from=build --chown=65532:65532 /out/state /var/lib/kvcast
ARG VERSION
ARG REVISION
LABEL org.opencontainers.image.title="kvcast" \
	org.opencontainers.image.description="Relays KV-cache events of LLM engines to routers" \
	org.opencontainers.image.source="https://github.com/kvcast/kvcast" \
	org.opencontainers.image.licenses="Apache-2.0" \
	org.opencontainers.image.version="$VERSION" \
	org.opencontainers.image.revision="$REVISION"
ENV KVCAST_ADMIN=:9464
EXPOSE 5557 9464 50051
USER 65532:65532
ENTRYPOINT ["/usr/local/bin/kvcast"]
CMD ["serve"]
