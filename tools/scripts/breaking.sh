#!/bin/sh
# Compares the contract with the one before: that of HEAD where the working tree
# has changed it, else that of the commit before.
set -eu

buf=$1
if ! git rev-parse --quiet --verify HEAD >/dev/null 2>&1; then
	echo "buf breaking: skipped: this is no git checkout with a commit" >&2
	exit 0
fi
against=HEAD~1
if [ -n "$(git status --porcelain -- proto)" ]; then
	against=HEAD
fi
if ! git rev-parse --quiet --verify "$against:proto" >/dev/null 2>&1; then
	echo "buf breaking: skipped: $against has no contract to compare with" >&2
	exit 0
fi
exec "$buf" breaking --against ".git#ref=$against"
