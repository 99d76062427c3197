package kvblock

// Tier is where a block is in the engine's memory hierarchy. It has the same values as kvcast.v1.Tier.
type Tier uint8

// The tiers, nearest first.
const (
	TierDevice Tier = iota + 1
	TierHostPinned
	TierDisk
	TierExternal

	// NumTiers is the number of tiers.
	NumTiers = iota
	// TierEnd is one more than the largest tier, for arrays indexed by tier.
	TierEnd = NumTiers + 1
)

// Tiers is a set of tiers: bit n is tier n, and bit 0 means events without a tier.
type Tiers uint8

// The sets of all tiers, and of those below device memory.
const (
	AllTiers   Tiers = 1<<TierEnd - 1<<TierDevice
	LowerTiers       = AllTiers &^ (1 << TierDevice)
	// AllEvents has also the events without a tier.
	AllEvents = AllTiers | 1
)

// TierBit returns the set of one tier; of events without a tier if it is 0.
func TierBit(tier uint8) Tiers { return 1 << tier }

// Has reports whether the set has a tier.
func (t Tiers) Has(tier Tier) bool { return t&(1<<tier) != 0 }
