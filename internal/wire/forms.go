package wire

import (
	"math"
	"slices"

	"github.com/tinylib/msgp/msgp"
)

// producer is an engine or library with tags of its own.
type producer uint8

const (
	// producerVLLM is vLLM, and every engine that uses its tags.
	producerVLLM producer = iota
	// producerAIBrix sends map events only, with one list of tokens per block. The length of the first list is the block size.
	producerAIBrix
	// producerMooncake sends map events only, with seq_hashes, and without tokens and block size where they are unknown.
	producerMooncake
)

// tags are the names of events by kind: the first element of an array event; in a map event
// the value of "type", or Mooncake's "event_type".
type tags [KindCleared + 1]string

const (
	vllmStored  = "BlockStored"
	vllmRemoved = "BlockRemoved"
)

var (
	vllmTags     = tags{"", vllmStored, vllmRemoved, "AllBlocksCleared"}
	aibrixTags   = tags{"", "BLOCK_STORED", "BLOCK_REMOVED", "ALL_BLOCKS_CLEARED"}
	mooncakeTags = tags{"", "stored", "removed", "cleared"}

	// kindNames are the kinds in JSON and errors.
	kindNames = mooncakeTags
)

// kindOf returns the kind of events with a tag, or 0 if there is none.
func (t *tags) kindOf(tag []byte) Kind {
	for kind := KindStored; kind <= KindCleared; kind++ {
		if string(tag) == t[kind] {
			return kind
		}
	}
	return 0
}

// kindOfTag returns the kind and the producer of events with a tag in an array, or with a
// "type" in a map. The kind is 0 if the tag is unknown.
func kindOfTag(tag []byte) (Kind, producer) {
	// Constants compare faster than the names in vllmTags.
	if string(tag) == vllmStored {
		return KindStored, producerVLLM
	}
	if string(tag) == vllmRemoved {
		return KindRemoved, producerVLLM
	}
	if kind := vllmTags.kindOf(tag); kind != 0 {
		return kind, producerVLLM
	}
	return aibrixTags.kindOf(tag), producerAIBrix
}

// Fields of array events by position, after the tag.
var (
	// arrayFields are the fields that all producers have in the same positions.
	arrayFields = [...][]key{
		KindStored:  {keyHashes, keyParent, keyTokens, keyBlockSize, keyLoRAID, keyMedium, keyLoRAName, keyExtraKeys},
		KindRemoved: {keyHashes, keyMedium, keyGroupIdx},
		KindCleared: {keyMedium},
	}
	// groupFields follow in stores. Producers of Dynamo's lineage send mmGroupFields instead.
	groupFields   = []key{keyGroupIdx, keySpecKind, keySlidingWindow}
	mmGroupFields = slices.Concat([]key{keyMMInfos}, groupFields)

	// vllmArrays are the fields of vLLM's array events.
	vllmArrays = [...][]key{
		KindStored:  slices.Concat(arrayFields[KindStored], groupFields),
		KindRemoved: arrayFields[KindRemoved],
		KindCleared: {},
	}
)

// groupFieldsAt returns the fields of the values from i on, which follow a store's extra_keys, and of which the first nils values are nil.
// Producers of Dynamo's lineage send block_mm_infos first. The type of the first value that is not nil decides.
func groupFieldsAt(p []byte, i, nils int) []key {
	v, _ := readValue(p, i+nils)
	shifted := false
	switch isInt := v.class == classUint || v.class == classInt; nils {
	case 0:
		shifted = v.class == classArray
	case 1:
		shifted = isInt
	case 2:
		shifted = v.class == classStr
	case 3:
		// The value is a window if it fits into an int64, otherwise an unknown element.
		_, shifted = v.int()
	}
	if shifted {
		return mmGroupFields
	}
	return groupFields
}

func (d *Decoder) readBatch() (int, fault) {
	class, n, i, f := readHeader(d.p, 0)
	switch {
	case f != 0:
		return 0, f
	case class == classArray:
		d.batch.Form = FormArray
		return d.readArrayBatch(n, i)
	case class == classMap:
		d.batch.Form = FormMap
		return d.readMapBatch(n, i)
	default:
		return 0, badBatchShape
	}
}

// readArrayBatch reads [ts, events, dp_rank, publisher_id, ...].
func (d *Decoder) readArrayBatch(n, i int) (int, fault) {
	if n < 2 {
		return i, badBatchShape
	}
	i, f := d.readTime(i)
	if f == 0 {
		i, f = d.readEvents(i)
	}
	if f == 0 && n > 2 {
		i, f = d.readRank(i)
	}
	if f == 0 && n > 3 {
		i, f = d.readPublisherID(i)
	}
	for k := 4; k < n && f == 0; k++ {
		i, f = skip(d.p, i, batchDepth)
	}
	return i, f
}

