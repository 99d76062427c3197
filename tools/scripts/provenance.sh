#!/bin/sh
# provenance.sh VERSION prints where the files of bin/dist come from: an in-toto statement with SLSA provenance (https://slsa.dev/spec/v1.1/provenance). Its
# subjects are the files of SHA256SUMS. sign.sh signs it.
set -eu
cd "$(dirname "$0")/../.."

version=$1
repository=https://github.com/kvcast/kvcast
subjects=$(sed 's|^\([0-9a-f]*\)  \(.*\)$|    {"name": "\2", "digest": {"sha256": "\1"}},|; $s|,$||' bin/dist/SHA256SUMS)
cat <<END
{
  "_type": "https://in-toto.io/Statement/v1",
  "subject": [
$subjects
  ],
  "predicateType": "https://slsa.dev/provenance/v1",
  "predicate": {
    "buildDefinition": {
      "buildType": "$repository/blob/main/CONTRIBUTING.md#release",
      "externalParameters": {"command": "make dist", "version": "$version"},
      "resolvedDependencies": [
        {"uri": "git+$repository@refs/tags/$version", "digest": {"gitCommit": "$(git rev-parse HEAD)"}},
        {"uri": "https://go.dev/dl/$(go env GOVERSION)", "name": "$(go env GOVERSION)"}
      ]
    },
    "runDetails": {"builder": {"id": "$repository/blob/main/tools/scripts/dist.sh"}}
  }
}
END
