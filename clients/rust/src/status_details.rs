//! The parts of google.rpc that errors of kvcast have, in `grpc-status-details-bin`.

use std::collections::HashMap;
use std::time::Duration;

use prost::Message;

const ERROR_INFO: &str = "google.rpc.ErrorInfo";
const RETRY_INFO: &str = "google.rpc.RetryInfo";

/// google.rpc.Status.
#[derive(Clone, PartialEq, Message)]
pub(crate) struct RpcStatus {
    #[prost(int32, tag = "1")]
    pub code: i32,
    #[prost(string, tag = "2")]
    pub message: String,
    #[prost(message, repeated, tag = "3")]
    pub details: Vec<Any>,
}

/// google.protobuf.Any.
#[derive(Clone, PartialEq, Message)]
pub(crate) struct Any {
    #[prost(string, tag = "1")]
    pub type_url: String,
    #[prost(bytes = "vec", tag = "2")]
    pub value: Vec<u8>,
}

/// google.rpc.ErrorInfo.
#[derive(Clone, PartialEq, Message)]
pub(crate) struct ErrorInfo {
    #[prost(string, tag = "1")]
    pub reason: String,
    #[prost(string, tag = "2")]
    pub domain: String,
    #[prost(map = "string, string", tag = "3")]
    pub metadata: HashMap<String, String>,
}

/// google.rpc.RetryInfo.
#[derive(Clone, PartialEq, Message)]
pub(crate) struct RetryInfo {
    #[prost(message, optional, tag = "1")]
    pub retry_delay: Option<ProtoDuration>,
}

/// google.protobuf.Duration.
#[derive(Clone, Copy, PartialEq, Message)]
pub(crate) struct ProtoDuration {
    #[prost(int64, tag = "1")]
    pub seconds: i64,
    #[prost(int32, tag = "2")]
    pub nanos: i32,
}

impl ProtoDuration {
    /// Returns the duration; None if it is not positive.
    fn positive(self) -> Option<Duration> {
        let seconds = u64::try_from(self.seconds).ok()?;
        let nanos = u32::try_from(self.nanos).ok()?;
        Some(Duration::new(seconds, nanos.min(999_999_999))).filter(|d| !d.is_zero())
    }
}

/// Returns the ErrorInfo of a domain and the delay of a RetryInfo. Details that cannot be decoded are left out.
pub(crate) fn decode(details: &[u8], domain: &str) -> (Option<ErrorInfo>, Option<Duration>) {
    let (mut info, mut delay) = (None, None);
    for any in RpcStatus::decode(details).unwrap_or_default().details {
        match any.type_url.rsplit('/').next() {
            Some(ERROR_INFO) => info = info.or(ErrorInfo::decode(&*any.value).ok().filter(|i| i.domain == domain)),
            Some(RETRY_INFO) => {
                delay = RetryInfo::decode(&*any.value).ok().and_then(|r| r.retry_delay).and_then(ProtoDuration::positive);
            }
            _ => {}
        }
    }
    (info, delay)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn any(name: &str, message: &impl Message) -> Any {
        Any { type_url: format!("type.googleapis.com/{name}"), value: message.encode_to_vec() }
    }

    #[test]
    fn details() {
        let other = ErrorInfo { reason: "X".into(), domain: "other".into(), ..Default::default() };
        let ours = ErrorInfo { reason: "STARTING".into(), domain: "kvcast".into(), ..Default::default() };
        let retry = RetryInfo { retry_delay: Some(ProtoDuration { seconds: 1, nanos: 500_000_000 }) };
        let status = RpcStatus {
            details: vec![any(ERROR_INFO, &other), any(ERROR_INFO, &ours), any(RETRY_INFO, &retry)],
            ..Default::default()
        };
        let (info, delay) = decode(&status.encode_to_vec(), "kvcast");
        assert_eq!(info, Some(ours));
        assert_eq!(delay, Some(Duration::from_millis(1500)));
        assert_eq!(decode(b"\xff\xff", "kvcast"), (None, None));
        assert_eq!(ProtoDuration { seconds: -1, nanos: 0 }.positive(), None);
    }
}
