#!/bin/sh
# Negates the conditions of some packages one at a time, and runs the tests of the package. The
# tests must fail for at least 85 % of the negated conditions that they reach. -run REGEXP selects
# packages; other arguments are passed to gremlins, such as --diff main.
set -eu
cd "$(dirname "$0")/../.."
run=.
if [ "${1-}" = -run ]; then
	run=$2
	shift 2
fi

# gremlins copies the module of the package. Its go.mod must not refer to folders beside it, nor is the copy in go.work.
mkdir -p bin
cp internal/core/go.mod bin/mutate.mod
cp internal/core/go.sum bin/mutate.sum
go mod edit -replace=github.com/kvcast/kvcast/proto="$PWD/proto" bin/mutate.mod

for package in ./internal/journal ./internal/core/hashtable ./pipeline; do
	echo "$package" | grep -Eq -- "$run" || continue
	make -s "$PWD/bin/tools/gremlins"
	variables=
	case $package in
	./internal/core/*) variables="GOWORK=off GOFLAGS=-modfile=$PWD/bin/mutate.mod" ;;
	esac
	env $variables bin/tools/gremlins unleash --threshold-efficacy 85 \
		--arithmetic-base=false --conditionals-boundary=false --increment-decrement=false --invert-negatives=false \
		"$@" "$package"
done
