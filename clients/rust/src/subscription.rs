use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{ready, Context, Poll};
use std::time::Duration;

use tokio::time::{sleep, Instant, Sleep};
use tokio_stream::Stream;
use tonic::{Code, Streaming};

use crate::backoff::Backoff;
use crate::client::Client;
use crate::connection::{Service, Turn};
use crate::options::{GapPolicy, Start, SubscribeOptions};
use crate::proto::{self, accepted::Mode, SubscribeRequest, SubscribeResponse};
use crate::update::{Content, Interruption, Liveness, Update};
use crate::validator::{Delivered, Phase, Validator};
use crate::Error;

/// The updates of a subscription, over any number of streams.
///
/// Since the last `SnapshotBegin`, every entry is delivered once and in order. If that is impossible, the caller gets the
/// reason, and a snapshot follows. A stream that ends, sends no message within a timeout, or violates the contract is
/// replaced by another stream, which resumes after the last position, at the next server if there are several.
///
/// The subscription reads when [`next`](Self::next) is awaited, does not read ahead, and has no task of its own. Dropping it
/// cancels the stream.
#[must_use = "a subscription does nothing unless its updates are awaited"]
pub struct Subscription {
    client: Client,
    options: SubscribeOptions,
    validator: Validator,
    state: State,
    turn: Turn,
    /// The next stream must start with a snapshot.
    need_snapshot: bool,
    /// Set by `resnapshot` until the stream has ended.
    rejected: Option<Error>,
    /// The current stream has delivered entries or Progress with a position.
    progressed: bool,
    /// When the current stream was requested.
    began: Instant,
    idle: IdleTimer,
    /// Before all streams, and before streams that follow a violation.
    backoff: Backoff,
    snapshot_backoff: Backoff,
    liveness: Arc<Liveness>,
}

enum State {
    /// Another stream is to be opened.
    Closed,
    Opening(Pin<Box<dyn Future<Output = Result<Open, Error>> + Send>>),
    Open(Box<Open>),
    Waiting(Pin<Box<Sleep>>),
    /// No update follows but the error, if there is one.
    Ended(Option<Error>),
}

/// An open stream, with its connection.
struct Open {
    messages: Streaming<SubscribeResponse>,
    _service: Service,
}

impl Subscription {
    pub(crate) fn new(client: Client, options: SubscribeOptions) -> Self {
        let (min, max) = (options.backoff_min, options.backoff_max());
        Self {
            validator: Validator::new(options.filter.as_ref(), options.gap_policy),
            state: options.check().map_or_else(|error| State::Ended(Some(error)), |()| State::Closed),
            turn: client.0.servers.turn(),
            need_snapshot: false,
            rejected: None,
            progressed: false,
            began: Instant::now(),
            idle: IdleTimer::default(),
            backoff: Backoff::new(min, max, client.0.servers.len()),
            snapshot_backoff: Backoff::new(min, max, 1),
            liveness: Arc::default(),
            client,
            options,
        }
    }

    /// Returns the next update; None after the error that has ended the subscription. That is one that a retry would repeat:
    ///
    ///   - a [`Config`](Error::Config);
    ///   - a [`Status`](Error::Status) with INVALID_ARGUMENT, UNAUTHENTICATED (unless the stream has delivered entries: the
    ///     token of the next may be another), PERMISSION_DENIED, UNIMPLEMENTED, OUT_OF_RANGE (such as a position beyond the
    ///     server's newest entry) or FAILED_PRECONDITION;
    ///   - with [`GapPolicy::Fail`], an error after which [`GapPolicy::Snapshot`] would continue with a snapshot.
    ///
    /// All other errors are reported as an [`Interruption`]. The future may be dropped at any time: no update is lost.
    pub async fn next(&mut self) -> Option<Result<Update, Error>> {
        std::future::poll_fn(|cx| self.poll_update(cx)).await
    }

