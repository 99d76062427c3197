#!/bin/sh
# Checks that the contract breaks no client. Compares it with the last release, and with HEAD if the working tree has changed it, otherwise
# with the previous commit.
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
# A commit that is tagged is compared with the release before it.
release=$(git describe --tags --abbrev=0 --match 'v[0-9]*' HEAD~1 2>/dev/null || true)
for commit in $release "$against"; do
	if git rev-parse --quiet --verify "$commit:proto" >/dev/null 2>&1; then
		"$buf" breaking proto --against ".git#ref=$commit,subdir=proto"
	else
		echo "buf breaking: skipped: $commit has no contract" >&2
	fi
done
