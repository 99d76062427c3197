#!/bin/sh
# Prepares the consumers of package test/routers for `make routers`, in bin/routers: llm-d's pool of KV events, and the endpoint picker with the scorer of examples/epp, in Go; the message
# classes of vLLM, which are files of its wheel, and KVCR's parser of KV hints, with a Python environment; vLLM's router; the generated client and the relay of SMG, in a Python environment; LMCache's server without its storage, in a Python environment; a Mooncake store, with the code of vLLM and SGLang that makes its keys; and a program with Dynamo's crate, in Rust. If one
# cannot be prepared, this script prints the reason, and its tests are skipped. Arguments select some of llmd, epp, python, vllm_router, smg, lmcache, mooncake and rust.
set -eu
cd "$(dirname "$0")/../.."

into=$PWD/bin/routers
from=test/routers
vllm=0.33.0
kvcr=0.1.1
mkdir -p "$into"

. tools/scripts/limited.sh

# skip NAME REASON
skip() {
	echo "router in $1: skipped: $2" >&2
	rm -rf "${into:?}/$1"
}

llmd() {
	log=$into/llmd.log
	echo "pool of llm-d: building" >&2
	# Most of it is a client of Kubernetes that the pool does not call: it compiles in two thirds of the time without optimization.
	limited env CGO_ENABLED=0 GOWORK=off "${GO:-go}" -C $from/llmd build -trimpath -gcflags='all=-N -l -dwarf=false' -ldflags='-s -w' -o "$into/llmd" . >"$log" 2>&1 ||
		skip llmd "it cannot be built: $(reason "$log")"
}

epp() {
	log=$into/epp.log
	echo "endpoint picker: building" >&2
	limited env CGO_ENABLED=0 GOWORK=off "${GO:-go}" -C examples/epp test -trimpath -c -o "$into/epp.test" . >"$log" 2>&1 ||
		skip epp.test "it cannot be built: $(reason "$log")"
}

python() {
	log=$into/python.log
	pins=$(cksum <tools/scripts/routers.sh)
	[ ! -f "$into/python/pins" ] || [ "$(cat "$into/python/pins")" != "$pins" ] || return 0
	command -v python3 >/dev/null 2>&1 || { skip python "python3 is not installed"; return 0; }
	echo "message classes of vLLM: preparing" >&2
	rm -rf "$into/python"
	mkdir -p "$into/python"
	pip="$into/python/venv/bin/python -m pip --quiet --disable-pip-version-check --no-input --timeout 30 --retries 3"
	python3 -m venv "$into/python/venv" >"$log" 2>&1 ||
		{ skip python "python3 -m venv fails: $(reason "$log")"; return 0; }
	limited $pip install --only-binary :all: msgspec==0.22.0 pyzmq==27.3.0 >"$log" 2>&1 ||
		{ skip python "its packages cannot be installed: $(reason "$log")"; return 0; }
	# The flags select the wheel of any platform: the file is the same in all. It has some 340 MB.
	limited $pip download --no-deps --only-binary :all: --platform manylinux_2_28_x86_64 --dest "$into/python/wheel" "vllm==$vllm" "kvcr==$kvcr" >"$log" 2>&1 ||
		{ skip python "vllm $vllm and kvcr $kvcr cannot be fetched: $(reason "$log")"; return 0; }
	"$into/python/venv/bin/python" - "$into/python" <<-'END'
		import glob, hashlib, sys, zipfile
		into = sys.argv[1]
		for wheel, name, to, want in [
		    ("vllm", "vllm/distributed/kv_events.py", "kv_events.py", "82b362a0a7f89318d9127addfce254d537f5078a31aa87beb08493b0953895ee"),
		    ("vllm", "vllm/v1/kv_hints/protocol.py", "kv_hints.py", "c07e24c41dd695bf92eac6740c86bf9fc4d2140d410035b57f2d42e2afd802a3"),
		    ("vllm", "vllm/distributed/kv_transfer/kv_connector/v1/mooncake/store/data.py", "mooncake_keys.py", "969e70fe152be0a01364c79cf1b2e64d63b2df5d98a19f80aef3050aa1cc1f80"),
		    ("kvcr", "kvcr/hint_parser.py", "hint_parser.py", "d9ffa65d8ca1b8a8c041566f579d458b96b3e206832a7b7bb7353971359d2062"),
		]:
		    text = zipfile.ZipFile(glob.glob(f"{into}/wheel/{wheel}-*.whl")[0]).read(name)
		    if hashlib.sha256(text).hexdigest() != want:
		        sys.exit(f"{name} has the wrong checksum: {hashlib.sha256(text).hexdigest()}")
		    open(f"{into}/{to}", "wb").write(text)
	END
	rm -r "$into/python/wheel"
	echo "$pins" >"$into/python/pins"
}

