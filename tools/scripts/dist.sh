#!/bin/sh
# dist.sh VERSION PLATFORM... writes to bin/dist, for each platform, an archive with the binary that make build-static has built, the man page that make man
# has written and the licences of what is in it, and a list of the Go modules in it with their licences (CycloneDX), and then the checksums of all files. Archives of one commit are equal; the lists have the time.
set -eu
cd "$(dirname "$0")/../.."

version=$1
shift
into=bin/dist
rm -rf "$into"
mkdir -p "$into"
date=$(git log -1 --format=%cI)
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
	tar --create --sort=name --owner=0 --group=0 --numeric-owner --mode=u+rw,go+r,go-w --mtime="$date" --directory "$into" --file "$into/$name.tar" "$name"
	gzip -9 --no-name "$into/$name.tar"
	rm -r "${into:?}/$name"
	bin/tools/cyclonedx-gomod bin -json -noserial -licenses -version "$version" -output "$into/$name.cdx.json" "$binary" 2>"$into/log" || {
		cat "$into/log" >&2
		exit 1
	}
	# The other modules of kvcast are built from the checkout, and so have neither a version nor a licence in the list.
	sed -i "s|\"version\": \"(devel)\",|&\n      \"evidence\": {\"licenses\": [{\"license\": {\"id\": \"Apache-2.0\"}}]},|; s|(devel)|$version|g" "$into/$name.cdx.json"
done
rm "$into/log"
cd "$into"
sha256sum -- * >SHA256SUMS
cat SHA256SUMS
