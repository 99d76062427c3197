package wire

import (
	"fmt"
	"math"
	"slices"

	"github.com/tinylib/msgp/msgp"
)

// Producer is the engine or library whose form of events an Encoder writes.
type Producer uint8

// The producers.
const (
	// ProducerVLLM is vLLM, and all that adopted its form unchanged.
	ProducerVLLM Producer = iota
	// ProducerSGLang is SGLang 0.5.18, whose array stores end with a map of cache salt
	// and session id in the place of the LoRA name. Its map events are vLLM's.
	ProducerSGLang
	// ProducerDynamo is the lineage of Dynamo, whose array stores have block_mm_infos
	// before the attention group. Its map events are vLLM's.
	ProducerDynamo
	// ProducerAIBrix is AIBrix's own encoder: map events only, the tokens in one list
	// per block, whose length is the block size.
	ProducerAIBrix
	// ProducerMooncake is Mooncake: map events only, with seq_hashes, and nil for
	// absent tokens and block size.
	ProducerMooncake

	numProducers = iota
)

// producers are the forms of events by producer.
var producers = [numProducers]struct {
	name string
	tags *tags
	// stored are the fields of array stores by position, after the tag. It is nil where
	// all events are maps.
	stored []key
}{
	ProducerVLLM:     {"vLLM", &vllmTags, slices.Concat(arrayFields[KindStored], groupFields)},
	ProducerSGLang:   {"SGLang", &vllmTags, append(arrayFields[KindStored][:6:6], keyMetadata)},
	ProducerDynamo:   {"Dynamo", &vllmTags, slices.Concat(arrayFields[KindStored], mmGroupFields)},
	ProducerAIBrix:   {"AIBrix", &aibrixTags, nil},
	ProducerMooncake: {"Mooncake", &mooncakeTags, nil},
}

// tags are the names of events: in arrays the first element, in maps the value of key.
type tags struct {
	key   string
	kinds [KindCleared + 1]string
	// hashes is the key of the block hashes in maps.
	hashes string
}

const (
	vllmStored  = "BlockStored"
	vllmRemoved = "BlockRemoved"
)

var (
	vllmTags     = tags{"type", [...]string{"", vllmStored, vllmRemoved, "AllBlocksCleared"}, "block_hashes"}
	aibrixTags   = tags{"type", [...]string{"", "BLOCK_STORED", "BLOCK_REMOVED", "ALL_BLOCKS_CLEARED"}, "block_hashes"}
	mooncakeTags = tags{"event_type", [...]string{"", "stored", "removed", "cleared"}, "seq_hashes"}
)

// kindOf returns the kind of events with that tag, 0 if there is none.
func (t *tags) kindOf(tag []byte) Kind {
	for kind := KindStored; kind <= KindCleared; kind++ {
		if string(tag) == t.kinds[kind] {
			return kind
		}
	}
	return 0
}

// kindOfTag returns the kind and the producer of events with that tag in an array, or
// with that "type" in a map. The kind is 0 if there is none.
func kindOfTag(tag []byte) (Kind, Producer) {
	// Constants compare faster than the names in vllmTags.
	if string(tag) == vllmStored {
		return KindStored, ProducerVLLM
	}
	if string(tag) == vllmRemoved {
		return KindRemoved, ProducerVLLM
	}
	if kind := vllmTags.kindOf(tag); kind != 0 {
		return kind, ProducerVLLM
	}
	return aibrixTags.kindOf(tag), ProducerAIBrix
}

// The fields of array events by position, after the tag, as far as they are the same at
// all producers, and those of stores that follow.
var (
	arrayFields = [...][]key{
		KindStored:  {keyHashes, keyParent, keyTokens, keyBlockSize, keyLoRAID, keyMedium, keyLoRAName, keyExtraKeys},
		KindRemoved: {keyHashes, keyMedium, keyGroupIdx},
		KindCleared: {},
	}
	groupFields   = []key{keyGroupIdx, keySpecKind, keySlidingWindow}
	mmGroupFields = slices.Concat([]key{keyMMInfos}, groupFields)
)

// groupFieldsAt returns the fields of the values from i on, which follow a store's
// extra_keys. Producers of Dynamo's lineage put block_mm_infos there first; the type of
// the first value after the nils decides.
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
		// A window, or an unknown element, which may be larger than any window.
		_, shifted = v.int()
	}
	if shifted {
		return mmGroupFields
	}
	return groupFields
}

// Encoder.Fields: the number of elements in stores of the versions that added these
// fields to removes, and its bounds.
const (
	withMedium = 7
	withGroup  = 10

	minFields = 5
	maxFields = 13
)

// arrayFields returns the fields that the Encoder writes into array events of a kind.
func (e *Encoder) arrayFields(kind Kind) []key {
	keys := arrayFields[kind]
	limit := e.Fields - 1 // the tag is one
	switch {
	case kind == KindStored:
		keys = producers[e.Producer].stored
	case e.Fields < withMedium:
		limit = 1
	case e.Fields < withGroup:
		limit = 2
	}
	if e.Fields == 0 {
		return keys
	}
	return keys[:min(len(keys), limit)]
}

// inMap reports whether the Encoder writes the k-th event of a batch as a map.
func (e *Encoder) inMap(k int) bool {
	return producers[e.Producer].stored == nil || (e.EventForm == FormMap) != (e.Mixed && k%2 == 1)
}

// fieldsOf returns the fields that events of a kind have in the Encoder's form.
func (e *Encoder) fieldsOf(kind Kind, inMap bool) keySet {
	if inMap {
		return kindFields[kind]
	}
	keys := arrayFields[kind]
	var set keySet
	if kind == KindStored {
		keys = producers[e.Producer].stored
		set.add(keyEagle)
		set.add(keyOpaque)
	}
	for _, k := range keys {
		set.add(k)
		if k == keyMetadata {
			for _, k := range metadataKeys {
				set.add(k)
			}
		}
	}
	return set
}

// describe names a kind of events in the Encoder's form.
func (e *Encoder) describe(kind Kind, inMap bool) string {
	form := "array"
	if inMap {
		form = "map"
	}
	return fmt.Sprintf("a %s event in %s's %s", mooncakeTags.kinds[kind], producers[e.Producer].name, form)
}

// readBatch reads the batch and returns where it ends.
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
		// Neither too large nor NaN.
		if t := math.Float64frombits(bits); math.Abs(t) <= maxSeconds {
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

// maxSeconds is the time above which a number is milliseconds: in seconds it is the
// year 5138.
const maxSeconds = 1e11

// seconds returns an engine's time in seconds, and whether it is finite.
func seconds(t float64) (float64, bool) {
	if math.IsNaN(t) || math.IsInf(t, 0) {
		return 0, false
	}
	if t > maxSeconds {
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

// readPublisherID reads the publisher id. Any other value is skipped: it may be an
// element that is not known here.
func (d *Decoder) readPublisherID(i int) (int, fault) {
	d.batch.PublisherID = nil
	v, f := readValue(d.p, i)
	if f == 0 && v.class == classBin && len(v.bytes) == PublisherIDBytes {
		d.batch.PublisherID = v.bytes[:PublisherIDBytes:PublisherIDBytes]
	}
	return skip(d.p, i, batchDepth)
}
