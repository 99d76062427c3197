#!/bin/sh
# Builds the images of the Dockerfile with buildah, and checks them: image.sh [static] [libzmq] [arm64], by default all
# three. arm64 is the static image for another architecture, which is checked but not run.
#
# No registry is needed: a Debian base that mmdebstrap makes takes the places of golang and debian, with this machine's
# Go, its caches of modules and builds, and its certificates, with which go downloads what the cache lacks, as volumes.
# Needs root. If something that is needed is missing and cannot be installed, this script prints what, and checks nothing.
set -eu
cd "$(dirname "$0")/../.."

. tools/scripts/limited.sh

skip() {
	echo "image: skipped: $1" >&2
	exit 0
}

[ "$(uname -s)" = Linux ] || skip "images are built on Linux only"
[ "$(id -u)" = 0 ] || skip "this script needs root, to make a Debian base and to change the root directory"
if ! command -v buildah >/dev/null 2>&1 || ! command -v mmdebstrap >/dev/null 2>&1; then
	command -v apt-get >/dev/null 2>&1 || skip "buildah and mmdebstrap are not installed"
	apt-get update -qq >/dev/null 2>&1 || true # installing may work without
	DEBIAN_FRONTEND=noninteractive apt-get install -y -qq buildah mmdebstrap >/dev/null 2>&1 ||
		skip "apt-get cannot install buildah and mmdebstrap"
fi

into=$PWD/bin/image
version=${VERSION:-v0.0.0-check}
revision=$(git rev-parse HEAD 2>/dev/null || echo unknown)
mkdir -p "$into"
log=$into/log

# Without a registry, and without the privileges and the network of containers.
b() { buildah --root "$into/storage" --runroot "$into/run" --storage-driver vfs "$@"; }

clean() {
	status=$?
	b rm --all >/dev/null 2>&1 || true
	rm -rf "$into/storage" "$into/run"
	exit $status
}
trap clean EXIT
trap 'exit 1' INT TERM

fail() {
	echo "image: $1" >&2
	exit 1
}

# expect WHAT GOT WANT
expect() { [ "$2" = "$3" ] || fail "$1 is $2, want $3"; }

debian=$(sed -n 's/^ARG DEBIAN=//p' Dockerfile)
go=$(sed -n 's/^ARG GO=//p' Dockerfile)
base=$into/debian-$debian.tar
if [ ! -f "$base" ]; then
	echo "image: making a base of Debian $debian" >&2
	limited mmdebstrap --quiet --variant=apt --include=ca-certificates "$debian" "$into/new.tar" >"$log" 2>&1 ||
		skip "mmdebstrap cannot make a base of Debian $debian: $(reason "$log")"
	mv "$into/new.tar" "$base"
fi
container=$(b from scratch)
b add -q "$container" "$base" / >/dev/null
b config --env "PATH=/usr/local/go/bin:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin" "$container"
b commit -q --rm "$container" "docker.io/library/golang:$go-$debian" >/dev/null
b tag "docker.io/library/golang:$go-$debian" "docker.io/library/debian:$debian-slim"

# build TARGET ARCH NAME
build() {
	echo "image: building $3" >&2
	b build -q --isolation chroot --pull-never --layers=false --format docker --platform "linux/$2" \
		--build-arg "BUILDPLATFORM=linux/$(go env GOHOSTARCH)" \
		--build-arg "VERSION=$version" --build-arg "REVISION=$revision" \
		--build-arg GOCACHE=/var/cache/go-build --build-arg GOMODCACHE=/var/cache/go-mod \
		--volume "$(go env GOROOT):/usr/local/go:ro" --volume "$(go env GOCACHE):/var/cache/go-build" \
		--volume "$(go env GOMODCACHE):/var/cache/go-mod" --volume /etc/ssl/certs:/etc/ssl/certs:ro \
		--target "$1" --tag "$3" . >"$log" 2>&1 || {
		cat "$log" >&2
		fail "$3 cannot be built"
	}
	config() { b inspect --type image --format "{{$1}}" "$image"; }
	image=$3
	expect "$3: architecture" "$(config .Docker.Architecture)" "$2"
	expect "$3: user" "$(config .Docker.Config.User)" 65532:65532
	expect "$3: entrypoint" "$(config .Docker.Config.Entrypoint)" "[/usr/local/bin/kvcast]"
	expect "$3: command" "$(config .Docker.Config.Cmd)" "[serve]"
	expect "$3: ports" "$(config 'range $port, $_ := .Docker.Config.ExposedPorts}}{{$port}} {{end')" "50051/tcp 5557/tcp 9464/tcp "
	expect "$3: label version" "$(config 'index .Docker.Config.Labels "org.opencontainers.image.version"')" "$version"
	expect "$3: label revision" "$(config 'index .Docker.Config.Labels "org.opencontainers.image.revision"')" "$revision"
	expect "$3: label licenses" "$(config 'index .Docker.Config.Labels "org.opencontainers.image.licenses"')" Apache-2.0
}

# run NAME WANT runs kvcast in the image as its user, with a read-only root directory, and expects a version.
run() {
	container=$(b from --pull-never "$1")
	root=$(b mount "$container")
	expect "$1: owner of /var/lib/kvcast" "$(stat -c %u:%g "$root/var/lib/kvcast")" 65532:65532
	# A mount namespace of its own, so that nothing stays mounted.
	inside() {
		unshare --mount sh -c '
			mount --bind "$0" "$0" && mount -o remount,bind,ro "$0" &&
			exec chroot --userspec 65532:65532 "$0" /usr/local/bin/kvcast "$@"' "$root" "$@"
	}
	expect "$1: version" "$(inside version)" "$2"
	inside demo >"$log" 2>&1 || {
		cat "$log" >&2
		fail "$1: kvcast demo fails"
	}
	! inside serve --journal file:/var/lib/kvcast --listen 127.0.0.1:0 --admin '' --bind tcp://127.0.0.1:0 >"$log" 2>&1 ||
		fail "$1: the root directory is not read-only"
	grep -q 'read-only file system' "$log" || fail "$1: writing fails for another reason: $(cat "$log")"
	b rm "$container" >/dev/null
}

[ $# -gt 0 ] || set -- static libzmq arm64
for part; do
	case $part in
	static)
		build static "$(go env GOHOSTARCH)" kvcast:static
		run kvcast:static "kvcast $version (without libzmq)"
		;;
	libzmq)
		build libzmq "$(go env GOHOSTARCH)" kvcast:libzmq
		run kvcast:libzmq "kvcast $version (libzmq 4.3.5)"
		;;
	arm64)
		build static arm64 kvcast:arm64
		container=$(b from --pull-never kvcast:arm64)
		go version -m "$(b mount "$container")/usr/local/bin/kvcast" | grep -q 'GOARCH=arm64' || fail "kvcast:arm64: the binary is for another architecture"
		;;
	*) fail "unknown part $part: want static, libzmq or arm64" ;;
	esac
	echo "image: $part is as described in the Dockerfile"
done
