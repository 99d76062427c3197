#!/bin/sh
# Negates the conditions of some packages one at a time, and runs the tests of the package. The
# tests must fail for at least 85 % of the negated conditions that they reach. -run REGEXP selects
# packages; other arguments are passed to gremlins, such as --diff main.
set -eu
cd "$(dirname "$0")/../.."
top=$PWD
run=.
if [ "${1-}" = -run ]; then
	run=$2
	shift 2
fi

# gremlins runs in the folder of a module, and copies it: the go.mod of the copy must not refer to folders beside it, and the copy is
# not in go.work.
mkdir -p bin
cp internal/core/go.mod bin/mutate.mod
cp internal/core/go.sum bin/mutate.sum
go mod edit -replace=github.com/kvcast/kvcast/proto="$top/proto" bin/mutate.mod

for package in ./internal/journal ./internal/core/hashtable ./pipeline; do
	echo "$package" | grep -Eq -- "$run" || continue
	make -s "$top/bin/tools/gremlins"
	module=. path=${package#./} variables=
	case $package in
	./internal/core/*) module=internal/core path=${package#./internal/core/} variables="GOWORK=off GOFLAGS=-modfile=$top/bin/mutate.mod" ;;
	esac
	(
		cd "$module"
		env $variables "$top/bin/tools/gremlins" unleash --threshold-efficacy 85 \
			--arithmetic-base=false --conditionals-boundary=false --increment-decrement=false --invert-negatives=false \
			"$@" "./$path"
	)
done
