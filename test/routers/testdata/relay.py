"""The server of an engine in SMG: SubscribeKvEvents by SMG's own relay, which reads the engine's ZeroMQ publisher. For package routers.

Arguments: the address to listen at, and the endpoints of the publisher and of its replay socket. It prints a line when it listens, and
ends with its standard input.
"""

import asyncio
import sys

import grpc
from smg_grpc_proto.generated import vllm_engine_pb2_grpc
from smg_grpc_servicer import kv_relay


class Engine(vllm_engine_pb2_grpc.VllmEngineServicer):
    def __init__(self, endpoint, replay):
        self.sources = [kv_relay.RankSource(rank=0, endpoint=endpoint, replay_endpoint=replay)]

    async def SubscribeKvEvents(self, request, context):
        async for batch in kv_relay.relay(self.sources, kv_relay.Engine.VLLM, request.start_sequence_number, context, recv_timeout=0.1):
            yield batch


async def main():
    address, endpoint, replay = sys.argv[1:]
    server = grpc.aio.server()
    vllm_engine_pb2_grpc.add_VllmEngineServicer_to_server(Engine(endpoint, replay), server)
    if server.add_insecure_port(address) == 0:
        sys.exit(f"cannot listen at {address}")
    await server.start()
    print("listening", flush=True)
    await asyncio.get_running_loop().run_in_executor(None, sys.stdin.read)
    await server.stop(0)


asyncio.run(main())
