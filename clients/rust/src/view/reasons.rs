use crate::matches::NUM_TIERS;
use crate::proto::{gap, DegradedReason, Tier, Trust};

/// A set of reasons for which the blocks of a rank may differ from the engine's: bit n is reason n.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Reasons(u32);

impl Reasons {
    pub fn of(reason: DegradedReason) -> Self {
        Self(1 << reason as u32)
    }

    /// Returns the set of reasons of the contract. One that this version does not know is GAP, and so is the one that is never
    /// sent.
    pub fn known(all: &[i32]) -> Self {
        let known = |&r: &i32| DegradedReason::try_from(r).ok().filter(|&r| r != DegradedReason::Unspecified);
        all.iter().fold(Self::default(), |set, r| set.with(Self::of(known(r).unwrap_or(DegradedReason::Gap))))
    }

    /// Returns what a Gap causes: usually the reason of the same name. A reason that this version does not know is a GAP.
    pub fn of_gap(reason: i32) -> Self {
        use gap::Reason as Gap;
        use DegradedReason as R;
        Self::of(match Gap::try_from(reason).unwrap_or(Gap::Unspecified) {
            Gap::Unspecified | Gap::ReplayUnavailable | Gap::ReplayIncomplete | Gap::ReplayForgotten => R::Gap,
            Gap::PossibleRestart => R::PossibleRestart,
            Gap::AmbiguousPublisher => R::Conflict,
            Gap::TooManyBlocks | Gap::TooManyAttributes => R::BlocksOmitted,
            Gap::JoinedLate => R::JoinedLate,
            Gap::SharedTier => R::SharedTier,
            Gap::EventsSkipped => R::EventsSkipped,
            Gap::BlockSizeMismatch => R::BlockSizeMismatch,
            Gap::UnknownContent => R::UnknownContent,
            Gap::TierNotCleared => R::TierNotCleared,
            Gap::ReplayUnproved => R::ReplayUnproved,
            Gap::ReplayForeign => R::ReplayForeign,
            Gap::CopiesUnsure => R::CopiesUnsure,
            Gap::ConnectorTier => R::ConnectorTier,
            Gap::Relayed => R::Relayed,
        })
    }

    pub fn with(self, other: Self) -> Self {
        Self(self.0 | other.0)
    }

    pub fn without(self, other: Self) -> Self {
        Self(self.0 & !other.0)
    }

    pub fn is_empty(self) -> bool {
        self.0 == 0
    }

    /// Returns the reasons, ascending.
    pub fn list(self) -> Vec<DegradedReason> {
        (0..32).filter(|bit| self.0 & 1 << bit != 0).filter_map(|bit| DegradedReason::try_from(bit).ok()).collect()
    }

    /// Returns how far blocks can be trusted that may differ for these reasons.
    pub fn trust(self, groups: bool) -> Trust {
        match (self.is_empty(), groups) {
            (false, _) => Trust::Degraded,
            (true, true) => Trust::UpperBound,
            (true, false) => Trust::Exact,
        }
    }
}

/// The tiers that this version knows, by index.
pub(crate) const TIERS: [Tier; NUM_TIERS] = [Tier::Device, Tier::HostPinned, Tier::Disk, Tier::External];

/// Returns the index of a tier; None if this version does not know the tier, or there is none.
pub(crate) fn tier_index(tier: i32) -> Option<usize> {
    TIERS.iter().position(|&t| t as i32 == tier)
}

/// What may differ in each tier of a rank.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Doubts {
    pub tiers: [Reasons; NUM_TIERS],
    /// The tokens in a connector's chunk; 0: there are none of several blocks.
    pub chunks: [u32; NUM_TIERS],
}

impl Doubts {
    /// Returns the reasons of all tiers.
    pub fn all(&self) -> Reasons {
        self.tiers.iter().fold(Reasons::default(), |set, &r| set.with(r))
    }

