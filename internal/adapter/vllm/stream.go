package vllm

import (
	"maps"
	"math/bits"

	"github.com/kvcast/kvcast/internal/core/kvblock"
	"github.com/kvcast/kvcast/internal/wire"
	kvcastv1 "github.com/kvcast/kvcast/proto/kvcast/v1"
)

// media are the media of the tiers, by kvcast.v1.Tier.
var media = [kvblock.TierEnd]string{kvblock.TierDevice: "GPU", kvblock.TierHostPinned: "CPU", kvblock.TierDisk: "STORAGE", kvblock.TierExternal: "EXTERNAL"}

// Omission is why a block is not published.
type Omission int

// The reasons.
const (
	// OmittedNoTokens: the entry has no token ids for the block.
	OmittedNoTokens Omission = iota
	// OmittedContent: the block's content is more than its tokens and its LoRA adapter, such as a cache salt or an image.
	OmittedContent
	// OmittedParent: the block before it is not published, so that consumers could not place the block.
	OmittedParent
	numOmissions
)

var omissionNames = [numOmissions]string{"no_token_ids", "other_content", "parent"}

// Stream turns the events of one dp rank into batches, as its engine would publish them. It is a state machine without
// I/O, clock and lock.
//
// A consumer that applies all batches holds exactly the blocks of Held, whether it keeps a set or counts stores: a block
// is stored once in a tier, after its parent, and removed once. Seqs are contiguous. The first batch clears all blocks.
type Stream struct {
	worker string
	rank   uint32
	topic  string
	form   wire.Form

	held map[uint64]uint8 // tiers that consumers hold a block in: bit n is kvcast.v1.Tier n
	// needsTokens omits stores by the hash alone, for encodings that cannot express them.
	needsTokens bool
	// only, if not nil, has the blocks and tiers that may be stored.
	only  map[uint64]uint8
	next  uint64 // the seq of the next batch
	first uint64 // the seq of the first batch
	// stateEnd is the seq after those of all states so far. Below it, a seq may be of a state's batch, which has other events
	// than the stream's batch with that seq.
	stateEnd uint64
	final    Batch // the last batch of a stream that has ended
	events   []wire.Event
	blocks   int // in events
	omitted  [numOmissions]uint64
	hashes   []uint64 // reused by store
}

// NewStream returns a stream whose first batch has a seq, and clears all blocks.
func NewStream(worker string, rank uint32, topic string, form wire.Form, first uint64) *Stream {
	s := &Stream{worker: worker, rank: rank, topic: topic, form: form, held: make(map[uint64]uint8), next: first, first: first}
	s.Clear()
	return s
}

// NeedTokens makes the stream omit blocks that come without token ids, also in further tiers of blocks that consumers hold. It must be
// called before the first event is applied.
func (s *Stream) NeedTokens() { s.needsTokens = true }

// Next returns the seq of the next batch.
func (s *Stream) Next() uint64 { return s.next }

// Apply adds an event of the rank to the next batch. Events that do not change blocks are ignored.
func (s *Stream) Apply(e *kvcastv1.RouterEvent) {
	tier := e.GetTier()
	isTier := tier >= 1 && int(tier) < len(media)
	switch kind := e.GetEvent().(type) {
	case *kvcastv1.RouterEvent_Stored:
		switch {
		case s.only != nil:
			s.storePresent(kind.Stored)
		case isTier:
			s.store(kvblock.Tier(tier), kind.Stored)
		}
	case *kvcastv1.RouterEvent_Removed:
		if isTier {
			s.remove(kvblock.Tier(tier), kind.Removed.GetBlockHashes())
		}
	case *kvcastv1.RouterEvent_Cleared:
		for _, t := range kind.Cleared.GetTiers() {
			if t >= 1 && int(t) < len(media) {
				s.clearTier(kvblock.Tier(t))
			}
		}
		if len(kind.Cleared.GetTiers()) == 0 {
			s.Clear()
		}
	default:
	}
}

// Clear adds an event that clears all blocks.
func (s *Stream) Clear() {
	clear(s.held)
	s.events, s.blocks = append(s.events[:0], wire.Event{Kind: wire.KindCleared}), 0
}

