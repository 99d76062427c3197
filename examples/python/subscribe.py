"""Follows a kvcast server and prints a line per entry.

When a stream ends, the client resumes after the last printed entry, so that each entry is
printed exactly once. To resume in another run, pass the first word of the last line as --after.
See README.md for how to run it.
"""

import argparse
import os
import sys

import kvcast


class Follower:
    """A router's state: the hashes of all blocks by worker, dp rank and tier."""

    def __init__(self):
        self.entries = 0
        self.workers = {}  # sets of block hashes by dp rank and tier, by worker

    def apply(self, message, position):
        if message.HasField("snapshot_begin"):
            self.workers.clear()
        if message.HasField("snapshot_worker"):
            self.workers.setdefault(message.snapshot_worker.worker, {})
        for blocks in message.snapshot_blocks:
            for event in blocks.events:
                self.apply_event(blocks.worker, event)
        for entry in message.entries:
            for event in entry.events:
                self.apply_event(entry.worker, event)
            # Entries without events say which server reads the worker's engines.
            if position is not None and entry.events:
                self.entries += 1
                kinds = " ".join(event.WhichOneof("event") or "?" for event in entry.events)
                print_line(f"{position.epoch}:{entry.seq} {entry.worker} {kinds}")
        if message.HasField("snapshot_end"):
            print_line(f"{position} snapshot of {len(self.workers)} workers, {self.blocks()} blocks")

    def apply_event(self, worker, event):
        """Applies an event. Applying it twice has no further effect."""
        sets = self.workers.setdefault(worker, {})
        key = (event.dp_rank, event.tier)
        kind = event.WhichOneof("event")
        if kind == "stored":
            sets.setdefault(key, set()).update(event.stored.block_hashes)
        elif kind == "removed":
            sets.get(key, set()).difference_update(event.removed.block_hashes)
        elif kind == "cleared":
            for rank, tier in list(sets):
                if rank == event.dp_rank and (not event.cleared.tiers or tier in event.cleared.tiers):
                    del sets[rank, tier]
        elif kind == "worker_removed":
            del self.workers[worker]

    def blocks(self):
        return sum(len(hashes) for sets in self.workers.values() for hashes in sets.values())


def print_line(line):
    print(line, flush=True)


def follow(addr, start, count):
    follower = Follower()
    with kvcast.Client(addr, client_id="subscribe.py") as client:
        for update in client.subscribe(kvcast.SubscribeOptions(start=start)):
            if update.interruption:
                print(f"the stream ended ({update.interruption.error}); resuming", file=sys.stderr)
                continue
            follower.apply(update.message, update.position)
            if count and follower.entries >= count:
                return


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--addr", default="localhost:50051", help="address of the server (%(default)s)")
    parser.add_argument(
        "--after", type=kvcast.Position.parse, metavar="EPOCH:SEQ", help="resume after this position (default: start with a snapshot)"
    )
    parser.add_argument("--count", type=int, default=0, metavar="N", help="stop after this many entries and the rest of their message")
    args = parser.parse_args()
    follow(args.addr, args.after or kvcast.Start.SNAPSHOT, args.count)


if __name__ == "__main__":
    try:
        main()
    except kvcast.StatusError as error:
        sys.exit(str(error))
    except KeyboardInterrupt:
        pass
    except BrokenPipeError:  # the reader of standard output has closed it
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
