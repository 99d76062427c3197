#!/bin/sh
# sign.sh [IMAGE@DIGEST] signs what make dist has written, and an image, with cosign: SHA256SUMS, which names all files, and the provenance. Without COSIGN_KEY, the
# signatures are keyless: cosign asks for an identity, and writes it to the public log. Each signature is a bundle beside its file:
#
#   cosign verify-blob --bundle SHA256SUMS.sigstore.json --certificate-identity NAME --certificate-oidc-issuer URL SHA256SUMS
set -eu
cd "$(dirname "$0")/../.."

cosign=bin/tools/cosign
options=--yes
if [ -n "${COSIGN_KEY-}" ]; then # nothing is written to the public log
	$cosign signing-config create --out bin/signing.json
	options="$options --key $COSIGN_KEY --signing-config bin/signing.json"
fi
$cosign sign-blob $options --bundle bin/dist/SHA256SUMS.sigstore.json bin/dist/SHA256SUMS >/dev/null
$cosign attest-blob $options --statement bin/dist/provenance.json --bundle bin/dist/provenance.sigstore.json
for image; do
	$cosign sign $options "$image"
done
