#!/bin/sh
# valgrind.sh installs valgrind with apt, unless it is installed. Where that is impossible, it says so and succeeds: the test that needs it
# is skipped.
set -eu

if command -v valgrind >/dev/null; then
	exit 0
fi
apt-get install -y -qq valgrind >/dev/null 2>&1 || sudo -n apt-get install -y -qq valgrind >/dev/null 2>&1 ||
	echo "Skipping the test of instructions: valgrind is not installed, and apt-get install valgrind fails" >&2
