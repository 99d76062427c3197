#!/bin/sh
# libzmq.sh [GO] installs libzmq's headers, pkg-config and a C compiler, unless they are installed. With
# brew it installs no compiler: macOS has its own.
set -eu

compiler=$(${1:-go} env CC)
packages="libzmq3-dev pkg-config"
has_compiler() { command -v "${compiler%% *}" >/dev/null 2>&1; }
# gcc only recommends libc6-dev.
has_compiler || packages="$packages gcc libc6-dev"

fail() {
	echo "building with libzmq needs libzmq 4.3 or later with its headers, pkg-config, and a C compiler: $1" >&2
	exit 1
}

if has_compiler && pkg-config --exists 'libzmq >= 4.3' 2>/dev/null; then
	exit 0
fi

if command -v apt-get >/dev/null 2>&1; then
	if [ "$(id -u)" = 0 ]; then
		root=""
	elif command -v sudo >/dev/null 2>&1 && sudo -n true 2>/dev/null; then
		root="sudo"
	else
		fail "run 'sudo apt-get install $packages', then try again"
	fi
	echo "installing $packages" >&2
	$root apt-get update -qq >/dev/null 2>&1 || true # installing may work without
	# shellcheck disable=SC2086 # several words
	DEBIAN_FRONTEND=noninteractive $root apt-get install -y -qq $packages >/dev/null ||
		fail "'apt-get install $packages' failed; see the output above"
elif command -v brew >/dev/null 2>&1; then
	echo "installing zeromq and pkg-config" >&2
	brew install --quiet zeromq pkg-config || fail "'brew install zeromq pkg-config' failed; see the output above"
else
	fail "install them with the package manager of this system, then try again"
fi

has_compiler || fail "there is no C compiler ($compiler)"
pkg-config --exists 'libzmq >= 4.3' || fail "the installed version is too old, or pkg-config does not find it"
