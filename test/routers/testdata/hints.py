# Reads KV hints as JSON, one a line, with vLLM's message classes and KVCR's parser, and prints what KVCR would fetch. The arguments are
# the files of vLLM and of KVCR.
import importlib.util
import json
import sys

import msgspec


def load(name, path):
    spec = importlib.util.spec_from_file_location(name, path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


protocol, parser = load("protocol", sys.argv[1]), load("hint_parser", sys.argv[2])
for line in sys.stdin:
    envelope = msgspec.json.decode(line, type=protocol.KvHintsEnvelope)
    hint = parser._KVFetchHint.from_hint(msgspec.to_builtins(envelope))
    print(json.dumps({"endpoint": hint.source_endpoint, "block_hashes": sorted(hint.block_hashes)}), flush=True)
