#!/bin/sh
# console.sh DIR prepares the tests of the console: it installs Chromium with apt unless it is installed, and puts axe-core, which
# checks accessibility, from npm into DIR. Where that is impossible, it says so and succeeds: tests that need them are skipped.
set -eu

axe=4.14.1
dir=$1
skip() { echo "Skipping $1" >&2; }
if ! { command -v chromium || command -v chromium-browser || command -v google-chrome; } >/dev/null; then
	apt-get install -y -qq chromium >/dev/null 2>&1 || sudo -n apt-get install -y -qq chromium >/dev/null 2>&1 ||
		skip "the tests of the console in a browser: Chromium is not installed, and apt-get install chromium fails"
fi
if [ ! -f "$dir/axe-$axe.min.js" ]; then
	if ! command -v npm >/dev/null; then
		skip "the check of the console's accessibility: npm is not installed"
		exit 0
	fi
	mkdir -p "$dir"
	download=$(mktemp -d)
	trap 'rm -rf "$download"' EXIT
	if (cd "$download" && npm pack --silent "axe-core@$axe" >/dev/null 2>&1 && tar xzf "axe-core-$axe.tgz"); then
		rm -f "$dir"/axe-*.min.js
		cp "$download/package/axe.min.js" "$dir/axe-$axe.min.js"
	else
		skip "the check of the console's accessibility: npm pack axe-core@$axe fails"
	fi
fi