// store publishes the blocks of a chain that consumers do not hold in a tier, and can place.
func (s *Stream) store(tier kvblock.Tier, c *kvcastv1.Stored) {
	var (
		bit    = uint8(1) << tier
		hashes = c.GetBlockHashes()
		size   = int(c.GetBlockSize())
		ids    = c.GetTokenIds()
		start  = -1 // the first block of the run that is published as one event
	)
	if s.hashes = s.hashes[:0]; size > 0 && len(ids) == size*len(hashes) {
		s.hashes = kvblock.AppendTokensHashes(s.hashes, ids, size, kvblock.Seed(c.GetLoraName(), ""), false, nil)
	}
	publish := func(end int) {
		if start < 0 {
			return
		}
		e := wire.Event{
			Kind: wire.KindStored, BlockHashes: hashes[start:end], Tokens: ids[start*size : end*size], BlockSize: uint32(size),
			LoRAName: c.GetLoraName(), Medium: media[tier], HasParent: start > 0 || c.ParentHash != nil, Parent: c.GetParentHash(),
		}
		if start > 0 {
			e.Parent = hashes[start-1]
		}
		s.add(e)
		start = -1
	}
	placed := c.ParentHash == nil || s.held[c.GetParentHash()] != 0
	for i, hash := range hashes {
		was := s.held[hash]
		switch known := i < len(s.hashes) && i < len(c.GetTokensHashes()); {
		case was&bit != 0 || s.only != nil && s.only[hash]&bit == 0:
			publish(i)
		case placed && known && s.hashes[i] == c.GetTokensHashes()[i]:
			if start < 0 {
				start = i
			}
			s.held[hash] |= bit
		case was != 0 && !known && !s.needsTokens: // a further tier, by the hash alone
			publish(i)
			s.add(wire.Event{Kind: wire.KindStored, BlockHashes: hashes[i : i+1], Medium: media[tier]})
			s.held[hash] |= bit
		default:
			publish(i)
			s.omit(known, placed)
		}
		placed = s.held[hash] != 0
	}
	publish(len(hashes))
}

// storePresent publishes the blocks of a snapshot in the tiers that the copied stream holds them in. The snapshot may be of a
// later entry, and have the blocks in other tiers: consumers need their content for the changes of tiers that follow.
func (s *Stream) storePresent(c *kvcastv1.Stored) {
	missing := uint8(0)
	for _, hash := range c.GetBlockHashes() {
		missing |= s.only[hash] &^ s.held[hash]
	}
	for tier := range media {
		if missing&(1<<tier) != 0 {
			s.store(kvblock.Tier(tier), c)
		}
	}
}

func (s *Stream) omit(known, placed bool) {
	switch {
	case !placed:
		s.omitted[OmittedParent]++
	case known:
		s.omitted[OmittedContent]++
	default:
		s.omitted[OmittedNoTokens]++
	}
}

// remove publishes the removal of the blocks that consumers hold in a tier.
func (s *Stream) remove(tier kvblock.Tier, hashes []uint64) {
	bit := uint8(1) << tier
	var gone []uint64
	for _, hash := range hashes {
		was := s.held[hash]
		if was&bit == 0 {
			continue
		}
		gone = append(gone, hash)
		if was &^= bit; was == 0 {
			delete(s.held, hash)
		} else {
			s.held[hash] = was
		}
	}
	if len(gone) > 0 {
		s.add(wire.Event{Kind: wire.KindRemoved, BlockHashes: gone, Medium: media[tier]})
	}
}

// clearTier publishes the removal of all blocks of a tier: an engine's event clears all tiers.
func (s *Stream) clearTier(tier kvblock.Tier) {
	var all []uint64
	for hash, tiers := range s.held {
		if tiers&(1<<tier) != 0 {
			all = append(all, hash)
		}
	}
	s.remove(tier, all)
}

func (s *Stream) add(e wire.Event) {
	s.events = append(s.events, e)
	s.blocks += len(e.BlockHashes)
}

