#!/bin/sh
# modules.sh is about the Go modules of go.work: kvcast's own, in the root folder, and those that routers import.
#
#   modules.sh list              prints their folders
#   modules.sh tags VERSION      prints the tags of a release: proto/v1.2.3 is that of the module in proto
#   modules.sh tidy [-diff]      runs go mod tidy in each
#   modules.sh vet               runs go vet in each without go.work, as in a program that imports it
#   modules.sh release VERSION   requires VERSION of each other, and drops the replacements of kvcast's module: with any, go install refuses it
#   modules.sh develop           replaces the others by their folders again in kvcast's module
#   modules.sh check VERSION     prints what is not as after release VERSION
set -eu
cd "$(dirname "$0")/../.."

go=${GO:-go}
root=github.com/kvcast/kvcast

# In go.work, each folder is a line of its own.
list() { sed -n 's,^	\(\.[^ ]*\)$,\1,p' go.work | sed 's,^\./,,'; }
others() { list | grep -vx '\.'; }

# required FOLDER prints the folders of the others that a module requires, each with the version.
required() {
	for other in $(others); do
		sed -n "s,^.*[[:space:]]$root/\($other\) \(v[^ ]*\).*,\1 \2,p" "$1/go.mod"
	done
}

# replace FILE adds the replacements of kvcast's module to a go.mod file.
replace() {
	for other in $(others); do
		$go mod edit -replace="$root/$other=./$other" "$1"
	done
}

case ${1-} in
list) list ;;
tags)
	echo "$2"
	for other in $(others); do
		echo "$other/$2"
	done
	;;
tidy)
	shift
	for folder in $(list); do
		modfile=
		if [ "$folder" = . ] && ! grep -q ' => ' go.mod; then # a release, whose versions are not published yet
			mkdir -p bin
			cp go.mod bin/tidy.mod
			cp go.sum bin/tidy.sum
			replace bin/tidy.mod
			modfile=-modfile=bin/tidy.mod
		fi
		GOWORK=off $go -C "$folder" mod tidy $modfile "$@"
	done
	;;
vet)
	for folder in $(others); do
		GOWORK=off $go -C "$folder" vet ./...
	done
	;;
release)
	for folder in $(list); do
		required "$folder" | while read -r other _; do
			$go mod edit -require="$root/$other@$2" "$folder/go.mod"
		done
	done
	for other in $(others); do
		$go mod edit -dropreplace="$root/$other" go.mod
		# Without a replacement of this version, go build looks for it, although go.work has the module.
		$go work edit -replace="$root/$other@$2=./$other" go.work
	done
	;;
develop)
	sed -n "s,^.*[[:space:]]\($root/[^ ]*\) \(v[^ ]*\) => .*,\1@\2,p" go.work | while read -r old; do
		$go work edit -dropreplace="$old" go.work
	done
	replace go.mod
	;;
check)
	for folder in $(list); do
		required "$folder" | while read -r other version; do
			[ "$version" = "$2" ] || echo "$folder/go.mod requires $version of $other, not $2"
		done
	done
	! grep -q ' => ' go.mod || echo "./go.mod has replacements"
	;;
*)
	sed -n '2,/^set/s/^# \{0,1\}//p' "$0" >&2
	exit 2
	;;
esac
