"""Chooses a worker for each prompt: the one that holds the longest prefix of it.

Reads a JSON list of token ids per line, and prints the chosen worker, its endpoint, and how
many tokens it need not compute. See README.md for how to run it.
"""

import argparse
import collections
import json
import sys

import grpc

import kvcast


class Router:
    """Chooses workers of one model."""

    def __init__(self, client, model, timeout):
        self.client = client
        self.matcher = client.matcher()
        self.model = model
        self.timeout = timeout
        self.endpoints = {}  # by worker
        self.requests = collections.Counter()  # sent to each worker
        self.refresh()

    def refresh(self):
        """Reads the workers. A real router does so every few seconds, or follows the subscription."""
        models = [self.model] if self.model else []
        self.endpoints = {worker.name: worker.endpoint for worker in self.client.workers(kvcast.Filter(models=models))}

    def match(self, tokens):
        """Returns the matches of a prompt, best first; none if the server does not answer."""
        request = kvcast.MatchRequest([kvcast.Prompt(tokens=tokens)], model=self.model)
        try:
            return self.matcher.match(request, timeout=self.timeout).matches[0]
        except (kvcast.KvcastError, TimeoutError) as error:
            if isinstance(error, kvcast.StatusError) and error.code is grpc.StatusCode.INVALID_ARGUMENT:  # a mistake in this program
                raise
            print(f"no answer ({error}); routing without it", file=sys.stderr)
            return []

    def choose(self, tokens):
        """Returns a worker, and the number of tokens that it holds in some tier."""
        cached = {}  # by worker: the longest prefix over its dp ranks
        for match in self.match(tokens):
            # Blocks of a rank that may have restarted may all be gone.
            restarted = kvcast.DegradedReason.DEGRADED_REASON_POSSIBLE_RESTART in match.reasons
            if match.worker in self.endpoints and not restarted:
                cached[match.worker] = max(cached.get(match.worker, 0), match.tokens)
        if not self.endpoints:
            raise LookupError(f"there is no worker with the model {self.model!r}")
        # Of equal prefixes, prefer the worker with the fewest requests. A real router weighs the
        # prefix against the load: see examples/router.
        best = min(sorted(self.endpoints), key=lambda worker: (-cached.get(worker, 0), self.requests[worker]))
        self.requests[best] += 1
        return best, cached.get(best, 0)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--addr", default="localhost:50051", help="address of the server (%(default)s)")
    parser.add_argument("--model", default="", help="model of the prompts (default: all)")
    # A router must route without an answer, too: kvcast is a hint, and the engines work without it.
    parser.add_argument("--timeout", type=float, default=0.2, help="seconds after which it routes without an answer (%(default)s)")
    args = parser.parse_args()
    with kvcast.Client(args.addr, client_id="route.py") as client:
        router = Router(client, args.model, args.timeout)
        with router.matcher:
            for line in sys.stdin:
                tokens = json.loads(line)
                worker, cached = router.choose(tokens)
                print(f"{worker} {router.endpoints[worker] or '-'} {cached} of {len(tokens)} tokens", flush=True)


if __name__ == "__main__":
    try:
        main()
    except (LookupError, kvcast.KvcastError) as error:
        sys.exit(str(error))
    except KeyboardInterrupt:
        pass