# vLLM's router is a program in Rust, in a wheel.
vllm_router() {
	log=$into/vllm-router.log
	pins=vllm-router==0.1.17
	[ ! -f "$into/vllm-router/pins" ] || [ "$(cat "$into/vllm-router/pins")" != "$pins" ] || return 0
	command -v python3 >/dev/null 2>&1 || { skip vllm-router "python3 is not installed"; return 0; }
	echo "router of vLLM: preparing" >&2
	rm -rf "$into/vllm-router"
	mkdir -p "$into/vllm-router"
	python3 -m venv "$into/vllm-router/venv" >"$log" 2>&1 ||
		{ skip vllm-router "python3 -m venv fails: $(reason "$log")"; return 0; }
	limited "$into/vllm-router/venv/bin/python" -m pip --quiet --disable-pip-version-check --no-input --timeout 30 --retries 3 \
		install --only-binary :all: $pins >"$log" 2>&1 ||
		{ skip vllm-router "its packages cannot be installed: $(reason "$log")"; return 0; }
	echo "$pins" >"$into/vllm-router/pins"
}

smg() {
	log=$into/smg.log
	pins="smg-grpc-proto==0.4.28 grpcio==1.85.1 protobuf==7.36.2 pyzmq==27.3.0 msgspec==0.22.0"
	servicer=smg-grpc-servicer==0.14.1
	[ ! -f "$into/smg/pins" ] || [ "$(cat "$into/smg/pins")" != "$pins $servicer" ] || return 0
	command -v python3 >/dev/null 2>&1 || { skip smg "python3 is not installed"; return 0; }
	echo "client and relay of SMG: preparing" >&2
	rm -rf "$into/smg"
	mkdir -p "$into/smg"
	python3 -m venv "$into/smg/venv" >"$log" 2>&1 ||
		{ skip smg "python3 -m venv fails: $(reason "$log")"; return 0; }
	pip="$into/smg/venv/bin/python -m pip --quiet --disable-pip-version-check --no-input --timeout 30 --retries 3"
	# The relay needs no other packages; those that its wheel names are for the servers of engines.
	{ limited $pip install --only-binary :all: $pins && limited $pip install --only-binary :all: --no-deps $servicer; } >"$log" 2>&1 ||
		{ skip smg "its packages cannot be installed: $(reason "$log")"; return 0; }
	echo "$pins $servicer" >"$into/smg/pins"
}

lmcache() {
	log=$into/lmcache.log
	lmcache=lmcache==0.5.6
	pins="grpcio==1.85.1 protobuf==7.36.2 pyzmq==27.3.0 msgspec==0.22.0 numpy==2.4.6 blake3==1.0.11 cachetools==8.0.2 opentelemetry-sdk==1.45.2
		prometheus-client==0.26.0 psutil==7.2.2 PyYAML==6.0.4 requests==2.34.2 sortedcontainers==2.4.0
		fastapi==0.165.0 httpx==0.28.1 uvicorn==0.54.0"
	[ ! -f "$into/lmcache/pins" ] || [ "$(cat "$into/lmcache/pins")" != "$pins $lmcache" ] || return 0
	command -v python3 >/dev/null 2>&1 || { skip lmcache "python3 is not installed"; return 0; }
	echo "server of LMCache: preparing" >&2
	rm -rf "$into/lmcache"
	mkdir -p "$into/lmcache"
	python3 -m venv "$into/lmcache/venv" >"$log" 2>&1 ||
		{ skip lmcache "python3 -m venv fails: $(reason "$log")"; return 0; }
	pip="$into/lmcache/venv/bin/python -m pip --quiet --disable-pip-version-check --no-input --timeout 30 --retries 3"
	# Its wheel names packages for GPUs, which the server does not use without its storage.
	{ limited $pip install --only-binary :all: $pins && limited $pip install --only-binary :all: --no-deps --target "$into/lmcache/package" $lmcache; } >"$log" 2>&1 ||
		{ skip lmcache "its packages cannot be installed: $(reason "$log")"; return 0; }
	echo "$pins $lmcache" >"$into/lmcache/pins"
}

