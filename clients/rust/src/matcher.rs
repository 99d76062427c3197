use std::collections::VecDeque;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use tokio::sync::{mpsc, oneshot, OwnedSemaphorePermit, Semaphore};
use tokio::task::AbortHandle;
use tokio_stream::wrappers::ReceiverStream;
use tonic::Code;

use crate::client::Client;
use crate::proto::{MatchPrefixResponse, MatchPrefixesRequest, MatchPrefixesResponse};
use crate::{Error, MatchRequest, MatchResult, Routed};

/// Bounds the requests that have no answer yet. Further requests wait.
const MAX_IN_FLIGHT: usize = 1024;

/// Sends [`MatchRequest`]s over one stream, which costs less than a call for each. Requests of several tasks are in flight at
/// the same time, at most 1,024; further ones wait. It opens the stream with the first request, and another one after an
/// error.
///
/// The server answers in the order of the requests. A request that waits for a position therefore delays those after it.
///
/// Clones share the stream. When the last one is dropped, the stream and its task end.
#[derive(Clone, Debug)]
pub struct Matcher(Arc<Shared>);

#[derive(Debug)]
struct Shared {
    client: Client,
    in_flight: Arc<Semaphore>,
    current: Mutex<Current>,
}

#[derive(Debug, Default)]
struct Current {
    next_id: u64,
    stream: Option<Handle>,
}

/// A stream, as those who send know it.
#[derive(Debug)]
struct Handle {
    requests: mpsc::Sender<MatchPrefixesRequest>,
    calls: Calls,
    task: AbortHandle,
}

impl Drop for Handle {
    fn drop(&mut self) {
        self.task.abort();
    }
}

/// The requests of a stream that have no answer yet, in their order; None after its end. The task of a stream and those who
/// send share them.
type Calls = Arc<Mutex<Option<VecDeque<Call>>>>;

/// A request in flight. If nobody waits for it any more, its answer is dropped.
struct Call {
    id: u64,
    answer: oneshot::Sender<Result<Option<MatchPrefixResponse>, Failure>>,
    _permit: OwnedSemaphorePermit,
}

impl std::fmt::Debug for Call {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Call({})", self.id)
    }
}

/// Why a request has no answer.
enum Failure {
    /// The request can be sent again: another request, or the connection, caused the error.
    Lost(Error),
    /// The server refused the request.
    Refused(Error),
}

impl Matcher {
    pub(crate) fn new(client: Client) -> Self {
        Self(Arc::new(Shared { client, in_flight: Arc::new(Semaphore::new(MAX_IN_FLIGHT)), current: Mutex::default() }))
    }

    /// Sends a request and waits for the answer, as [`Client::match_prefix`] does. A request whose stream broke before the
    /// answer is sent over another stream, at most once more for each server. There is no deadline: the caller may drop the
    /// future, as `tokio::time::timeout` does, and the answer is dropped when it comes.
    pub async fn match_prefix(&self, request: MatchRequest) -> Result<MatchResult, Error> {
        let request = request.into_proto()?;
        let model = request.model.clone();
        let message = MatchPrefixesRequest { request: Some(request), ..Default::default() };
        let response = self.answer(message).await?;
        Ok(MatchResult::from_proto(&model, response.unwrap_or_default()))
    }

    /// Does what [`Client::note_routed`] does over the stream, with at most 64 prompts. It does not return how many were ignored.
    /// A match that begins after it has returned is sure to see them, if it has the same server.
    pub async fn note_routed(&self, routed: Vec<Routed>) -> Result<(), Error> {
        if routed.is_empty() {
            return Ok(());
        }
        let routed = routed.iter().map(Routed::to_proto).collect();
        self.answer(MatchPrefixesRequest { routed, ..Default::default() }).await.map(|_| ())
    }

    async fn answer(&self, mut message: MatchPrefixesRequest) -> Result<Option<MatchPrefixResponse>, Error> {
        let retries = self.0.client.0.servers.len();
        for attempt in 0.. {
            let last = attempt == retries;
            let (kept, sent) = if last { (None, message) } else { (Some(message.clone()), message) };
            let permit = self.0.in_flight.clone().acquire_owned().await.expect("the semaphore is never closed");
            let (answer, result) = oneshot::channel();
            self.0.send(sent, answer, permit);
            // A task that is aborted, because its runtime ends, drops its calls.
            let gone = |_| Err(Failure::Lost(Error::local(Code::Unavailable, "the stream has ended")));
            match (result.await.unwrap_or_else(gone), kept) {
                (Ok(response), _) => return Ok(response),
                (Err(Failure::Lost(_)), Some(again)) => message = again,
                (Err(Failure::Lost(error) | Failure::Refused(error)), _) => return Err(error),
            }
        }
        unreachable!("the last attempt returns")
    }
}

