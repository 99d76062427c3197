#!/bin/sh
# Prepares the clients and the examples that use them for `make clients`, in bin/clients: builds what users install, and installs it. If a
# client cannot be prepared, this script prints the reason, and its tests are skipped. It fails if a client has a mistake.
set -eu
cd "$(dirname "$0")/../.."

into=$PWD/bin/clients
mkdir -p "$into"

. tools/scripts/limited.sh

# skip NAME REASON
skip() {
	echo "client in $1: skipped: $2" >&2
	rm -rf "${into:?}/$1"
}

# sum FILE... prints a checksum of the files.
sum() { cat "$@" | cksum; }

python() {
	sum=$(sum tools/scripts/clients.sh clients/python/requirements.txt clients/python/pyproject.toml clients/python/src/kvcast/*.py clients/python/src/kvcast/v1/*)
	[ ! -f "$into/python/sum" ] || [ "$(cat "$into/python/sum")" != "$sum" ] || return 0
	command -v python3 >/dev/null 2>&1 || { skip python "python3 is not installed"; return 0; }
	echo "client in python: preparing" >&2
	rm -rf "$into/python"
	mkdir -p "$into/python"
	log=$into/python.log
	python3 -m venv "$into/python/venv" >"$log" 2>&1 ||
		{ skip python "python3 -m venv fails: $(reason "$log")"; return 0; }
	limited "$into/python/venv/bin/python" -m pip --quiet --disable-pip-version-check --no-input --timeout 30 --retries 3 \
		install --only-binary :all: --no-deps -r clients/python/requirements.txt >"$log" 2>&1 ||
		{ skip python "its packages cannot be installed: $(reason "$log")"; return 0; }
	tools/scripts/wheel.sh "$into/python/venv/bin/python" "$into/python" >"$log" 2>&1
	"$into/python/venv/bin/python" -m pip --quiet --disable-pip-version-check install --no-deps --no-index "$into"/python/kvcast-*.whl
	echo "$sum" >"$into/python/sum"
}

rust() {
	command -v cargo >/dev/null 2>&1 || { skip rust "cargo is not installed"; return 0; }
	log=$into/rust.log
	manifest=clients/rust/Cargo.toml
	echo "client in rust: building" >&2
	limited cargo fetch --locked --manifest-path $manifest >"$log" 2>&1 ||
		{ skip rust "its packages cannot be fetched: $(reason "$log")"; return 0; }
	! limited cargo test --no-run --quiet --locked --offline --manifest-path $manifest --target-dir "$into/rust" >"$log" 2>&1 ||
		return 0
	# An error with a code is a mistake in the client, and not a missing linker or too old a compiler.
	! grep '^error\[E' "$log" >&2 || exit 1
	skip rust "it cannot be built: $(reason "$log")"
}

typescript() {
	command -v npm >/dev/null 2>&1 || { skip typescript "npm is not installed"; return 0; }
	sum=$(cd clients/typescript && sum ../../tools/scripts/clients.sh package*.json tsconfig*.json src/*.ts src/gen/kvcast/v1/*.ts test/*.ts conformance/*.ts examples/*.ts)
	[ ! -f "$into/typescript/sum" ] || [ "$(cat "$into/typescript/sum")" != "$sum" ] || return 0
	echo "client in typescript: preparing" >&2
	mkdir -p "$into/typescript"
	log=$into/typescript.log
	# What npm has installed stays.
	find "$into/typescript" -mindepth 1 -maxdepth 1 ! -name node_modules -exec rm -rf {} +
	tar -C clients/typescript --exclude=./node_modules --exclude=./build --exclude=./dist -cf - . | tar -C "$into/typescript" -xf -
	limited npm --prefix "$into/typescript" ci --no-audit --no-fund >"$log" 2>&1 ||
		{ skip typescript "its packages cannot be installed: $(reason "$log")"; return 0; }
	npm --prefix "$into/typescript" run build:all >"$log" 2>&1 || { cat "$log" >&2; exit 1; }
	echo "$sum" >"$into/typescript/sum"
}

python
rust
typescript
