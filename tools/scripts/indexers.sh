#!/bin/sh
# Prepares other projects' indexes for `make bench-indexers`, in bin/indexers: those of SMG and
# Dynamo, in Rust, and llm-d's, in Go. If a program cannot be prepared, this script writes the
# reason to NAME.skipped, which command compare prints.
set -eu
cd "$(dirname "$0")/../.."

into=$PWD/bin/indexers
from=test/indexers
mkdir -p "$into"

. tools/scripts/limited.sh

# skip NAME REASON
skip() { echo "$2" >"$into/$1.skipped"; }

rust() {
	log=$into/rust.log
	command -v cargo >/dev/null 2>&1 || { skip rust "cargo is not installed"; return 0; }
	echo "indexes in rust: building" >&2
	limited cargo fetch --quiet --locked --manifest-path "$from/rust/Cargo.toml" >"$log" 2>&1 ||
		{ skip rust "its crates cannot be fetched: $(reason "$log")"; return 0; }
	limited cargo build --quiet --release --locked --offline --manifest-path "$from/rust/Cargo.toml" --target-dir "$into/cargo" >"$log" 2>&1 ||
		{ skip rust "it cannot be built: $(reason "$log")"; return 0; }
	cp "$into/cargo/release/indexers" "$into/rust"
}

llmd() {
	log=$into/llmd.log
	echo "index of llm-d: building" >&2
	limited env CGO_ENABLED=0 GOWORK=off "${GO:-go}" -C "$from/llmd" build -o "$into/llmd" . >"$log" 2>&1 ||
		{ skip llmd "it cannot be built: $(reason "$log")"; return 0; }
}

rm -f "$into"/*.skipped
rust
llmd
