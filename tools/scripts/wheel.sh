#!/bin/sh
# Builds the wheel of the client in Python, with a Python that has setuptools, into a folder. Usage: wheel.sh PYTHON FOLDER
set -eu
cd "$(dirname "$0")/../.."

# A copy, since setuptools writes beside the sources.
copy=$(mktemp -d)
trap 'rm -rf "$copy"' EXIT
tar -C clients/python --exclude=__pycache__ --exclude=build --exclude='*.egg-info' -cf - . | tar -C "$copy" -xf -
rm -f "$2"/kvcast-*.whl
# The time of the files in it, which would otherwise differ each time.
SOURCE_DATE_EPOCH=${SOURCE_DATE_EPOCH:-$(git log -1 --format=%ct)}
export SOURCE_DATE_EPOCH
"$1" -m pip --quiet --disable-pip-version-check wheel --no-deps --no-build-isolation --no-index --wheel-dir "$2" "$copy"
