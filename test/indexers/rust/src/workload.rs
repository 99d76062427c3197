//! The workload, as Workload.WriteFile of package indexers writes it.

pub const FILL: usize = 0;
pub const CHURN: usize = 1;
pub const LONG: usize = 2;
pub const SHORT: usize = 3;
pub const SHARED: usize = 4;
pub const MIX: usize = 5;
pub const WORKERS: usize = 64;

const PHASES: usize = 6;
const WORKER_SHIFT: u32 = 32;
const STORED: u64 = 1 << 40;
const PARENT: u64 = 1 << 41;

pub struct Event<'a> {
    pub worker: usize,
    pub parent: Option<u64>,
    pub blocks: &'a [u64],
    /// The tokens hashes of a store; None: a remove.
    pub tokens: Option<&'a [u64]>,
}

pub struct Prompt<'a> {
    pub tokens: &'a [u64],
}

pub struct Phase {
    events: Vec<u64>,
    prompts: Vec<u64>,
    /// The number of blocks stored and removed.
    pub blocks: usize,
}

impl Phase {
    pub fn events(&self) -> impl Iterator<Item = Event<'_>> {
        let mut w = &self.events[..];
        std::iter::from_fn(move || {
            let head = *w.first()?;
            let (parent, n) = (w[1], head as u32 as usize);
            let (blocks, rest) = w[2..].split_at(n);
            let stored = head & STORED != 0;
            let (tokens, rest) = rest.split_at(if stored { n } else { 0 });
            w = rest;
            Some(Event {
                worker: (head >> WORKER_SHIFT) as u8 as usize,
                parent: (head & PARENT != 0).then_some(parent),
                blocks,
                tokens: stored.then_some(tokens),
            })
        })
    }

    pub fn prompts(&self) -> impl Iterator<Item = Prompt<'_>> {
        let mut w = &self.prompts[..];
        std::iter::from_fn(move || {
            let n = *w.first()? as usize;
            let tokens = &w[1..1 + n];
            w = &w[1 + 2 * n..];
            Some(Prompt { tokens })
        })
    }
}

pub struct Workload {
    pub phases: Vec<Phase>,
    pub checksum: u64,
}

impl Workload {
    pub fn read(file: &str) -> std::io::Result<Self> {
        let bytes = std::fs::read(file)?;
        let mut words = bytes.chunks_exact(8).map(|b| u64::from_le_bytes(b.try_into().expect("8 bytes")));
        let mut next = || words.next().expect("a whole workload");
        let (mut phases, mut checksum) = (Vec::new(), 0xcbf29ce484222325u64);
        for _ in 0..PHASES {
            let (events, blocks, prompts, _) = (next(), next() as usize, next(), next());
            let mut list = |n| {
                let list: Vec<u64> = (0..n).map(|_| next()).collect();
                for word in &list {
                    checksum = (checksum ^ word).wrapping_mul(0x100000001b3);
                }
                list
            };
            phases.push(Phase { events: list(events), prompts: list(prompts), blocks });
        }
        Ok(Self { phases, checksum })
    }
}
