#!/bin/sh
# Compiles what lint, dist and the steps of .ci/run without cgo need, so that it is in Go's cache.
set -eu
cd "$(dirname "$0")/../.."

make "$PWD/bin/tools/golangci-lint" "$PWD/bin/tools/cyclonedx-gomod" "$PWD/bin/tools/helm"
go list -export -deps -test work >/dev/null
CGO_ENABLED=0 GOFLAGS=-trimpath go list -export -deps -test work >/dev/null