    /// Adds reasons to the tiers named; to all if none is, or if the tier that is never sent is.
    pub fn add(&mut self, reasons: Reasons, tiers: &[i32]) {
        for (i, of_tier) in self.tiers.iter_mut().enumerate() {
            if tiers.is_empty() || tiers.contains(&(TIERS[i] as i32)) || tiers.contains(&(Tier::Unspecified as i32)) {
                *of_tier = of_tier.with(reasons);
            }
        }
    }

    /// Sets the tokens in a chunk of the tiers named.
    pub fn set_chunk(&mut self, tokens: u32, tiers: &[i32]) {
        for tier in tiers.iter().filter_map(|&t| tier_index(t)) {
            self.chunks[tier] = tokens;
        }
    }

    /// Removes all that is known of the tiers named; of all if none is.
    pub fn clear(&mut self, tiers: &[i32]) {
        if tiers.is_empty() {
            *self = Self::default();
        }
        for tier in tiers.iter().filter_map(|&t| tier_index(t)) {
            (self.tiers[tier], self.chunks[tier]) = (Reasons::default(), 0);
        }
    }

    /// Removes the reasons that Gaps with some reasons have caused. It ignores those that this version does not resolve: they
    /// may have caused a reason in common with others.
    pub fn resolve(&mut self, gaps: &[i32]) {
        if gaps.contains(&(gap::Reason::ReplayUnproved as i32)) {
            let unproved = Reasons::of(DegradedReason::ReplayUnproved);
            self.tiers = self.tiers.map(|r| r.without(unproved));
        }
    }

    /// Returns how many blocks of a prefix in a tier are in whole chunks.
    pub fn whole_chunks(&self, tier: usize, blocks: u32, block_size: u32) -> u32 {
        match (self.chunks[tier], block_size) {
            (0, _) | (_, 0) => blocks,
            (chunk, size) => {
                let tokens = u64::from(blocks) * u64::from(size);
                u32::try_from((tokens - tokens % u64::from(chunk)) / u64::from(size)).unwrap_or(blocks)
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_not_known_is_a_gap() {
        let gap = Reasons::of(DegradedReason::Gap);
        assert_eq!(Reasons::of_gap(77), gap);
        assert_eq!(Reasons::of_gap(0), gap);
        assert_eq!(Reasons::known(&[99]), gap);
        assert_eq!(Reasons::known(&[0]), gap);
        assert_eq!(Reasons::known(&[-1, 1]), gap.with(Reasons::of(DegradedReason::JoinedLate)));
    }

    #[test]
    fn each_gap_causes_the_reason_of_its_name() {
        for n in 1..=18 {
            let name = gap::Reason::try_from(n).unwrap().as_str_name();
            let [same] = Reasons::of_gap(n).list()[..] else { panic!("{name}") };
            if let Some(want) = DegradedReason::from_str_name(&format!("DEGRADED_{name}")) {
                assert_eq!(same, want);
            }
        }
        assert!(gap::Reason::try_from(19).is_err(), "the contract has a new reason");
    }

    #[test]
    fn tiers() {
        let gap = Reasons::of(DegradedReason::Gap);
        let mut d = Doubts::default();
        d.add(gap, &[Tier::Disk as i32, 9]);
        assert_eq!(d.tiers.map(Reasons::is_empty), [true, true, false, true]);
        d.clear(&[Tier::Device as i32]);
        assert!(!d.all().is_empty());
        d.clear(&[Tier::Disk as i32]);
        assert!(d.all().is_empty());
        d.add(gap, &[0]);
        assert!(d.tiers.iter().all(|r| !r.is_empty()));
        d.resolve(&[gap::Reason::ReplayForgotten as i32]);
        assert!(!d.all().is_empty());
    }

    #[test]
    fn chunks_are_loaded_whole() {
        let mut d = Doubts::default();
        d.set_chunk(256, &[Tier::Disk as i32]);
        assert_eq!([15, 16, 33].map(|blocks| d.whole_chunks(2, blocks, 16)), [0, 16, 32]);
        assert_eq!(d.whole_chunks(0, 15, 16), 15);
        assert_eq!(d.whole_chunks(2, 7, 96), 5); // 672 tokens are two chunks of 256, and these five whole blocks
    }
}
