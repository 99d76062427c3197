#!/bin/sh
# Compiles what lint and the steps of .ci/run without cgo need, so that it is in Go's cache, with the flags of GOFLAGS.
set -eu
cd "$(dirname "$0")/../.."

make "$PWD/bin/tools/golangci-lint" "$PWD/bin/tools/buf"
go list -export -deps -test work >/dev/null
CGO_ENABLED=0 go list -export -deps -test work >/dev/null
