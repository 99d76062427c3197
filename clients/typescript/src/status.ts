import { BinaryReader } from "@bufbuild/protobuf/wire";
import { Code, ConnectError } from "@connectrpc/connect";
import { KvcastError, type GrpcCode, type KvcastErrorDetails } from "./errors.js";

const codeNames: Readonly<Record<Code, GrpcCode>> = {
  [Code.Canceled]: "CANCELLED",
  [Code.Unknown]: "UNKNOWN",
  [Code.InvalidArgument]: "INVALID_ARGUMENT",
  [Code.DeadlineExceeded]: "DEADLINE_EXCEEDED",
  [Code.NotFound]: "NOT_FOUND",
  [Code.AlreadyExists]: "ALREADY_EXISTS",
  [Code.PermissionDenied]: "PERMISSION_DENIED",
  [Code.ResourceExhausted]: "RESOURCE_EXHAUSTED",
  [Code.FailedPrecondition]: "FAILED_PRECONDITION",
  [Code.Aborted]: "ABORTED",
  [Code.OutOfRange]: "OUT_OF_RANGE",
  [Code.Unimplemented]: "UNIMPLEMENTED",
  [Code.Internal]: "INTERNAL",
  [Code.Unavailable]: "UNAVAILABLE",
  [Code.DataLoss]: "DATA_LOSS",
  [Code.Unauthenticated]: "UNAUTHENTICATED",
};

/** The domain of kvcast's ErrorInfo. */
const domain = "kvcast";

/**
 * Returns the error of a call. A status that a server has sent keeps its code. All else is a failure of the transport,
 * which is UNAVAILABLE, except for an HTTP status and a message that is too large, whose codes a retry would repeat.
 */
export function errorFrom(reason: unknown): KvcastError {
  if (reason instanceof KvcastError) {
    return reason;
  }
  const e = ConnectError.from(reason, Code.Unavailable);
  const details: KvcastErrorDetails = { code: codeOf(e) };
  for (const d of e.details) {
    if (!("type" in d)) {
      continue;
    }
    try {
      if (d.type === "google.rpc.ErrorInfo") {
        readErrorInfo(d.value, details);
      } else if (d.type === "google.rpc.RetryInfo") {
        details.retryAfterMs = readRetryDelay(d.value);
      }
    } catch {
      // A detail that cannot be read says nothing; the code is still known.
    }
  }
  return new KvcastError(e.rawMessage || "no message", details, { cause: reason });
}

function codeOf(e: ConnectError): GrpcCode {
  const isStatus = e.metadata.has("grpc-status") || e.metadata.has("grpc-status-details-bin");
  const isHttp = e.rawMessage.startsWith("HTTP ");
  const isTooLarge = e.code === Code.ResourceExhausted && e.rawMessage.includes("message size");
  return isStatus || isHttp || isTooLarge ? codeNames[e.code] : "UNAVAILABLE";
}

/** Calls a function for each field of an encoded message; the function must read or skip its value. */
function eachField(bytes: Uint8Array, read: (r: BinaryReader, field: number) => boolean): void {
  const r = new BinaryReader(bytes);
  while (r.pos < r.len) {
    const [field, wireType] = r.tag();
    if (!read(r, field)) {
      r.skip(wireType, field);
    }
  }
}

/** Reads google.rpc.ErrorInfo: reason = 1, domain = 2, metadata = 3. */
function readErrorInfo(bytes: Uint8Array, into: KvcastErrorDetails): void {
  let reason = "";
  let from = "";
  const metadata = new Map<string, string>();
  eachField(bytes, (r, field) => {
    switch (field) {
      case 1:
        reason = r.string();
        return true;
      case 2:
        from = r.string();
        return true;
      case 3: {
        let key = "";
        let value = "";
        eachField(r.bytes(), (entry, part) => {
          if (part === 1) {
            key = entry.string();
          } else if (part === 2) {
            value = entry.string();
          }
          return part === 1 || part === 2;
        });
        metadata.set(key, value);
        return true;
      }
      default:
        return false;
    }
  });
  if (from !== domain) {
    return;
  }
  into.reason = reason || undefined;
  into.epoch = metadata.get("epoch") || undefined;
  into.oldest = seqFrom(metadata.get("oldest"));
  into.newest = seqFrom(metadata.get("newest"));
}

function seqFrom(text: string | undefined): bigint | undefined {
  return text !== undefined && /^[0-9]+$/.test(text) ? BigInt(text) : undefined;
}

/** Reads google.rpc.RetryInfo, whose field 1 is a google.protobuf.Duration: seconds = 1, nanos = 2. */
function readRetryDelay(bytes: Uint8Array): number | undefined {
  let ms = 0;
  eachField(bytes, (r, field) => {
    if (field !== 1) {
      return false;
    }
    eachField(r.bytes(), (duration, part) => {
      if (part === 1) {
        ms += Number(duration.int64()) * 1000;
      } else if (part === 2) {
        ms += duration.int32() / 1e6;
      }
      return part === 1 || part === 2;
    });
    return true;
  });
  return ms > 0 ? ms : undefined;
}
