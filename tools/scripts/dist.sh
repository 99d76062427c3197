#!/bin/sh
# dist.sh VERSION PLATFORM... writes to bin/dist, for each platform, an archive with the binary that make build-static has built, the man page that make man
# has written and the licences of what is in it, and a list of the Go modules in it with their licences (CycloneDX); then the Helm chart, the checksums of all files,
# and where they come from (SLSA provenance). The files of one commit are equal wherever they are made.
set -eu
cd "$(dirname "$0")/../.."

version=$1
shift
into=bin/dist
rm -rf "$into"
mkdir -p "$into"
date=$(TZ=UTC0 git log -1 --date=format-local:%Y-%m-%dT%H:%M:%SZ --format=%cd)

# archive NAME packs the directory NAME of bin/dist into NAME.tar.gz, as FILE if that is given, and removes it.
archive() {
	tar --create --sort=name --owner=0 --group=0 --numeric-owner --mode=u+rw,go+r,go-w --mtime="$date" --directory "$into" --file "$into/$1.tar" "$1"
	rm -r "${into:?}/$1"
	gzip -9 --no-name "$into/$1.tar"
	[ $# -eq 1 ] || mv "$into/$1.tar.gz" "$into/$2"
}

for platform; do
	name=kvcast-$version-$(echo "$platform" | tr / -)
	binary=bin/kvcast-$(echo "$platform" | tr / -)
	mkdir "$into/$name"
	cp "$binary" "$into/$name/kvcast"
	cp LICENSE README.md CHANGELOG.md bin/kvcast.1 "$into/$name"
	tools/scripts/licenses.sh "$binary" >"$into/$name/THIRD_PARTY_LICENSES"
	case $platform in
	linux/*) cp deploy/systemd/kvcast.service "$into/$name" ;;
	esac
	archive "$name"
	bin/tools/cyclonedx-gomod bin -json -noserial -licenses -version "$version" -output "$into/$name.cdx.json" "$binary" 2>"$into/log" || {
		cat "$into/log" >&2
		exit 1
	}
	# The other modules of kvcast are built from the checkout, and so have neither a version nor a licence in the list.
	sed -i "s|\"timestamp\": \"[^\"]*\"|\"timestamp\": \"$date\"|; s|\"version\": \"(devel)\",|&\n      \"evidence\": {\"licenses\": [{\"license\": {\"id\": \"Apache-2.0\"}}]},|; s|(devel)|$version|g" "$into/$name.cdx.json"
done
rm "$into/log"

# A chart has a semantic version; a commit without a tag has none.
chart=${version#v}
case $version in
v[0-9]*.[0-9]*.[0-9]*) ;;
*) chart=0.0.0-g$version ;;
esac
bin/tools/helm package deploy/helm/kvcast --version "$chart" --app-version "$version" --destination "$into" >/dev/null
tar -xmzf "$into/kvcast-$chart.tgz" -C "$into"
sed -i "s|(\.\./\.\./\.\./|(https://github.com/kvcast/kvcast/blob/$version/|g" "$into/kvcast/README.md" "$into/kvcast/values.yaml"
archive kvcast "kvcast-$chart.tgz" # helm's has the time

(cd "$into" && sha256sum -- * >SHA256SUMS)
tools/scripts/provenance.sh "$version" >"$into/provenance.json"
cat "$into/SHA256SUMS"
