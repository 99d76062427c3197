import { once } from "node:events";
import { createServer, type Http2Server, type ServerHttp2Session } from "node:http2";
import type { AddressInfo, Socket } from "node:net";
import { BinaryWriter } from "@bufbuild/protobuf/wire";
import type { MessageInitShape } from "@bufbuild/protobuf";
import { Code, ConnectError, type ServiceImpl } from "@connectrpc/connect";
import { connectNodeAdapter } from "@connectrpc/connect-node";
import { Accepted_Mode, RouterEventService, type SubscribeResponseSchema } from "../src/gen/kvcast/v1/router_event_service_pb.js";

export type Handlers = Partial<ServiceImpl<typeof RouterEventService>>;
export type Response = Extract<MessageInitShape<typeof SubscribeResponseSchema>, { readonly $typeName?: undefined }>;

/** A server in this process. */
export class TestServer {
  readonly sessions = new Set<ServerHttp2Session>();
  /** Sessions since the start. */
  connections = 0;
  pings = 0;
  readonly #server: Http2Server;
  readonly #sockets = new Set<Socket>();
  readonly #changed: (() => void)[] = [];

  private constructor(handlers: Handlers) {
    this.#server = createServer(connectNodeAdapter({ routes: (router) => router.service(RouterEventService, handlers) }));
    this.#server.on("connection", (socket: Socket) => {
      this.#sockets.add(socket);
      socket.on("error", () => {}).on("close", () => this.#sockets.delete(socket));
    });
    this.#server.on("session", (session) => {
      this.connections++;
      this.sessions.add(session);
      session.on("error", () => {});
      session.on("ping", () => {
        this.pings++;
        this.#notify();
      });
      session.on("close", () => {
        this.sessions.delete(session);
        this.#notify();
      });
      this.#notify();
    });
  }

  static async start(handlers: Handlers): Promise<TestServer> {
    const s = new TestServer(handlers);
    s.#server.listen(0, "127.0.0.1");
    await once(s.#server, "listening");
    return s;
  }

  get address(): string {
    return `127.0.0.1:${(this.#server.address() as AddressInfo).port}`;
  }

  /** Waits until a condition of the connections is true. */
  async until(condition: () => boolean): Promise<void> {
    while (!condition()) {
      await new Promise<void>((resolve) => this.#changed.push(resolve));
    }
  }

  #notify(): void {
    this.#changed.splice(0).forEach((wake) => wake());
  }

  /** Resets all connections. */
  cut(): void {
    this.#sockets.forEach((socket) => socket.resetAndDestroy());
  }

  /** Waits until clients have closed their connections, and stops. */
  async stop(): Promise<void> {
    await this.until(() => this.sessions.size === 0);
    this.#server.close();
    await once(this.#server, "close");
  }
}

/** Returns an error of the contract. */
export function contractError(code: Code, reason: string, more: { retryAfterMs?: number; metadata?: Record<string, string> } = {}): ConnectError {
  const e = new ConnectError("the server says so", code);
  const info = new BinaryWriter().tag(1, 2).string(reason).tag(2, 2).string("kvcast");
  for (const [key, value] of Object.entries(more.metadata ?? {})) {
    info.tag(3, 2).fork().tag(1, 2).string(key).tag(2, 2).string(value).join();
  }
  e.details.push({ type: "google.rpc.ErrorInfo", value: info.finish() });
  if (more.retryAfterMs !== undefined) {
    const delay = new BinaryWriter().tag(1, 2).fork();
    delay.tag(1, 0).int64(Math.floor(more.retryAfterMs / 1000)).tag(2, 0).int32((more.retryAfterMs % 1000) * 1e6).join();
    e.details.push({ type: "google.rpc.RetryInfo", value: delay.finish() });
  }
  return e;
}

/** Returns an Accepted that resumes at a position of epoch e. */
export function resumed(seq: bigint): Response {
  return { accepted: { epoch: "e", mode: Accepted_Mode.RESUME, oldestSeq: 1n, newestSeq: seq }, position: { epoch: "e", seq }, prevSeq: seq };
}

/** Returns a Progress at a position of epoch e. */
export function progress(seq: bigint): Response {
  return { progress: {}, position: { epoch: "e", seq }, prevSeq: seq };
}

/** A promise, and what resolves it. */
export function latch(): { done: Promise<void>; open: () => void } {
  let open!: () => void;
  const done = new Promise<void>((resolve) => {
    open = resolve;
  });
  return { done, open };
}
