"""Reads the entries of a kvcast journal from NATS servers, without a kvcast server.

Prints a line per entry: position, worker, kinds of events. Entries without events, which say
which server reads a worker's engines, are skipped. To resume in another run, pass the first word
of the last line as --after. See README.md for how to run it, and docs/nats.md for
the format.
"""

import argparse
import asyncio
import os
import sys
import urllib.parse

import nats
from nats.js import api

from kvcast.v1 import event_pb2


def decode(message):
    """Returns the entry that a message is; None if kvcast has not written it."""
    if "Kvcast" not in (message.headers or {}):
        return None
    # The header has the tiers, the length of what only kvcast reads at the end of the payload,
    # and the escaped model.
    _, state, _ = message.headers["Kvcast"].split(" ")
    entry = event_pb2.Entry.FromString(message.data[: len(message.data) - int(state)])
    entry.seq = message.metadata.sequence.stream
    token = message.subject.rpartition(".")[2]
    if entry.worker != ("" if token == "%" else urllib.parse.unquote(token)):
        raise ValueError(f"entry {entry.seq}: worker {entry.worker!r} under the subject {message.subject!r}")
    return entry


async def read(servers, stream, after, count):
    connection = await nats.connect(servers)
    jetstream = connection.jetstream()
    info = await jetstream.stream_info(stream)
    epoch = info.config.metadata["kvcast.epoch"]
    start = 1
    if after is not None:
        if after.epoch != epoch:
            sys.exit(f"the stream has the epoch {epoch}: its entries after {after.epoch}:{after.seq} are other ones; read all")
        if after.seq + 1 < info.state.first_seq:
            sys.exit(f"the entries after {after.seq} are gone: the oldest is {info.state.first_seq}")
        start = after.seq + 1
    # An ordered consumer delivers every message once and in order, also when a server restarts.
    subscription = await jetstream.subscribe(
        f"kvcast.{stream}.*",
        stream=stream,
        ordered_consumer=True,
        config=api.ConsumerConfig(deliver_policy=api.DeliverPolicy.BY_START_SEQUENCE, opt_start_seq=start),
    )
    async for message in subscription.messages:
        entry = decode(message)
        if entry is None or not entry.events:
            continue
        kinds = " ".join(event.WhichOneof("event") or "?" for event in entry.events)
        print(f"{epoch}:{entry.seq} {entry.worker} {kinds}", flush=True)
        count -= 1
        if count == 0:
            break
    await connection.close()


def position(text):
    epoch, _, seq = text.rpartition(":")
    return event_pb2.Position(epoch=epoch, seq=int(seq))


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--servers", default="nats://localhost:4222", help="NATS servers, separated by commas (%(default)s)")
    parser.add_argument("--stream", default="kvcast", help="name of the stream (%(default)s)")
    parser.add_argument("--after", type=position, metavar="EPOCH:SEQ", help="resume after this position (default: read all)")
    parser.add_argument("--count", type=int, default=0, metavar="N", help="stop after this many lines")
    args = parser.parse_args()
    asyncio.run(read(args.servers.split(","), args.stream, args.after, args.count))


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        pass
    except BrokenPipeError:  # the reader of standard output has closed it
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
