//! Dynamo's default index, ConcurrentRadixTreeCompressed, which applies events on a thread of its own.

use std::os::unix::thread::JoinHandleExt;
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::Duration;

use dynamo_kv_router::indexer::{SyncIndexer, WorkerTask};
use dynamo_kv_router::protocols::{LocalBlockHash, RouterEvent};
use dynamo_kv_router::ConcurrentRadixTreeCompressed;
use tokio::sync::oneshot;

use crate::indexes::{local_hashes, router_events, summed};
use crate::workload::{Phase, Prompt};
use crate::{cpu, Index};

/// The number of events that wait for the thread at a time. The memory of the queue is as large as it ever was.
const QUEUE: usize = 8192;

pub struct Crtc {
    tree: Arc<ConcurrentRadixTreeCompressed>,
    tasks: flume::Sender<WorkerTask>,
    thread: Option<JoinHandle<()>>,
}

impl Crtc {
    pub fn new() -> Self {
        let tree = Arc::new(ConcurrentRadixTreeCompressed::new());
        let (tasks, received) = flume::unbounded();
        let own = tree.clone();
        let thread = Some(std::thread::spawn(move || own.worker(received, None).expect("a worker thread")));
        Self { tree, tasks, thread }
    }

    /// Waits until the thread has done all tasks, and returns its CPU time.
    fn flush(&self) -> Duration {
        let (done, flushed) = oneshot::channel();
        self.tasks.send(WorkerTask::Flush(done)).expect("a running thread");
        flushed.blocking_recv().expect("a running thread");
        let (mut clock, thread) = (0, self.thread.as_ref().expect("a thread").as_pthread_t());
        // SAFETY: the thread is not joined yet, and clock is valid.
        let failed = unsafe { libc::pthread_getcpuclockid(thread, &mut clock) };
        assert_eq!(failed, 0, "look up the CPU clock of a thread");
        cpu(clock)
    }
}

impl Drop for Crtc {
    fn drop(&mut self) {
        let _ = self.tasks.send(WorkerTask::Terminate);
        let _ = self.thread.take().expect("a thread").join();
    }
}

impl Index for Crtc {
    type Events = Vec<RouterEvent>;
    type Prompt = Vec<LocalBlockHash>;

    fn convert(phase: &Phase) -> Self::Events {
        router_events(phase)
    }

    fn prompt(prompt: &Prompt) -> Self::Prompt {
        local_hashes(prompt)
    }

    fn apply(&mut self, events: Self::Events) -> Duration {
        let began = self.flush();
        for (i, e) in events.into_iter().enumerate() {
            if i % QUEUE == 0 {
                self.flush();
            }
            self.tasks.send(WorkerTask::Event(e)).expect("a running thread");
        }
        self.flush() - began
    }

    fn matches(&self, prompt: Self::Prompt) -> (usize, usize) {
        summed(&self.tree.find_matches(&prompt, false))
    }

    fn copy(prompt: &Self::Prompt) -> Self::Prompt {
        prompt.clone()
    }
}
