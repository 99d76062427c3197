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
for package in ./internal/journal ./internal/core/hashtable ./pipeline; do
	echo "$package" | grep -Eq -- "$run" || continue
	make -s "$PWD/bin/tools/gremlins"
	bin/tools/gremlins unleash --threshold-efficacy 85 \
		--arithmetic-base=false --conditionals-boundary=false --increment-decrement=false --invert-negatives=false \
		"$@" "$package"
done
