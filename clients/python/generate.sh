#!/bin/sh
# Generates src/kvcast/v1 from the contract, with the grpcio-tools of the Python that is given: 1.68.1, so that all later
# versions of grpcio and protobuf can run the code. Usage: ./generate.sh [PYTHON [FOLDER]]
set -eu
cd "$(dirname "$0")"
python=${1:-python3}
into=${2:-src}
mkdir -p "$into/kvcast/v1"
messages="event match worker router_event_service"
"$python" -m grpc_tools.protoc -I ../../proto --python_out="$into" --pyi_out="$into" $(for m in $messages; do echo "../../proto/kvcast/v1/$m.proto"; done)
"$python" -m grpc_tools.protoc -I ../../proto --grpc_python_out="$into" ../../proto/kvcast/v1/router_event_service.proto
: >"$into/kvcast/v1/__init__.py"
