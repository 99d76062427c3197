//! Measures indexes of SMG and Dynamo on the workload of package indexers: indexers FILE chain|crtc|radix.
//!
//! The figures are those of indexers.Figures, printed as JSON. CPU times are of the thread that applies events or
//! matches. Events are converted to the form of an index before the time starts.

mod crtc;
mod indexes;
mod workload;

use std::alloc::{GlobalAlloc, Layout, System};
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};
use std::time::{Duration, Instant};

use workload::{Phase, Prompt, Workload, CHURN, FILL, LONG, MIX, SHARED, SHORT};

/// Counts the bytes that are allocated.
struct Counting;

static IN_USE: AtomicUsize = AtomicUsize::new(0);

// SAFETY: all calls are passed on to System.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        IN_USE.fetch_add(layout.size(), Relaxed);
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, p: *mut u8, layout: Layout) {
        IN_USE.fetch_sub(layout.size(), Relaxed);
        unsafe { System.dealloc(p, layout) }
    }

    unsafe fn realloc(&self, p: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        IN_USE.fetch_add(size, Relaxed);
        IN_USE.fetch_sub(layout.size(), Relaxed);
        unsafe { System.realloc(p, layout, size) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

/// An index that is measured.
pub trait Index {
    /// The events of a phase in the index's own form.
    type Events;
    /// A prompt in the index's own form.
    type Prompt;

    fn convert(phase: &Phase) -> Self::Events;
    fn prompt(prompt: &Prompt) -> Self::Prompt;
    /// Applies events, and returns the CPU time of the thread that did.
    fn apply(&mut self, events: Self::Events) -> Duration;
    /// Looks up a prompt. Returns the number of workers and the sum of the lengths of their prefixes in blocks.
    fn matches(&self, prompt: Self::Prompt) -> (usize, usize);
    /// Prepares the prompt of a match. The time is not measured.
    fn copy(prompt: &Self::Prompt) -> Self::Prompt;
}

const ROUNDS: usize = 3;
const SAMPLE_MATCHES: usize = 8;
const SAMPLES: usize = 4_000;
const LONGEST: Duration = Duration::from_secs(1);
const MIX_ANSWERS: usize = 256;

/// The CPU time of a clock.
pub fn cpu(clock: libc::clockid_t) -> Duration {
    let mut t = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: t is valid.
    let failed = unsafe { libc::clock_gettime(clock, &mut t) };
    assert_eq!(failed, 0, "read the CPU time of a thread");
    Duration::new(t.tv_sec as u64, t.tv_nsec as u32)
}

/// The CPU time of this thread.
pub fn own_cpu() -> Duration {
    cpu(libc::CLOCK_THREAD_CPUTIME_ID)
}

fn median(mut v: Vec<f64>) -> f64 {
    v.sort_by(f64::total_cmp);
    v[v.len() / 2]
}

/// Applies a phase, and returns the CPU time in nanoseconds per block.
fn apply<X: Index>(x: &mut X, p: &Phase) -> f64 {
    let events = X::convert(p);
    x.apply(events).as_nanos() as f64 / p.blocks as f64
}

fn answers<X: Index>(x: &X, p: &Phase, prompts: usize) -> [usize; 2] {
    let mut sum = [0, 0];
    for prompt in p.prompts().take(prompts) {
        let (workers, blocks) = x.matches(X::prompt(&prompt));
        sum[0] += workers;
        sum[1] += blocks;
    }
    sum
}

/// The median time in microseconds of a match of the phase's only prompt.
fn match_one<X: Index>(mut x: X, p: &Phase) -> (f64, [usize; 2]) {
    apply(&mut x, p);
    let prompt = X::prompt(&p.prompts().next().expect("a prompt"));
    let (mut times, began) = (Vec::new(), Instant::now());
    while times.is_empty() || times.len() < SAMPLES && began.elapsed() < LONGEST {
        let copies: Vec<_> = (0..SAMPLE_MATCHES).map(|_| X::copy(&prompt)).collect();
        let start = Instant::now();
        for copy in copies {
            std::hint::black_box(x.matches(copy));
        }
        times.push(start.elapsed().as_nanos() as f64 / SAMPLE_MATCHES as f64 / 1e3);
    }
    (median(times), answers(&x, p, 1))
}

/// A well-distributed hash of a number.
fn mixed(n: u64) -> u64 {
    let n = (n ^ n >> 30).wrapping_mul(0xbf58476d1ce4e5b9);
    let n = (n ^ n >> 27).wrapping_mul(0x94d049bb133111eb);
    n ^ n >> 31
}

/// Matches the prompts in a mixed order, and returns the number of matches per second of CPU time.
fn match_all<X: Index>(x: &X, p: &Phase) -> f64 {
    const CHECK: u64 = 4096;
    let prompts: Vec<_> = p.prompts().map(|prompt| X::prompt(&prompt)).collect();
    let (mut used, mut n) = (Duration::ZERO, 0);
    while used < LONGEST {
        let copies: Vec<_> = (n..n + CHECK).map(|i| X::copy(&prompts[(mixed(i) % prompts.len() as u64) as usize])).collect();
        let began = own_cpu();
        for copy in copies {
            std::hint::black_box(x.matches(copy));
        }
        used += own_cpu() - began;
        n += CHECK;
    }
    n as f64 / used.as_secs_f64()
}

/// Measures an index and prints the figures.
fn measure<X: Index>(w: &Workload, open: impl Fn() -> X) {
    let (mut fill, mut churn, mut shared) = (Vec::new(), Vec::new(), Vec::new());
    let (mut fill_bytes, mut churn_bytes, mut after_churn) = (0.0, 0.0, [0, 0]);
    let blocks = w.phases[FILL].blocks as f64;
    for round in 0..ROUNDS {
        let before = IN_USE.load(Relaxed);
        let mut x = open();
        fill.push(apply(&mut x, &w.phases[FILL]));
        if round == 0 {
            fill_bytes = (IN_USE.load(Relaxed) - before) as f64 / blocks;
        }
        churn.push(apply(&mut x, &w.phases[CHURN]));
        if round == 0 {
            churn_bytes = (IN_USE.load(Relaxed) - before) as f64 / blocks;
            after_churn = answers(&x, &w.phases[CHURN], usize::MAX);
        }
    }
    let (long_us, long) = match_one(open(), &w.phases[LONG]);
    let (short_us, short) = match_one(open(), &w.phases[SHORT]);
    let (mut mix_rate, mut mix) = (0.0, [0, 0]);
    for round in 0..ROUNDS {
        let mut x = open();
        shared.push(apply(&mut x, &w.phases[SHARED]));
        if round == ROUNDS - 1 {
            apply(&mut x, &w.phases[MIX]);
            mix = answers(&x, &w.phases[MIX], MIX_ANSWERS);
            mix_rate = match_all(&x, &w.phases[MIX]);
        }
    }
    println!(
        "{{\"checksum\":\"{}\",\"fill_ns\":{},\"churn_ns\":{},\"shared_ns\":{},\"fill_bytes\":{fill_bytes},\
         \"churn_bytes\":{churn_bytes},\"long_us\":{long_us},\"short_us\":{short_us},\"mix_rate\":{mix_rate},\
         \"answers\":{{\"churn\":{after_churn:?},\"long\":{long:?},\"short\":{short:?},\"mix\":{mix:?}}}}}",
        w.checksum,
        median(fill),
        median(churn),
        median(shared)
    );
}

fn main() {
    let args: Vec<String> = std::env::args().collect();
    let [_, file, index] = &args[..] else {
        eprintln!("usage: indexers FILE chain|crtc|radix");
        std::process::exit(2);
    };
    let w = Workload::read(file).expect("read the workload");
    match index.as_str() {
        "chain" => measure(&w, indexes::Chain::new),
        "crtc" => measure(&w, crtc::Crtc::new),
        "radix" => measure(&w, indexes::Radix::new),
        _ => panic!("index {index:?} unknown"),
    }
}
