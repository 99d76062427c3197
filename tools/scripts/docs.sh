#!/bin/sh
# docs.sh VERSION builds the docs site in bin/docs: README.md, docs and the other pages that README.md's list of docs names, a reference of the contract, and the man page that
# make man has written. Zensical, in the version of tools/docs/requirements.txt, is installed in bin/docs-env on first use.
set -eu
cd "$(dirname "$0")/../.."

env=bin/docs-env
pages=bin/docs-src
say() { echo "docs: $*" >&2; }

sum=$(cksum <tools/docs/requirements.txt)
if [ "$(cat "$env/sum" 2>/dev/null || true)" != "$sum" ]; then
	say "installing Zensical in $env, which takes half a minute"
	rm -rf "$env"
	python3 -m venv "$env"
	"$env/bin/python" -m pip --quiet --disable-pip-version-check --no-input install --require-hashes --only-binary :all: -r tools/docs/requirements.txt
	echo "$sum" >"$env/sum"
fi

# Search in files that are opened without a server needs a shim for workers, which the theme would load from another host.
shim=$env/iframe-worker-1.0.4.js
if [ ! -f "$shim" ]; then
	say "fetching iframe-worker from npm"
	download=$(mktemp -d)
	trap 'rm -rf "$download"' EXIT
	(cd "$download" && npm pack --silent iframe-worker@1.0.4 >/dev/null && tar -xzf iframe-worker-1.0.4.tgz)
	echo "e8e412dbcfea9b7e31b5ffa288d7b6035915e714c542f4176a0cdbe262fc9609  $download/package/shim/index.js" | sha256sum --quiet --check
	{ echo '/*!' && cat "$download/package/LICENSE" && echo '*/' && cat "$download/package/shim/index.js"; } >"$shim"
fi

say "generating the reference of the contract"
rm -rf "$pages" bin/docs
PATH="$PWD/bin/tools:$PATH" bin/tools/buf generate --template tools/docs/buf.gen.yaml --path proto/kvcast/v1 -o "$pages/proto"
mkdir -p "$pages/assets/javascripts"
cp "$shim" "$pages/assets/javascripts/iframe-worker.js"
cp bin/kvcast.1 "$pages"
say "building bin/docs"
"$env/bin/python" tools/docs/pages.py "$pages"
SITE_VERSION="kvcast $1" "$env/bin/zensical" build --strict --clean --config-file "$pages.yml"
say "open bin/docs/index.html; the man page is bin/docs/kvcast.1"
