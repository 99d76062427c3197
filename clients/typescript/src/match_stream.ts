import type { Connection } from "./connection.js";
import { ClosedError, EndedError, ViolationError } from "./errors.js";
import type { MatchPrefixesRequest, MatchPrefixResponse } from "./gen/kvcast/v1/match_pb.js";
import { errorFrom } from "./status.js";

/** A request of a stream, and what gets its answer. */
export interface MatchCall {
  message: MatchPrefixesRequest;
  resolve: (response: MatchPrefixResponse | undefined) => void;
  reject: (error: Error) => void;
}

/** An open MatchPrefixes stream with its requests in flight. */
export class MatchStream {
  /** Resolves when the stream has ended and its connection is closed. */
  readonly done: Promise<void>;
  readonly #connection: Connection;
  readonly #cancel = new AbortController();
  readonly #onEnd: (error: Error, calls: MatchCall[]) => void;
  /** Calls without an answer, in the order of the requests: from #first on. */
  #calls: MatchCall[] = [];
  #first = 0;
  /** Requests that are not written yet: from #nextUnsent on. */
  #unsent: MatchPrefixesRequest[] = [];
  #nextUnsent = 0;
  /** Wakes the writer; undefined: it does not wait. */
  #wake: (() => void) | undefined;
  /** Why the caller has closed the stream; undefined: it has not. */
  #closed: ClosedError | undefined;

  /** Opens a stream. A function gets its error and the calls without an answer when it ends. */
  constructor(connection: Connection, onEnd: (error: Error, calls: MatchCall[]) => void) {
    this.#connection = connection;
    this.#onEnd = onEnd;
    this.done = this.#run();
  }

  /** Sends a request. */
  send(call: MatchCall): void {
    this.#calls.push(call);
    this.#unsent.push(call.message);
    this.#wake?.();
  }

  /** Ends the stream. */
  close(error: ClosedError): void {
    this.#closed = error;
    this.#cancel.abort(error);
    this.#connection.close();
    this.#wake?.();
  }

  async #run(): Promise<void> {
    const error = await this.#receive();
    this.#cancel.abort(error);
    this.#wake?.();
    this.#connection.close();
    this.#onEnd(this.#closed ?? error, this.#calls.slice(this.#first));
  }

  /** Passes answers to their calls until the stream ends, and returns the reason. */
  async #receive(): Promise<Error> {
    try {
      await this.#connection.connect();
      const { signal } = this.#cancel;
      for await (const m of this.#connection.rpc.matchPrefixes(this.#requests(), { signal })) {
        const call = this.#calls[this.#first];
        if (call === undefined || call.message.id !== m.id) {
          return new ViolationError("answers are not in the order of requests");
        }
        this.#calls[this.#first++] = undefined!; // release it
        if (this.#first >= 1024) {
          this.#calls = this.#calls.slice(this.#first);
          this.#first = 0;
        }
        call.resolve(m.response);
      }
      return new EndedError();
    } catch (reason) {
      return errorFrom(reason);
    }
  }

  /** The requests to write, as they come. */
  async *#requests(): AsyncGenerator<MatchPrefixesRequest> {
    while (!this.#cancel.signal.aborted) {
      const next = this.#unsent[this.#nextUnsent];
      if (next === undefined) {
        await new Promise<void>((resolve) => {
          this.#wake = resolve;
        });
        this.#wake = undefined;
        continue;
      }
      if (++this.#nextUnsent === this.#unsent.length) {
        this.#unsent = [];
        this.#nextUnsent = 0;
      }
      yield next;
    }
  }
}
