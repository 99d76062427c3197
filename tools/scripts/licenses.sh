#!/bin/sh
# licenses.sh BINARY prints the licences of Go and of the modules in a binary, but not of those of kvcast: each file of a module that is one, under the module's name and version.
set -eu
cd "$(dirname "$0")/../.."

go=${GO:-go}
print() { # NAME DIR
	found=
	for file in "$2"/LICENSE* "$2"/LICENCE* "$2"/COPYING* "$2"/NOTICE*; do
		[ -f "$file" ] || continue
		found=1
		printf '==== %s: %s\n\n' "$1" "${file##*/}"
		cat "$file"
		printf '\n'
	done
	[ "$found" ] || {
		echo "licenses.sh: $1 has no file with a licence in $2" >&2
		exit 1
	}
}

modules=$($go version -m "$1") # not in the pipe, which has the status of its last part
print "Go" "$($go env GOROOT)"
printf '%s\n' "$modules" | awk '$1 == "dep" && $2 !~ "^github.com/kvcast/kvcast/" { print $2, $3 }' | while read -r module version; do
	dir=$($go list -m -f '{{.Dir}}' "$module")
	print "$module $version" "$dir"
done
