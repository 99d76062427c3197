#!/bin/sh
# release-check.sh VERSION checks that the commit can be released as VERSION, such as v1.2.3, without releasing anything: the form of the version, the places that
# name it, the versions that the Go modules require of each other, a clean tree, archives of all platforms of bin/dist, and that this platform's binary says the version and runs the demo.
set -eu
cd "$(dirname "$0")/../.."

version=$1
failed=
bad() {
	echo "release-check: $*" >&2
	failed=1
}

echo "$version" | grep -Eqx 'v[0-9]+\.[0-9]+\.[0-9]+(-[0-9A-Za-z.-]+)?' || bad "version \"$version\": want vMAJOR.MINOR.PATCH"
[ -z "$(git status --porcelain)" ] || bad "the tree has changes that are not committed"
for tag in $(tools/scripts/modules.sh tags "$version"); do
	! git rev-parse -q --verify "refs/tags/$tag" >/dev/null || bad "the tag $tag exists"
done
modules=$(tools/scripts/modules.sh check "$version")
[ -z "$modules" ] || bad "run tools/scripts/modules.sh release $version: $modules"
grep -Eq "^## \[?$version\]?([ ,]|\$)" CHANGELOG.md || bad "CHANGELOG.md has no section $version"
! grep -q "^## $version, not released" CHANGELOG.md || bad "CHANGELOG.md says that $version is not released: give its date"
grep -qx "appVersion: \"*$version\"*" deploy/helm/kvcast/Chart.yaml || bad "appVersion in deploy/helm/kvcast/Chart.yaml is not $version"
grep -qx "version: ${version#v}" deploy/helm/kvcast/Chart.yaml || bad "version in deploy/helm/kvcast/Chart.yaml is not ${version#v}"
grep -q "image: ghcr.io/kvcast/kvcast:$version " deploy/manifests/zmq-listener/listener.yaml || bad "the image in deploy/manifests/zmq-listener/listener.yaml is not of $version"
grep -q "image: ghcr.io/kvcast/kvcast:$version\$" docs/kubernetes.md || bad "the image in docs/kubernetes.md is not of $version"
[ -f "bin/dist/kvcast-${version#v}.tgz" ] || bad "bin/dist has no chart kvcast-${version#v}.tgz: run make dist VERSION=$version"

host=$(go env GOOS)-$(go env GOARCH)
archive=bin/dist/kvcast-$version-$host.tar.gz
if [ -f "$archive" ]; then
	(cd bin/dist && sha256sum --quiet --check SHA256SUMS) || bad "a file of bin/dist has another checksum"
	into=$(mktemp -d)
	trap 'rm -rf "$into"' EXIT
	tar -xzf "$archive" -C "$into" --strip-components 1
	for file in LICENSE THIRD_PARTY_LICENSES README.md CHANGELOG.md kvcast.1 kvcast; do
		[ -s "$into/$file" ] || bad "$archive has no $file"
	done
	"$into/kvcast" version | grep -q "$version" || bad "the binary says $("$into/kvcast" version | head -1), not $version"
	"$into/kvcast" demo >/dev/null || bad "the demo of the binary fails"
else
	bad "$archive is missing: run make dist VERSION=$version"
fi
[ -z "$failed" ] || exit 1
echo "release-check: $version can be tagged:" $(tools/scripts/modules.sh tags "$version")
