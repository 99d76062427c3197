#!/bin/sh
# Breaks the rules of the pipeline one at a time, in a copy, and demands that some
# test fails: see tools/mutate. Arguments go to it, such as -run REGEXP or -j N.
set -eu
cd "$(dirname "$0")/../.."
go build -C tools -o ../bin/tools/mutate ./mutate
exec bin/tools/mutate -last 'Memory|UnderLoad' "$@" pipeline/mutants.txt
