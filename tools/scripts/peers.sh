#!/bin/sh
# Prepares the peers of package test/interop for `make peers`, in bin/peers: a program in
# Java with JeroMQ, and one in Rust with the crate zeromq. The one in Python uses the
# environment of live.sh. If a peer cannot be prepared, this script prints the reason, and
# its tests are skipped.
set -eu
cd "$(dirname "$0")/../.."

into=$PWD/bin/peers
from=test/interop/testdata
jeromq=0.6.0
jeromq_sum=4784ff6d6e91b8eecd917b73d07b161c19a808ef870a5bdb760515bb67e208d3
mkdir -p "$into"

. tools/scripts/limited.sh

# sha256 FILE
sha256() {
	if command -v sha256sum >/dev/null 2>&1; then
		sha256sum "$1"
	else
		shasum -a 256 "$1"
	fi | cut -d ' ' -f 1
}

# skip NAME REASON
skip() {
	echo "peer in $1: skipped: $2" >&2
	rm -rf "${into:?}/$1"
}

java() {
	jar=$into/java/jeromq-$jeromq.jar
	log=$into/java.log
	command -v javac >/dev/null 2>&1 || { skip java "javac is not installed"; return 0; }
	if [ ! -f "$jar" ]; then
		command -v mvn >/dev/null 2>&1 || { skip java "mvn is not installed"; return 0; }
		echo "peer in java: preparing" >&2
		rm -rf "$into/java"
		limited mvn -q -B dependency:copy "-Dartifact=org.zeromq:jeromq:$jeromq" "-DoutputDirectory=$into/java" >"$log" 2>&1 ||
			{ skip java "JeroMQ cannot be fetched: $(reason "$log")"; return 0; }
	fi
	if [ "$(sha256 "$jar")" != "$jeromq_sum" ]; then
		echo "peer in java: $jar has the wrong checksum" >&2
		rm -rf "$into/java"
		exit 1
	fi
	limited javac -cp "$jar" -d "$into/java" "$from/Peer.java" >"$log" 2>&1 ||
		{ skip java "it cannot be built: $(reason "$log")"; return 0; }
}

rust() {
	log=$into/rust.log
	command -v cargo >/dev/null 2>&1 || { skip rust "cargo is not installed"; return 0; }
	echo "peer in rust: building" >&2
	limited cargo fetch --locked --manifest-path "$from/rust/Cargo.toml" >"$log" 2>&1 ||
		{ skip rust "its packages cannot be fetched: $(reason "$log")"; return 0; }
	limited cargo build --quiet --locked --offline --manifest-path "$from/rust/Cargo.toml" --target-dir "$into/rust" >"$log" 2>&1 ||
		{ skip rust "it cannot be built: $(reason "$log")"; return 0; }
}

java
rust
