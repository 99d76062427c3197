#!/bin/sh
# Installs libzmq's headers and pkg-config, unless both are installed.
set -eu

if pkg-config --exists 'libzmq >= 4.3' 2>/dev/null; then
	exit 0
fi

fail() {
	echo "building with libzmq needs libzmq 4.3 or later with its headers, and pkg-config: $1" >&2
	exit 1
}

if command -v apt-get >/dev/null 2>&1; then
	if [ "$(id -u)" = 0 ]; then
		root=""
	elif command -v sudo >/dev/null 2>&1 && sudo -n true 2>/dev/null; then
		root="sudo"
	else
		fail "run 'sudo apt-get install libzmq3-dev pkg-config', then try again"
	fi
	echo "installing libzmq3-dev and pkg-config" >&2
	$root apt-get update -qq >/dev/null 2>&1 || true # installing may work without
	DEBIAN_FRONTEND=noninteractive $root apt-get install -y -qq libzmq3-dev pkg-config >/dev/null ||
		fail "'apt-get install libzmq3-dev pkg-config' failed; see the output above"
elif command -v brew >/dev/null 2>&1; then
	echo "installing zeromq and pkg-config" >&2
	brew install --quiet zeromq pkg-config || fail "'brew install zeromq pkg-config' failed; see the output above"
else
	fail "install them with the package manager of this system, then try again"
fi

pkg-config --exists 'libzmq >= 4.3' || fail "the installed version is too old, or pkg-config does not find it"