mooncake() {
	log=$into/mooncake.log
	pins="mooncake-transfer-engine-non-cuda==0.3.13.post1"
	sglang=sglang==0.5.23
	[ ! -f "$into/mooncake/pins" ] || [ "$(cat "$into/mooncake/pins")" != "$pins $sglang" ] || return 0
	command -v python3 >/dev/null 2>&1 || { skip mooncake "python3 is not installed"; return 0; }
	echo "Mooncake store: preparing" >&2
	rm -rf "$into/mooncake"
	mkdir -p "$into/mooncake"
	# Its programs are linked with libibverbs, also for TCP.
	ldconfig -p | grep -q libibverbs.so.1 || limited apt-get install -y -qq libibverbs1 >"$log" 2>&1 || limited sudo -n apt-get install -y -qq libibverbs1 >"$log" 2>&1 ||
		{ skip mooncake "libibverbs1 cannot be installed: $(reason "$log")"; return 0; }
	python3 -m venv "$into/mooncake/venv" >"$log" 2>&1 ||
		{ skip mooncake "python3 -m venv fails: $(reason "$log")"; return 0; }
	pip="$into/mooncake/venv/bin/python -m pip --quiet --disable-pip-version-check --no-input --timeout 30 --retries 3"
	{ limited $pip install --only-binary :all: --no-deps --target "$into/mooncake/package" $pins &&
		limited $pip download --no-deps --only-binary :all: --platform manylinux_2_34_x86_64 --dest "$into/mooncake/wheel" $sglang; } >"$log" 2>&1 ||
		{ skip mooncake "its packages cannot be installed: $(reason "$log")"; return 0; }
	"$into/mooncake/venv/bin/python" - "$into/mooncake" <<-'END'
		import glob, hashlib, sys, zipfile
		into, name, want = sys.argv[1], "sglang/srt/mem_cache/storage/mooncake_store/mooncake_store.py", "479865b74f583621ae987fed4c0b246ff3d1661a149eeaf2ae9ae2f88a662632"
		text = zipfile.ZipFile(glob.glob(f"{into}/wheel/*.whl")[0]).read(name)
		if hashlib.sha256(text).hexdigest() != want:
		    sys.exit(f"{name} has the wrong checksum: {hashlib.sha256(text).hexdigest()}")
		open(f"{into}/sglang_keys.py", "wb").write(text)
	END
	rm -r "$into/mooncake/wheel"
	echo "$pins $sglang" >"$into/mooncake/pins"
}

rust() {
	log=$into/dynamo.log
	command -v cargo >/dev/null 2>&1 || { skip dynamo "cargo is not installed"; return 0; }
	echo "crate of Dynamo: building" >&2
	limited cargo fetch --quiet --locked --manifest-path $from/testdata/dynamo/Cargo.toml >"$log" 2>&1 ||
		{ skip dynamo "its crates cannot be fetched: $(reason "$log")"; return 0; }
	# Its crate zmq would compile a libzmq of its own, for a minute.
	installed=
	if libdir=$(pkg-config --variable=libdir libzmq 2>/dev/null); then
		target=target.$(rustc -vV | sed -n 's/^host: //p').zmq
		installed="--config $target.rustc-link-lib=['zmq'] --config $target.rustc-link-search=['$libdir']"
	fi
	limited cargo build --quiet --locked --offline --manifest-path $from/testdata/dynamo/Cargo.toml --target-dir "$into/cargo" $installed >"$log" 2>&1 ||
		{ skip dynamo "it cannot be built: $(reason "$log")"; return 0; }
	cp "$into/cargo/debug/dynamo" "$into/dynamo"
}

for part in ${*:-llmd epp python vllm_router smg lmcache mooncake rust}; do
	$part
done