// readMapBatch reads {"ts", "events", "data_parallel_rank", "publisher_id"}.
func (d *Decoder) readMapBatch(n, i int) (int, fault) {
	hasEvents := false
	for range n {
		var f fault
		name := shortText(d.p, i)
		if name != nil {
			i += 1 + len(name)
		} else if name, i, f = readName(d.p, i, batchDepth); f != 0 {
			return i, f
		}
		switch string(name) {
		case "ts":
			i, f = d.readTime(i)
		case "events":
			i, f = d.readEvents(i)
			hasEvents = true
		case "data_parallel_rank", "attn_dp_rank":
			i, f = d.readRank(i)
		case "publisher_id":
			i, f = d.readPublisherID(i)
		default:
			i, f = skip(d.p, i, batchDepth)
		}
		if f != 0 {
			return i, f
		}
	}
	if !hasEvents {
		return i, badBatchShape
	}
	return i, 0
}

// appendArrayBatch appends the batch in the form that readArrayBatch reads.
func (e *Encoder) appendArrayBatch(dst []byte, b *Batch) []byte {
	n := uint32(3)
	if b.PublisherID != nil {
		n = 4
	}
	dst = msgp.AppendArrayHeader(dst, n)
	if b.HasTime {
		dst = msgp.AppendFloat64(dst, b.Time)
	} else {
		dst = msgp.AppendNil(dst)
	}
	dst = e.appendEvents(dst, b.Events)
	if b.HasRank {
		dst = msgp.AppendUint32(dst, b.Rank)
	} else {
		dst = msgp.AppendNil(dst)
	}
	if b.PublisherID != nil {
		dst = msgp.AppendBytes(dst, b.PublisherID)
	}
	return dst
}

// appendMapBatch appends the batch in the form that readMapBatch reads.
func (e *Encoder) appendMapBatch(dst []byte, b *Batch) []byte {
	n := uint32(1)
	for _, isSet := range [...]bool{b.HasTime, b.HasRank, b.PublisherID != nil} {
		if isSet {
			n++
		}
	}
	dst = msgp.AppendMapHeader(dst, n)
	if b.HasTime {
		dst = msgp.AppendFloat64(msgp.AppendString(dst, "ts"), b.Time)
	}
	dst = e.appendEvents(msgp.AppendString(dst, "events"), b.Events)
	if b.HasRank {
		dst = msgp.AppendUint32(msgp.AppendString(dst, "data_parallel_rank"), b.Rank)
	}
	if b.PublisherID != nil {
		dst = msgp.AppendBytes(msgp.AppendString(dst, "publisher_id"), b.PublisherID)
	}
	return dst
}

func (d *Decoder) readTime(i int) (int, fault) {
	if bits, ok := readFixed64(d.p, i, float64Code); ok {
		// The comparison is false for NaN.
		if t := math.Float64frombits(bits); math.Abs(t) <= MaxSeconds {
			d.batch.Time, d.batch.HasTime = t, true
			return i + 9, 0
		}
	}
	v, f := readValue(d.p, i)
	if f != 0 {
		return i, f
	}
	d.batch.Time, d.batch.HasTime = 0, false
	if v.class == classNil {
		return v.end, 0
	}
	t, ok := v.float()
	if !ok {
		return i, badBatchShape
	}
	if d.batch.Time, d.batch.HasTime = seconds(t); !d.batch.HasTime {
		return i, badTS
	}
	return v.end, 0
}

// MaxSeconds is the largest time in seconds, in the year 5138. Larger numbers are milliseconds.
const MaxSeconds = 1e11

// seconds converts an engine's time to seconds, and reports whether it is finite.
func seconds(t float64) (float64, bool) {
	if math.IsNaN(t) || math.IsInf(t, 0) {
		return 0, false
	}
	if t > MaxSeconds {
		t /= 1000
	}
	return t, true
}

func (d *Decoder) readRank(i int) (int, fault) {
	if i < len(d.p) && d.p[i] <= maxFixint {
		d.batch.Rank, d.batch.HasRank = uint32(d.p[i]), true
		return i + 1, 0
	}
	v, f := readValue(d.p, i)
	if f != 0 {
		return i, f
	}
	d.batch.Rank, d.batch.HasRank = v.uint32()
	if !d.batch.HasRank && v.class != classNil {
		return i, badBatchShape
	}
	return v.end, 0
}

// readPublisherID reads the publisher id at i. A value of another type or length is skipped: it may be an element of an unknown version.
func (d *Decoder) readPublisherID(i int) (int, fault) {
	d.batch.PublisherID = nil
	v, f := readValue(d.p, i)
	if f == 0 && v.class == classBin && len(v.bytes) == PublisherIDBytes {
		d.batch.PublisherID = v.bytes[:PublisherIDBytes:PublisherIDBytes]
	}
	return skip(d.p, i, batchDepth)
}
