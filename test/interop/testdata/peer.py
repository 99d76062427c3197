"""A peer in Python, with pyzmq. The comment of package interop describes its input and output."""

import sys

import zmq


def frame(size):
    return (bytes(range(251)) * (size // 251 + 1))[:size]


def publish(socket):
    for line in sys.stdin:
        first, *sizes = line.split()
        socket.send_multipart([first.encode(), *(frame(int(size)) for size in sizes)])
        print("sent", flush=True)


def reply(socket):
    while True:
        peer, *_, start = socket.recv_multipart()
        for seq in range(int.from_bytes(start, "big"), 100):
            socket.send_multipart([peer, b"", seq.to_bytes(8, "big"), frame(seq)])
        socket.send_multipart([peer, b"", b"\xff" * 8, b""])


def main():
    kind, how, endpoint, heartbeat = sys.argv[1:]
    socket = zmq.Context().socket({"pub": zmq.PUB, "router": zmq.ROUTER}[kind])
    socket.sndhwm = 0
    socket.linger = 0
    socket.ipv6 = "[" in endpoint
    if int(heartbeat):
        socket.heartbeat_ivl = int(heartbeat)
        socket.heartbeat_timeout = 60_000
    if how == "bind":
        socket.bind(endpoint)
        endpoint = socket.last_endpoint.decode()
    else:
        socket.connect(endpoint)
    print(endpoint, flush=True)
    (publish if kind == "pub" else reply)(socket)


main()
