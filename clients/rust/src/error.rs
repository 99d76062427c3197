use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use tonic::{Code, Status};

use crate::status_details;
use crate::Position;

/// The domain of the server's ErrorInfo.
const DOMAIN: &str = "kvcast";

/// Why a call, a stream or a subscription ended.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub enum Error {
    /// The status of a call or a stream. Of a connection that cannot be made or is lost, the code is UNAVAILABLE and there
    /// is no reason.
    Status {
        /// The gRPC code.
        code: Code,
        /// The contract's reason; None if the error does not come from a kvcast server.
        reason: Option<Reason>,
        /// Describes the problem and what to do.
        message: String,
        /// The epoch of the server's journal; empty if the error does not include it.
        epoch: String,
        /// The seq of the oldest retained entry; 0 if the error does not include it.
        oldest: u64,
        /// The seq of the newest entry; 0 if the error does not include it.
        newest: u64,
        /// The delay that the server requests before a retry.
        retry_after: Option<Duration>,
    },
    /// The server violates the contract: a message is missing, repeated or out of order. The violating message is not
    /// delivered.
    Violation {
        /// The last valid position; None if there is none.
        at: Option<Position>,
        /// Describes the violation.
        what: String,
    },
    /// No message was received within the idle timeout.
    Idle,
    /// The server ended the stream without an error.
    Ended,
    /// The caller has rejected its state, see [`Subscription::resnapshot`](crate::Subscription::resnapshot).
    Rejected(Arc<dyn std::error::Error + Send + Sync>),
    /// An option or an argument is not allowed.
    Config {
        /// The name of the option or the argument.
        field: String,
        /// Describes the value and the allowed values.
        problem: String,
    },
}

impl Error {
    pub(crate) fn config(field: impl Into<String>, problem: impl Into<String>) -> Self {
        Self::Config { field: field.into(), problem: problem.into() }
    }

    /// Returns an error of the code, without a reason.
    pub(crate) fn local(code: Code, message: impl Into<String>) -> Self {
        Self::Status {
            code,
            reason: None,
            message: message.into(),
            epoch: String::new(),
            oldest: 0,
            newest: 0,
            retry_after: None,
        }
    }

    /// Returns the error of a connection that is lost or cannot be made.
    pub(crate) fn transport(error: &dyn std::error::Error) -> Self {
        let mut message = error.to_string();
        let mut source = error.source();
        while let Some(cause) = source {
            message.push_str(": ");
            message.push_str(&cause.to_string());
            source = cause.source();
        }
        Self::local(Code::Unavailable, message)
    }

    pub(crate) fn from_status(status: &Status) -> Self {
        // A status from the server has no source. tonic makes up a status with one, and various codes, for errors of
        // the connection; and this one without a source, if the connection has ended before the request.
        if let Some(source) = std::error::Error::source(status) {
            return Self::transport(source);
        }
        if status.code() == Code::Unknown && status.message().starts_with("Service was not ready") {
            return Self::local(Code::Unavailable, status.message());
        }
        let (info, retry_after) = status_details::decode(status.details(), DOMAIN);
        let info = info.unwrap_or_default();
        let number = |key| info.metadata.get(key).and_then(|text: &String| text.parse().ok()).unwrap_or(0);
        Self::Status {
            code: status.code(),
            reason: Reason::of(&info.reason),
            message: status.message().to_owned(),
            epoch: info.metadata.get("epoch").cloned().unwrap_or_default(),
            oldest: number("oldest"),
            newest: number("newest"),
            retry_after,
        }
    }

    /// Returns the gRPC code of a [`Status`](Error::Status).
    pub fn code(&self) -> Option<Code> {
        match self {
            Self::Status { code, .. } => Some(*code),
            _ => None,
        }
    }

    /// Returns the contract's reason of a [`Status`](Error::Status).
    pub fn reason(&self) -> Option<&Reason> {
        match self {
            Self::Status { reason, .. } => reason.as_ref(),
            _ => None,
        }
    }

    /// Reports whether a retry would fail with the same code.
    pub(crate) fn is_permanent(&self) -> bool {
        matches!(
            self.code(),
            Some(
                Code::InvalidArgument
                    | Code::Unauthenticated
                    | Code::PermissionDenied
                    | Code::Unimplemented
                    | Code::OutOfRange
                    | Code::FailedPrecondition
            )
        )
    }

