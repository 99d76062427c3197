#!/bin/sh
# Prepares SGLang's publisher of KV-cache events for `make live`, in bin/live: one file
# of each of two published versions, and a Python environment with the packages that it
# imports. Runs again only if a version below changes. If the publisher cannot be
# fetched, this script prints the reason, and the test is skipped.
set -eu
cd "$(dirname "$0")/../.."

into=bin/live
python=$into/venv/bin/python
file=sglang/srt/disaggregation/kv_events.py
pins=$(cksum <"$0")
if [ -f $into/pins ] && [ "$(cat $into/pins)" = "$pins" ]; then
	exit 0
fi

skip() {
	echo "live publisher: skipped: $1" >&2
	rm -rf $into
	exit 0
}

log=$into/log
. tools/scripts/limited.sh

# pip ARG... runs pip.
pip() {
	limited env PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_INPUT=1 \
		$python -m pip --quiet --timeout 30 --retries 3 "$@" >$log 2>&1
}

# publisher VERSION CHECKSUM [FLAG...] extracts the file from the wheel of a version. The
# flags select the wheel of any platform: the file is the same in all wheels.
publisher() {
	version=$1 sum=$2
	shift 2
	pip download --no-deps --only-binary :all: --dest $into/wheel "$@" "sglang==$version" ||
		skip "sglang $version cannot be fetched: $(tail -n 1 $log)"
	mkdir $into/sglang-"$version"
	$python -c 'import sys, zipfile; sys.stdout.buffer.write(zipfile.ZipFile(sys.argv[1]).read(sys.argv[2]))' \
		$into/wheel/*.whl $file >$into/sglang-"$version"/kv_events.py
	rm -r $into/wheel
	got=$($python -c 'import hashlib, sys; print(hashlib.sha256(sys.stdin.buffer.read()).hexdigest())' \
		<$into/sglang-"$version"/kv_events.py)
	if [ "$got" != "$sum" ]; then
		echo "live publisher: $file of sglang $version has the wrong checksum: $got" >&2
		rm -rf $into
		exit 1
	fi
}

command -v python3 >/dev/null 2>&1 || skip "python3 is not installed"
echo "live publisher: preparing $into" >&2
rm -rf $into
mkdir -p $into
python3 -m venv $into/venv >$log 2>&1 || skip "python3 -m venv fails: $(tail -n 1 $log)"
pip install --only-binary :all: msgspec==0.22.0 pyzmq==27.3.0 pydantic==2.14.3 ||
	skip "its packages cannot be installed: $(tail -n 1 $log)"
publisher 0.5.8 2a20fcfaa230694e7cfa3554daecabb8b5b58702527560deac55d47ba248108a
publisher 0.5.23 ef80e7165b11280d30bc07a9e3c04de5057ee45e9c94503a3ac432b009a0e421 \
	--platform manylinux_2_34_x86_64 --python-version 3.11 --implementation cp --abi cp311
echo "$pins" >$into/pins
