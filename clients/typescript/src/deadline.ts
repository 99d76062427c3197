import { KvcastError } from "./errors.js";

/** What ends a call before its answer. */
export interface CallOptions {
  /** Ends the call, which then throws the signal's reason. */
  signal?: AbortSignal | undefined;
  /** The time limit in milliseconds; undefined: that of the client. Then the call throws DEADLINE_EXCEEDED. */
  timeoutMs?: number | undefined;
}

/** The end of a call by its caller's signal or its time limit. */
export class Deadline {
  /** Rejects when the call must end. It never resolves. */
  readonly ended: Promise<never>;
  #timer: NodeJS.Timeout | undefined;
  readonly #signal: AbortSignal | undefined;
  readonly #onAbort: () => void;
  #onEnd: ((reason: unknown) => void) | undefined;
  #reason: { error: unknown } | undefined;

  constructor({ signal, timeoutMs }: CallOptions) {
    let reject!: (reason: unknown) => void;
    this.ended = new Promise<never>((_, r) => {
      reject = r;
    });
    this.ended.catch(() => {}); // the caller may have ended already
    const end = (error: unknown): void => {
      if (this.#reason === undefined) {
        this.#reason = { error };
        reject(error);
        this.#onEnd?.(error);
      }
    };
    this.#signal = signal;
    this.#onAbort = () => end(signal!.reason);
    if (signal?.aborted) {
      end(signal.reason);
      return;
    }
    signal?.addEventListener("abort", this.#onAbort, { once: true });
    if (timeoutMs !== undefined && Number.isFinite(timeoutMs)) {
      this.#timer = setTimeout(() => {
        end(new KvcastError(`no answer within ${timeoutMs} ms`, { code: "DEADLINE_EXCEEDED" }));
      }, Math.min(Math.max(timeoutMs, 0), 0x7fffffff));
    }
  }

  /** Calls a function when the call must end; at once if it must already. It replaces the function before. */
  onEnd(f: (reason: unknown) => void): void {
    this.#onEnd = f;
    if (this.#reason !== undefined) {
      f(this.#reason.error);
    }
  }

  /** Throws the reason if the call must end. */
  check(): void {
    if (this.#reason !== undefined) {
      throw this.#reason.error;
    }
  }

  /** Releases the timer and the signal. It must be called when the call is over. */
  release(): void {
    clearTimeout(this.#timer);
    this.#signal?.removeEventListener("abort", this.#onAbort);
    this.#onEnd = undefined;
  }
}