impl Shared {
    /// Sends a request over the open stream, or another one.
    fn send(
        self: &Arc<Self>,
        mut message: MatchPrefixesRequest,
        answer: oneshot::Sender<Result<Option<MatchPrefixResponse>, Failure>>,
        permit: OwnedSemaphorePermit,
    ) {
        let mut current = lock(&self.current);
        current.next_id += 1;
        message.id = current.next_id;
        let call = Call { id: message.id, answer, _permit: permit };
        if !current.stream.as_ref().is_some_and(|stream| lock(&stream.calls).is_some() && !stream.task.is_finished()) {
            current.stream = Some(self.open());
        }
        let stream = current.stream.as_ref().expect("it was opened");
        match &mut *lock(&stream.calls) {
            Some(calls) => calls.push_back(call),
            None => {
                // The stream has ended meanwhile.
                let error = Error::local(Code::Unavailable, "the stream has ended");
                _ = call.answer.send(Err(Failure::Lost(error)));
                return;
            }
        }
        // It has room for all requests in flight. An error means that the stream has ended, which ends the call.
        _ = stream.requests.try_send(message);
    }

    /// Opens a stream with its task.
    fn open(&self) -> Handle {
        let (requests, messages) = mpsc::channel(MAX_IN_FLIGHT);
        let calls = Calls::new(Mutex::new(Some(VecDeque::new())));
        let (client, of_task) = (self.client.clone(), calls.clone());
        let task = tokio::spawn(async move {
            let turn = client.0.servers.turn();
            let error = match receive(&client, turn, messages, &of_task).await {
                Ok(never) => match never {},
                Err(error) => error,
            };
            client.0.servers.failed(turn);
            fail(&of_task, &error);
        });
        Handle { requests, calls, task: task.abort_handle() }
    }
}

/// Passes answers to their calls until the stream ends, and returns the reason.
async fn receive(
    client: &Client,
    turn: crate::connection::Turn,
    messages: mpsc::Receiver<MatchPrefixesRequest>,
    calls: &Calls,
) -> Result<std::convert::Infallible, Error> {
    let request = client.0.request(ReceiverStream::new(messages))?;
    let mut service = client.0.servers.connect(turn).await?;
    let response = service.match_prefixes(request).await.map_err(|status| Error::from_status(&status))?;
    let mut answers = response.into_inner();
    loop {
        match answers.message().await {
            Ok(Some(answer)) => pass(calls, answer)?,
            Ok(None) => return Err(Error::Ended),
            Err(status) => return Err(Error::from_status(&status)),
        }
    }
}

/// Passes an answer to its call, which is the first one.
fn pass(calls: &Calls, answer: MatchPrefixesResponse) -> Result<(), Error> {
    let wrong = || Error::Violation { at: None, what: "answers are not in the order of requests".into() };
    let mut guard = lock(calls);
    let waiting = guard.as_mut().ok_or_else(wrong)?;
    if waiting.front().ok_or_else(wrong)?.id != answer.id {
        return Err(wrong());
    }
    let call = waiting.pop_front().expect("there is a first one");
    drop(guard);
    _ = call.answer.send(Ok(answer.response)); // an error means that nobody waits any more
    Ok(())
}

/// Ends all calls with the error that ended the stream. The server ends a stream at the first request that it cannot answer,
/// so later requests can be sent again; if the connection has caused the error, all can.
fn fail(calls: &Calls, error: &Error) {
    let of_connection = matches!(error, Error::Ended) || error.code() == Some(Code::Unavailable);
    let waiting = lock(calls).take().unwrap_or_default();
    for (i, call) in waiting.into_iter().enumerate() {
        let failure = if i == 0 && !of_connection { Failure::Refused } else { Failure::Lost };
        _ = call.answer.send(Err(failure(error.clone())));
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
