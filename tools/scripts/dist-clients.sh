#!/bin/sh
# dist-clients.sh writes to bin/dist/clients what would be published of the clients in other languages: the wheel for Python, the crate for Rust, the
# tarball for npm, and their checksums. It needs what clients.sh has prepared.
set -eu
cd "$(dirname "$0")/../.."

into=$PWD/bin/dist/clients
rm -rf "$into"
mkdir -p "$into"
SOURCE_DATE_EPOCH=$(git log -1 --format=%ct)
export SOURCE_DATE_EPOCH
for client in python/venv/bin/python rust/debug typescript/node_modules; do
	[ -e "bin/clients/$client" ] || { echo "bin/clients/$client is not here: make clients prepares it, or says why it cannot" >&2; exit 1; }
done

tools/scripts/wheel.sh bin/clients/python/venv/bin/python "$into"

# The crate is compiled by make clients.
cargo package --quiet --locked --allow-dirty --no-verify --manifest-path clients/rust/Cargo.toml --target-dir bin/clients/rust
cp bin/clients/rust/package/kvcast-client-*.crate "$into"

(cd bin/clients/typescript && npm pack --silent --pack-destination "$into" >/dev/null)

cd "$into"
sha256sum -- * >SHA256SUMS
cat SHA256SUMS
