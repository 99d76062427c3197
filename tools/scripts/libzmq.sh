#!/bin/sh
# Installs what the build needs beside Go and a C compiler: libzmq's headers and
# pkg-config. Does nothing where both are there.
set -eu

if pkg-config --exists 'libzmq >= 4.3' 2>/dev/null; then
	exit 0
fi

fail() {
	echo "kvcast needs libzmq 4.3 or later with its headers, and pkg-config: $1" >&2
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
	$root apt-get update -qq >/dev/null 2>&1 || true # an old list may do
	DEBIAN_FRONTEND=noninteractive $root apt-get install -y -qq libzmq3-dev pkg-config >/dev/null ||
		fail "'apt-get install libzmq3-dev pkg-config' failed, as it says above"
elif command -v brew >/dev/null 2>&1; then
	echo "installing zeromq and pkg-config" >&2
	brew install --quiet zeromq pkg-config || fail "'brew install zeromq pkg-config' failed, as it says above"
else
	fail "install them with this system's package manager, then try again"
fi

pkg-config --exists 'libzmq >= 4.3' || fail "what was installed is too old or not found by pkg-config"