    /// Reports whether the entries after the position are not available, so that only a snapshot helps.
    pub(crate) fn is_position_lost(&self) -> bool {
        matches!(self.reason(), Some(Reason::PositionCompacted | Reason::EpochMismatch))
    }
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Status { code, reason: Some(reason), message, .. } => write!(f, "{code:?}: {reason}: {message}"),
            Self::Status { code, message, .. } => write!(f, "{code:?}: {message}"),
            Self::Violation { at: Some(at), what } => write!(f, "the stream violates the contract after {at}: {what}"),
            Self::Violation { at: None, what } => write!(f, "the stream violates the contract: {what}"),
            Self::Idle => f.write_str("no message was received within the idle timeout"),
            Self::Ended => f.write_str("the server ended the stream"),
            Self::Rejected(cause) => write!(f, "the caller rejects its state: {cause}"),
            Self::Config { field, problem } => write!(f, "{field} {problem}"),
        }
    }
}

impl std::error::Error for Error {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        match self {
            Self::Rejected(cause) => Some(&**cause),
            _ => None,
        }
    }
}

macro_rules! reasons {
    ($($(#[$doc:meta])* $name:ident = $text:literal,)*) => {
        /// The reason of an error of kvcast, as the contract lists them.
        #[derive(Clone, Debug, PartialEq, Eq, Hash)]
        #[non_exhaustive]
        pub enum Reason {
            $($(#[$doc])* $name,)*
            /// A reason that this version does not know.
            Other(String),
        }

        impl Reason {
            /// Returns the reason with a name; None if the name is empty.
            fn of(name: &str) -> Option<Self> {
                match name {
                    "" => None,
                    $($text => Some(Self::$name),)*
                    other => Some(Self::Other(other.to_owned())),
                }
            }

            /// Returns the name in the contract.
            pub fn as_str(&self) -> &str {
                match self {
                    $(Self::$name => $text,)*
                    Self::Other(name) => name,
                }
            }
        }
    };
}

reasons! {
    /// The position is not retained any more: start from a snapshot.
    PositionCompacted = "POSITION_COMPACTED",
    /// The position is beyond the newest entry, so another server has sent it.
    PositionAhead = "POSITION_AHEAD",
    /// The server has not read the position's entry yet, which another server has written.
    Behind = "BEHIND",
    /// The server cannot tell whether it has the newest entries.
    Outdated = "OUTDATED",
    /// The journal was lost: start from a snapshot.
    EpochMismatch = "EPOCH_MISMATCH",
    /// The subscriber reads too slowly.
    SlowSubscriber = "SLOW_SUBSCRIBER",
    /// There are too many Subscribe or Replay streams.
    TooManySubscribers = "TOO_MANY_SUBSCRIBERS",
    /// There are too many snapshots at a time.
    TooManySnapshots = "TOO_MANY_SNAPSHOTS",
    /// The blocks have too many holders: look up fewer at a time.
    TooManyHolders = "TOO_MANY_HOLDERS",
    /// The server has not applied the entries up to the requested position in time.
    PositionNotReached = "POSITION_NOT_REACHED",
    /// There are too many lookups, matches and status calls at a time.
    TooManyQueries = "TOO_MANY_QUERIES",
    /// The response is too large: narrow the filter, or match fewer prompts or with a limit.
    ResponseTooLarge = "RESPONSE_TOO_LARGE",
    /// There are too many MatchPrefixes streams.
    TooManyStreams = "TOO_MANY_STREAMS",
    /// The filters of all subscribers are too large.
    FiltersTooLarge = "FILTERS_TOO_LARGE",
    /// The server is starting.
    Starting = "STARTING",
    /// The server only reads engines: call another one.
    NotServing = "NOT_SERVING",
    /// The server is shutting down.
    ShuttingDown = "SHUTTING_DOWN",
    /// The connection has reached its maximum age.
    MaxConnectionAge = "MAX_CONNECTION_AGE",
    /// The request is not allowed.
    InvalidArgument = "INVALID_ARGUMENT",
    /// The server does not support the call.
    Unimplemented = "UNIMPLEMENTED",
    /// A bug of the server.
    Internal = "INTERNAL",
    /// The server does not accept the token.
    Unauthenticated = "UNAUTHENTICATED",
    /// The token lacks a role.
    PermissionDenied = "PERMISSION_DENIED",
}

impl fmt::Display for Reason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reasons_have_the_names_of_the_contract() {
        assert_eq!(Reason::of("SLOW_SUBSCRIBER"), Some(Reason::SlowSubscriber));
        assert_eq!(Reason::of("NEW_REASON"), Some(Reason::Other("NEW_REASON".into())));
        assert_eq!(Reason::of("NEW_REASON").unwrap().to_string(), "NEW_REASON");
        assert_eq!(Reason::of(""), None);
    }

    #[test]
    fn errors_of_the_connection_are_unavailable() {
        let mut status = Status::unknown("h2 protocol error");
        status.set_source(Arc::new(std::io::Error::from(std::io::ErrorKind::ConnectionReset)));
        let error = Error::from_status(&status);
        assert_eq!((error.code(), error.reason()), (Some(Code::Unavailable), None));
    }
}
