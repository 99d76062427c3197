use std::collections::hash_map::RandomState;
use std::hash::{BuildHasher, Hasher};
use std::time::Duration;

/// Bounds the delay that a server may request.
const MAX_RETRY_DELAY: Duration = Duration::from_secs(300);

/// An exponential backoff with jitter.
#[derive(Debug)]
pub(crate) struct Backoff {
    min: Duration,
    max: Duration,
    /// The number of servers, which are tried in turn.
    servers: u32,
    /// The number of failures in a row.
    pub failures: u32,
}

impl Backoff {
    pub fn new(min: Duration, max: Duration, servers: usize) -> Self {
        Self { min, max, servers: u32::try_from(servers).unwrap_or(u32::MAX).max(1), failures: 0 }
    }

    /// Counts a failure and returns the wait after it: a short one before the next server, until all have failed. If the
    /// last server requests a longer delay, the wait is the requested delay plus up to a quarter at random, since the
    /// server requests the same delay from many clients.
    pub fn next(&mut self, requested: Option<Duration>) -> Duration {
        let rounds = self.failures / self.servers;
        self.failures = self.failures.saturating_add(1);
        if !self.failures.is_multiple_of(self.servers) {
            return jitter(self.min / 10);
        }
        let mut wait = self.min.saturating_mul(2u32.saturating_pow(rounds)).min(self.max);
        wait -= jitter(wait / 2);
        match requested.map(|delay| delay.min(MAX_RETRY_DELAY)) {
            Some(delay) => wait.max(delay + jitter(delay / 4)),
            None => wait,
        }
    }
}

/// Returns a random duration up to a limit.
fn jitter(limit: Duration) -> Duration {
    let random = RandomState::new().build_hasher().finish(); // each RandomState has other keys
    limit.mul_f64(random as f64 / u64::MAX as f64).min(limit)
}

#[cfg(test)]
mod tests {
    use super::*;

    const MS: Duration = Duration::from_millis(1);

    #[test]
    fn the_wait_doubles_to_its_maximum() {
        let mut b = Backoff::new(MS, 30 * MS, 1);
        for want in [1, 2, 4, 8, 16, 30, 30] {
            let wait = b.next(None);
            assert!(wait <= want * MS && wait >= want * MS / 2, "{wait:?}, want {want} ms");
        }
        b.failures = u32::MAX;
        assert!(b.next(None) <= 30 * MS);
    }

    #[test]
    fn the_next_server_is_tried_soon() {
        let mut b = Backoff::new(100 * MS, 1000 * MS, 3);
        for _ in 0..2 {
            assert!(b.next(Some(Duration::from_secs(9))) <= 10 * MS);
        }
        assert!(b.next(None) >= 50 * MS);
    }

    #[test]
    fn a_requested_delay_takes_precedence() {
        let mut b = Backoff::new(MS, 2 * MS, 1);
        let wait = b.next(Some(100 * MS));
        assert!(wait >= 100 * MS && wait <= 125 * MS, "{wait:?}");
        assert!(b.next(Some(Duration::from_secs(1 << 40))) <= Duration::from_secs(375));
    }
}
