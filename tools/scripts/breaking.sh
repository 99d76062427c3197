#!/bin/sh
# Checks that the contract breaks no client. Compares it with HEAD if the working
# tree has changed it, otherwise with the previous commit.
set -eu

buf=$1
if ! git rev-parse --quiet --verify HEAD >/dev/null 2>&1; then
	echo "buf breaking: skipped: not a git checkout with a commit" >&2
	exit 0
fi
against=HEAD~1
if [ -n "$(git status --porcelain -- proto)" ]; then
	against=HEAD
fi
if ! git rev-parse --quiet --verify "$against:proto" >/dev/null 2>&1; then
	echo "buf breaking: skipped: $against has no contract" >&2
	exit 0
fi
exec "$buf" breaking proto --against ".git#ref=$against,subdir=proto"
