#!/bin/sh
# Prepares the examples in Python and Rust for `make clients`, in bin/clients: installs
# the Python packages, generates the Python code, and builds the Rust program. If an
# example cannot be prepared, this script prints the reason, and its test is skipped. It fails
# if the Python code cannot be generated, or the Rust program has a mistake.
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
	sum=$(sum tools/scripts/clients.sh examples/python/requirements.txt examples/python/*.py proto/kvcast/v1/*.proto)
	[ ! -f "$into/python/sum" ] || [ "$(cat "$into/python/sum")" != "$sum" ] || return 0
	command -v python3 >/dev/null 2>&1 || { skip python "python3 is not installed"; return 0; }
	echo "client in python: preparing" >&2
	rm -rf "$into/python"
	mkdir -p "$into/python"
	log=$into/python.log
	python3 -m venv "$into/python/venv" >"$log" 2>&1 ||
		{ skip python "python3 -m venv fails: $(reason "$log")"; return 0; }
	limited "$into/python/venv/bin/python" -m pip --quiet --disable-pip-version-check --no-input --timeout 30 --retries 3 \
		install --only-binary :all: -r examples/python/requirements.txt >"$log" 2>&1 ||
		{ skip python "its packages cannot be installed: $(reason "$log")"; return 0; }
	cp examples/python/*.py "$into/python"
	# The command of examples/python/README.md.
	(cd examples/python && "$into/python/venv/bin/python" -m grpc_tools.protoc -I ../../proto \
		--python_out="$into/python" --grpc_python_out="$into/python" ../../proto/kvcast/v1/*.proto)
	echo "$sum" >"$into/python/sum"
}

rust() {
	command -v cargo >/dev/null 2>&1 || { skip rust "cargo is not installed"; return 0; }
	log=$into/rust.log
	echo "client in rust: building" >&2
	limited cargo fetch --locked --manifest-path examples/rust/Cargo.toml >"$log" 2>&1 ||
		{ skip rust "its packages cannot be fetched: $(reason "$log")"; return 0; }
	! limited cargo build --quiet --locked --offline --manifest-path examples/rust/Cargo.toml --target-dir "$into/rust" >"$log" 2>&1 ||
		return 0
	# An error with a code is a mistake in the program, and not a missing linker or too old a compiler.
	! grep '^error\[E' "$log" >&2 || exit 1
	skip rust "it cannot be built: $(reason "$log")"
}

python
rust