    /// Ends the current stream and starts another one with a snapshot. The caller uses it when its state is wrong. The next
    /// update is an [`Interruption`] with [`Error::Rejected`]. With [`GapPolicy::Fail`], that ends the subscription instead.
    pub fn resnapshot(&mut self, cause: impl Into<Box<dyn std::error::Error + Send + Sync>>) {
        self.rejected = Some(Error::Rejected(Arc::from(cause.into())));
    }

    fn poll_update(&mut self, cx: &mut Context<'_>) -> Poll<Option<Result<Update, Error>>> {
        if let State::Ended(error) = &mut self.state {
            let error = error.take();
            self.liveness.end();
            return Poll::Ready(error.map(Err));
        }
        if let Some(cause) = self.rejected.take() {
            return Poll::Ready(Some(self.stream_ended(cause)));
        }
        loop {
            match &mut self.state {
                State::Closed => self.open(),
                State::Waiting(sleep) => {
                    ready!(sleep.as_mut().poll(cx));
                    self.state = State::Closed;
                }
                State::Opening(opening) => match opening.as_mut().poll(cx) {
                    Poll::Ready(Ok(open)) => self.state = State::Open(Box::new(open)),
                    Poll::Ready(Err(error)) => return Poll::Ready(Some(self.stream_ended(error))),
                    Poll::Pending => {
                        ready!(self.idle.poll(cx));
                        return Poll::Ready(Some(self.stream_ended(Error::Idle)));
                    }
                },
                State::Open(open) => {
                    let result = match Pin::new(&mut open.messages).poll_next(cx) {
                        Poll::Ready(Some(Ok(message))) => self.received(message),
                        Poll::Ready(Some(Err(status))) => Err(Error::from_status(&status)),
                        Poll::Ready(None) => Err(Error::Ended),
                        Poll::Pending => {
                            ready!(self.idle.poll(cx));
                            Err(Error::Idle)
                        }
                    };
                    return Poll::Ready(Some(result.or_else(|error| self.stream_ended(error))));
                }
                State::Ended(_) => return Poll::Ready(None),
            }
        }
    }

    /// Begins to open a stream.
    fn open(&mut self) {
        let start = self.next_start();
        let message = SubscribeRequest {
            start: Some(start.to_proto()),
            filter: self.options.filter.clone(),
            gap_policy: match self.options.gap_policy {
                GapPolicy::Snapshot => proto::GapPolicy::Unspecified,
                GapPolicy::Fail => proto::GapPolicy::Fail,
            } as i32,
            progress_digests: false,
            client_id: self.client.0.client_id.clone(),
        };
        self.validator.start_stream(start);
        (self.progressed, self.began, self.turn) = (false, Instant::now(), self.client.0.servers.turn());
        self.set_idle_timeout(Duration::ZERO);
        let (client, turn) = (self.client.0.clone(), self.turn);
        self.state = State::Opening(Box::pin(async move {
            let request = client.request(message)?;
            let mut service = client.servers.connect(turn).await?;
            let response = service.subscribe(request).await.map_err(|status| Error::from_status(&status))?;
            Ok(Open { messages: response.into_inner(), _service: service })
        }));
    }

    fn set_idle_timeout(&mut self, progress_interval: Duration) {
        let timeout = self.options.idle_timeout_for(progress_interval);
        self.idle.timeout = timeout;
        self.idle.armed = false;
    }

    fn next_start(&self) -> Start {
        match self.validator.position() {
            _ if self.need_snapshot || self.validator.delivered == Delivered::Part => Start::Snapshot,
            Some(position) => Start::After(position),
            None => self.options.start.clone(),
        }
    }

