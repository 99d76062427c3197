#!/bin/sh
# release-trial.sh VERSION makes a whole release in a temporary clone, and publishes nothing: it names the version, tags, builds the archives, the chart and
# the image, signs with a key of its own, and then uses all of it as its users would. What needs root, buildah or cosign is left out if that is missing, with
# a line that says so.
set -eu
cd "$(dirname "$0")/../.."

version=$1
root=$PWD
into=$(mktemp -d)
trap 'chmod -R u+w "$into"; rm -rf "$into"' EXIT
trap 'exit 1' INT TERM
step() { echo "== $*" >&2; }
fail() {
	echo "release-trial: $*" >&2
	exit 1
}

git clone -q . "$into/kvcast"
cd "$into/kvcast"
mkdir -p bin
ln -s "$root/bin/tools" bin/tools

step "name $version, as CONTRIBUTING.md says"
tools/scripts/modules.sh release "$version"
sed -i "s/^## $version, not released yet\$/## $version, $(date +%F)/" CHANGELOG.md
sed -i "s/^version: .*/version: ${version#v}/; s/^appVersion: .*/appVersion: $version/" deploy/helm/kvcast/Chart.yaml
sed -i "s|\(image: ghcr.io/kvcast/kvcast\):v[^ ]*|\1:$version|" deploy/manifests/zmq-listener/listener.yaml docs/kubernetes.md
git commit -q --all --allow-empty -m "release: $version"

step "make dist, and check it"
make --no-print-directory dist VERSION="$version" >/dev/null
tools/scripts/release-check.sh "$version"
cp bin/dist/SHA256SUMS "$into/before"
for tag in $(tools/scripts/modules.sh tags "$version"); do
	git tag "$tag"
done
make --no-print-directory dist >/dev/null
cmp "$into/before" bin/dist/SHA256SUMS || fail "make dist of the tag has written other files than before"
tools/scripts/notes.sh "$version" >"$into/notes"

step "go install, and go get of the client, from the tags"
export GOMODCACHE="$into/modules" GOBIN="$into/bin" GOFLAGS=-modcacherw GOWORK=off CGO_ENABLED=0
proxy="file://$(GOMODCACHE='' go env GOMODCACHE)/cache/download"
install() { # other modules come from the cache and the usual proxy, kvcast's by git from the clone
	GOPROXY="$proxy,$(go env GOPROXY)" GONOPROXY=github.com/kvcast GONOSUMDB=github.com/kvcast GIT_CONFIG_COUNT=1 \
		GIT_CONFIG_KEY_0="url.file://$into/kvcast.insteadOf" GIT_CONFIG_VALUE_0=https://github.com/kvcast/kvcast go "$@"
}
mkdir "$into/router"
cd "$into/router"
install install "github.com/kvcast/kvcast/cmd/kvcast@$version" 2>"$into/log" || { cat "$into/log" >&2; fail "go install"; }
"$into/bin/kvcast" version | grep -q "^kvcast $version " || fail "go install: kvcast version says $("$into/bin/kvcast" version)"
cp "$into/kvcast/examples/follow/main.go" .
{ install mod init example.com/router && install get "github.com/kvcast/kvcast/client@$version" && install build -mod=mod .; } 2>"$into/log" || {
	cat "$into/log" >&2
	fail "a program with the client"
}
unset GOMODCACHE GOBIN GOFLAGS GOWORK CGO_ENABLED
cd "$into/kvcast"

step "the chart"
chart=bin/dist/kvcast-${version#v}.tgz
bin/tools/helm lint --strict "$chart" >/dev/null
images=$(bin/tools/helm template kvcast "$chart" | sed -n 's/.*image: //p' | sort -u)
[ "$images" = "ghcr.io/kvcast/kvcast:$version" ] || fail "the chart has the images $images"

if [ -x bin/tools/cosign ]; then
	step "signatures"
	(cd "$into" && COSIGN_PASSWORD='' "$root/bin/tools/cosign" generate-key-pair 2>/dev/null)
	COSIGN_PASSWORD='' COSIGN_KEY="$into/cosign.key" tools/scripts/sign.sh 2>"$into/log" || { cat "$into/log" >&2; fail "sign"; }
	verify() { bin/tools/cosign "$@" --key "$into/cosign.pub" --insecure-ignore-tlog=true 2>"$into/log" || { cat "$into/log" >&2; fail "a signature"; }; }
	verify verify-blob --bundle bin/dist/SHA256SUMS.sigstore.json bin/dist/SHA256SUMS
	verify verify-blob-attestation --bundle bin/dist/provenance.sigstore.json --type slsaprovenance1 "$chart"
	echo other >"$into/other"
	! bin/tools/cosign verify-blob --key "$into/cosign.pub" --insecure-ignore-tlog=true --bundle bin/dist/SHA256SUMS.sigstore.json "$into/other" 2>/dev/null ||
		fail "the signature is also of another file"
else
	echo "release-trial: no signatures: make cosign builds bin/tools/cosign" >&2
fi

if [ "$(id -u)" = 0 ]; then
	step "the image"
	VERSION="$version" tools/scripts/image.sh static
else
	echo "release-trial: no image: that needs root" >&2
fi
step "$version: $(ls bin/dist | wc -l) files in bin/dist, $(wc -l <"$into/notes") lines of notes"