// Empty reports whether the next batch would have no events.
func (s *Stream) Empty() bool { return len(s.events) == 0 }

// Take returns the pending events, for encodings other than vLLM's. They reference the events that were applied, and are valid
// until the next call of Apply, Clear or Take.
func (s *Stream) Take() []wire.Event {
	events := s.events
	s.events, s.blocks = s.events[:0], 0
	return events
}

// Pending returns the number of blocks of the pending events.
func (s *Stream) Pending() int { return s.blocks }

// Present returns a stream that clears all blocks, and then publishes those of them that are applied to it and that s holds, in the
// tiers that s holds them in.
func (s *Stream) Present() *Stream {
	p := NewStream(s.worker, s.rank, s.topic, s.form, s.next)
	p.only, p.needsTokens = maps.Clone(s.held), s.needsTokens
	return p
}

// Batch ends the next batch, and returns it in the encoding of vLLM with its seq. A batch may have no events. The time is in
// seconds since the Unix epoch.
func (s *Stream) Batch(time float64) (payload []byte, seq uint64) {
	seq = s.next
	s.next++
	payload = encode(time, s.rank, s.form, s.events)
	clear(s.events) // they reference entries
	s.events, s.blocks = s.events[:0], 0
	return payload, seq
}

// encode encodes a batch: an array, of maps or arrays, as vLLM does.
func encode(time float64, rank uint32, form wire.Form, events []wire.Event) []byte {
	e := wire.Encoder{BatchForm: wire.FormArray, EventForm: form}
	return e.AppendBatch(nil, &wire.Batch{Time: time, HasTime: true, Rank: rank, HasRank: true, Events: events})
}

// State is the blocks of a stream after its last batch, for one consumer.
type State struct {
	stream *Stream // that publishes the state
	// batches is how many batches are left, the last of which has the seq of the stream's last batch. A batch has at least
	// perBatch blocks, except the last ones.
	batches, perBatch int
}

const (
	// stateBlocks is how many blocks a batch of a state has at least.
	stateBlocks = 4096
	// maxFilled is how many seqs a state fills with batches without events behind it, for consumers that want the very
	// batch that they have asked for. vLLM has as many batches by default.
	maxFilled = 10_000
)

// State returns the blocks of a stream, in batches that end with the last seq of the stream. So a consumer that has applied
// them continues with the stream's next batch. No seq is below from. If fill is set, from is the first one if it is among the
// last ones. The stream must have had a batch with the seq from or a later one, and no pending events.
func (s *Stream) State(from uint64, fill bool) *State {
	pairs := 0
	for _, tiers := range s.held {
		pairs += bits.OnesCount8(tiers)
	}
	room := s.next - max(from, s.first)
	batches := int(min(room, uint64(pairs/stateBlocks+1)))
	if fill && room <= maxFilled {
		batches = int(room)
	}
	s.stateEnd = s.next
	copied := s.Present()
	copied.next -= uint64(batches)
	return &State{stream: copied, batches: batches, perBatch: max(stateBlocks, (pairs+batches-1)/batches)}
}

// Apply adds blocks of a snapshot of the index, parents before their children. The snapshot may be of a later entry.
// Blocks that the stream does not hold are left out. It appends the batches that are complete. The event must not change
// until then.
func (s *State) Apply(e *kvcastv1.RouterEvent, time float64, to []Batch) []Batch {
	s.stream.Apply(e)
	if s.stream.blocks < s.perBatch || s.batches == 1 {
		return to
	}
	return s.batch(time, to)
}

// End returns the last batches. Batches without events make up for blocks that have left the index meanwhile.
func (s *State) End(time float64, to []Batch) []Batch {
	for s.batches > 0 {
		to = s.batch(time, to)
	}
	return to
}

func (s *State) batch(time float64, to []Batch) []Batch {
	payload, seq := s.stream.Batch(time)
	s.batches--
	return append(to, Batch{Stream: s.stream, Seq: seq, Payload: payload})
}

// Batch is a batch of a stream.
type Batch struct {
	Stream  *Stream
	Seq     uint64
	Payload []byte
	// Last is set if no batch of the stream follows.
	Last bool
}
