#!/bin/sh
# prometheus.sh DIR puts prometheus and promtool into DIR/usr/bin, unless they are installed. It takes them from the package of
# Debian or Ubuntu without installing it, which would start a service. Where that is impossible, it says so and succeeds: tests
# that need the programs are skipped.
set -eu

dir=$1
if [ -x "$dir/usr/bin/promtool" ] || { command -v prometheus && command -v promtool; } >/dev/null; then
	exit 0
fi
skip() {
	echo "Skipping the tests with Prometheus: $1. Install prometheus and promtool to run them" >&2
	exit 0
}
command -v apt-get >/dev/null && command -v dpkg-deb >/dev/null || skip "there is no apt"
mkdir -p "$dir"
dir=$(cd "$dir" && pwd)
download=$(mktemp -d)
trap 'rm -rf "$download"' EXIT
cd "$download"
fetch() { apt-get download -qq prometheus >/dev/null 2>&1; }
if ! fetch; then
	{ apt-get update -qq || sudo -n apt-get update -qq; } >/dev/null 2>&1 || true
	fetch || skip "apt-get download prometheus fails"
fi
dpkg-deb -x prometheus_*.deb "$dir" || skip "the package cannot be unpacked"
# libc may be older than the package's.
"$dir/usr/bin/promtool" --version >/dev/null 2>&1 || { rm -rf "$dir"; skip "the package's promtool does not run"; }
