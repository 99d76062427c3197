#!/bin/sh
# notes.sh VERSION prints the notes of a release: its section of CHANGELOG.md, without the heading.
set -eu
cd "$(dirname "$0")/../.."

version=$1
notes=$(awk -v version="$version" '/^## / { mine = index($2, version) == 1 || index($2, "[" version "]") == 1; next } mine' CHANGELOG.md)
[ -n "$notes" ] || {
	echo "notes: CHANGELOG.md has no section $version" >&2
	exit 1
}
echo "$notes" | sed '/./,$!d'