    /// Checks a message, and returns its update.
    fn received(&mut self, message: SubscribeResponse) -> Result<Update, Error> {
        self.validator.validate(&message)?;
        self.idle.armed = false; // the time in which the caller processes the message does not count
        match &message.accepted {
            Some(a) => self.set_idle_timeout(Duration::from_nanos(a.progress_interval_nano)),
            None => self.progressed |= self.validator.phase == Phase::Following,
        }
        if message.snapshot_begin.is_some() {
            self.need_snapshot = false;
        }
        Ok(self.update(Content::Message(Box::new(message)), self.validator.stored()))
    }

    fn update(&self, content: Content, position: Option<crate::Position>) -> Update {
        Update { content, position, liveness: self.liveness.clone() }
    }

    /// Ends a stream because of an error. It returns the interruption, or the error if that ends the subscription.
    fn stream_ended(&mut self, error: Error) -> Result<Update, Error> {
        self.state = State::Closed; // cancels the stream
        self.client.0.servers.failed(self.turn);
        match self.interruption(error) {
            Ok(interruption) => {
                self.state = State::Waiting(Box::pin(sleep(interruption.wait)));
                let position = if interruption.snapshot { None } else { self.validator.position() };
                Ok(self.update(Content::Interruption(interruption), position))
            }
            Err(error) => {
                self.state = State::Ended(None);
                self.liveness.end();
                Err(error)
            }
        }
    }

    /// Decides how to continue after a stream has ended. If it returns an error, the subscription ends.
    fn interruption(&mut self, error: Error) -> Result<Interruption, Error> {
        if self.progressed {
            self.backoff.failures = 0;
            if self.began.elapsed() > self.options.backoff_max() {
                self.snapshot_backoff.failures = 0;
            }
        }
        let can_snapshot = self.options.gap_policy == GapPolicy::Snapshot;
        let (mut wait, mut requested) = (Duration::ZERO, None);
        match &error {
            Error::Violation { .. } | Error::Rejected(_) if can_snapshot => {
                self.need_snapshot = true;
                // Snapshots are expensive, so only a stream longer than the maximal backoff resets this backoff.
                wait = self.snapshot_backoff.next(None);
            }
            Error::Idle | Error::Ended => {}
            Error::Violation { .. } | Error::Rejected(_) | Error::Config { .. } => return Err(error),
            Error::Status { .. } if error.is_position_lost() && can_snapshot => self.need_snapshot = true,
            // The token of the next stream may be another.
            Error::Status { code: Code::Unauthenticated, .. } if self.progressed => {}
            Error::Status { .. } if error.is_permanent() => return Err(error),
            Error::Status { retry_after, .. } => requested = *retry_after,
        }
        wait = wait.max(self.backoff.next(requested));
        Ok(Interruption { error, snapshot: self.next_start().mode() == Mode::Snapshot, wait, failures: self.backoff.failures })
    }
}

impl Stream for Subscription {
    type Item = Result<Update, Error>;

    fn poll_next(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        self.poll_update(cx)
    }
}

impl Drop for Subscription {
    fn drop(&mut self) {
        self.liveness.end();
    }
}

impl std::fmt::Debug for Subscription {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Subscription").field("position", &self.validator.position()).finish_non_exhaustive()
    }
}

/// Measures how long the caller has awaited a message.
#[derive(Default)]
struct IdleTimer {
    /// None: no limit.
    timeout: Option<Duration>,
    sleep: Option<Pin<Box<Sleep>>>,
    /// The sleep ends a timeout after the caller has begun to wait.
    armed: bool,
}

impl IdleTimer {
    /// Is ready when the timeout has passed.
    fn poll(&mut self, cx: &mut Context<'_>) -> Poll<()> {
        let Some(timeout) = self.timeout else { return Poll::Pending };
        let timer = self.sleep.get_or_insert_with(|| Box::pin(sleep(timeout)));
        if !self.armed {
            self.armed = true;
            let long = Duration::from_secs(86_400 * 365);
            timer.as_mut().reset(Instant::now() + timeout.min(long));
        }
        timer.as_mut().poll(cx)
    }
}
