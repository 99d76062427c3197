package wire

import (
	"fmt"
	"math"
	"unicode/utf8"
)

// EncodeError is why a batch cannot be encoded.
type EncodeError struct {
	// Event is the index of the event in Batch.Events, or -1 where the batch or the
	// Encoder is at fault.
	Event int
	// Field is the field at fault: of the Event, such as "Medium" or "Rare.Time", of
	// the Batch, or of the Encoder, as "Encoder.Fields".
	Field string
	// Problem is what is wrong with it.
	Problem string
}

// Error names the event, the field, and the problem.
func (e *EncodeError) Error() string {
	if e.Event < 0 {
		return fmt.Sprintf("encode batch: %s: %s", e.Field, e.Problem)
	}
	return fmt.Sprintf("encode batch: event %d: %s: %s", e.Event, e.Field, e.Problem)
}

// problem returns an EncodeError of no event.
func problem(field, format string, args ...any) *EncodeError {
	return &EncodeError{Event: -1, Field: field, Problem: fmt.Sprintf(format, args...)}
}

// shape is what an event is encoded as: its kind, and whose form it has.
type shape uint16

const (
	storeMap shape = 1 << iota
	storeAIBrix
	storeArray
	storeSGLang
	storeDynamo
	removeMap
	removeArray
	clearMap
	clearArray

	storeMaps   = storeMap | storeAIBrix
	storeArrays = storeArray | storeSGLang | storeDynamo
	stores      = storeMaps | storeArrays
	removes     = removeMap | removeArray
	anyMap      = storeMaps | removeMap | clearMap
	groups      = storeMaps | storeArray | storeDynamo | removeMap
)

// String returns the shape in words.
func (s shape) String() string {
	switch s {
	case storeMap:
		return "a store in a map"
	case storeAIBrix:
		return "a store in AIBrix's map"
	case storeArray:
		return "a store in an array"
	case storeSGLang:
		return "a store in SGLang's array"
	case storeDynamo:
		return "a store in Dynamo's array"
	case removeMap:
		return "a remove in a map"
	case removeArray:
		return "a remove in an array"
	case clearMap:
		return "a clear in a map"
	default:
		return "a clear in an array"
	}
}

// asMap reports whether the k-th event is encoded as a map.
func (e *Encoder) asMap(k int) bool {
	return (e.EventForm == FormMap) != (e.Mixed && k%2 == 1) || e.Producer == ProducerAIBrix || e.Producer == ProducerMooncake
}

// shapeOf returns what the k-th event is encoded as, which is of this kind.
func (e *Encoder) shapeOf(kind Kind, k int) shape {
	asMap := e.asMap(k)
	switch {
	case kind == KindStored && e.Producer == ProducerAIBrix:
		return storeAIBrix
	case kind == KindStored && asMap:
		return storeMap
	case kind == KindStored && e.Producer == ProducerSGLang:
		return storeSGLang
	case kind == KindStored && e.Producer == ProducerDynamo:
		return storeDynamo
	case kind == KindStored:
		return storeArray
	case kind == KindRemoved && asMap:
		return removeMap
	case kind == KindRemoved:
		return removeArray
	case asMap:
		return clearMap
	default:
		return clearArray
	}
}

// eventFields are the fields of events, and which shapes have them.
var eventFields = [...]struct {
	name  string
	in    shape
	isSet func(*Event) bool
}{
	{"BlockHashes", stores | removes, func(ev *Event) bool { return len(ev.BlockHashes) > 0 }},
	{"Parent", stores, func(ev *Event) bool { return ev.HasParent }},
	{"OpaqueTokens", stores &^ storeAIBrix, func(ev *Event) bool { return ev.OpaqueTokens }},
	{"Eagle", stores &^ storeAIBrix, func(ev *Event) bool { return ev.Eagle }},
	{"Tokens", stores, func(ev *Event) bool { return len(ev.Tokens) > 0 }},
	{"BlockSize", stores, func(ev *Event) bool { return ev.BlockSize != 0 }},
	{"LoRAID", stores, func(ev *Event) bool { return ev.HasLoRAID }},
	{"Medium", stores | removes, func(ev *Event) bool { return ev.Medium != "" }},
	{"LoRAName", stores &^ storeSGLang, func(ev *Event) bool { return ev.LoRAName != "" }},
	{"GroupIdx", groups | removeArray, func(ev *Event) bool { return ev.HasGroupIdx }},
	{"SpecKind", groups, func(ev *Event) bool { return ev.SpecKind != "" }},
	{"CacheSalt", anyMap | storeSGLang, func(ev *Event) bool { return ev.CacheSalt != "" }},
	{"Origin", storeMaps, func(ev *Event) bool { return ev.Origin != OriginUnknown }},
	{"Raw.ExtraKeys", stores &^ storeSGLang, func(ev *Event) bool { return ev.raw().ExtraKeys != nil }},
	{"Raw.BlockMMInfos", storeMaps | storeDynamo, func(ev *Event) bool { return ev.raw().BlockMMInfos != nil }},
	{"Raw.MMKeys", storeMaps, func(ev *Event) bool { return ev.raw().MMKeys != nil }},
	{"Rare.Locality", anyMap, func(ev *Event) bool { return ev.rare().Locality != "" }},
	{"Rare.Ownership", anyMap, func(ev *Event) bool { return ev.rare().Ownership != "" }},
	{"Rare.SessionID", anyMap | storeSGLang, func(ev *Event) bool { return ev.rare().SessionID != "" }},
	{"Rare.ModelName", anyMap, func(ev *Event) bool { return ev.rare().ModelName != "" }},
	{"Rare.Time", anyMap, func(ev *Event) bool { return ev.rare().HasTime }},
	{"Rare.SlidingWindow", groups, func(ev *Event) bool { return ev.rare().HasSlidingWindow }},
	{"Rare.RemainingCopies", removeMap, func(ev *Event) bool { return len(ev.rare().RemainingCopies) > 0 }},
}

// check returns why the batch cannot be encoded, or nil.
func (e *Encoder) check(b *Batch) *EncodeError {
	if p := e.checkForms(); p != nil {
		return p
	}
	switch {
	case b == nil:
		return problem("Batch", "is nil")
	case b.HasTime && !isTime(b.Time):
		return problem("Time", notTime, b.Time, float64(maxSeconds))
	case b.PublisherID != nil && len(b.PublisherID) != PublisherIDBytes:
		return problem("PublisherID", "has %d bytes, want %d", len(b.PublisherID), PublisherIDBytes)
	case tooLong(len(b.Events)):
		return problem("Events", tooManyElements, len(b.Events))
	}
	for k := range b.Events {
		if p := e.checkEvent(&b.Events[k], k); p != nil {
			p.Event = k
			return p
		}
	}
	return nil
}

// checkForms checks the Encoder itself.
func (e *Encoder) checkForms() *EncodeError {
	switch {
	case e.BatchForm > FormMap:
		return problem("Encoder.BatchForm", "is %d, want FormArray or FormMap", e.BatchForm)
	case e.EventForm > FormMap:
		return problem("Encoder.EventForm", "is %d, want FormArray or FormMap", e.EventForm)
	case e.Producer > ProducerMooncake:
		return problem("Encoder.Producer", "is %d, want one of those declared", e.Producer)
	case e.Hashes > HashBytes:
		return problem("Encoder.Hashes", "is %d, want one of those declared", e.Hashes)
	case e.Fields != 0 && (e.Fields < minFields || e.Fields > maxFields):
		return problem("Encoder.Fields", "is %d, want 0 or %d to %d", e.Fields, minFields, maxFields)
	}
	return nil
}

func (e *Encoder) checkEvent(ev *Event, k int) *EncodeError {
	if ev.Kind < KindStored || ev.Kind > KindCleared {
		return problem("Kind", "is %d, want KindStored, KindRemoved or KindCleared", ev.Kind)
	}
	s := e.shapeOf(ev.Kind, k)
	for i := range eventFields {
		if f := &eventFields[i]; s&f.in == 0 && f.isSet(ev) {
			return problem(f.name, "%s has no such field", s)
		}
	}
	if p := ev.checkText(); p != nil {
		return p
	}
	switch {
	case tooLong(len(ev.BlockHashes)):
		return problem("BlockHashes", tooManyElements, len(ev.BlockHashes))
	case ev.Origin > OriginReused:
		return problem("Origin", "is %d, want OriginUnknown, OriginNew or OriginReused", ev.Origin)
	case ev.rare().HasTime && !isTime(ev.rare().Time):
		return problem("Rare.Time", notTime, ev.rare().Time, float64(maxSeconds))
	case ev.Kind == KindRemoved && ev.rare().RemainingCopies != nil && len(ev.rare().RemainingCopies) != len(ev.BlockHashes):
		return problem("Rare.RemainingCopies", "has %d counts for %d hashes", len(ev.rare().RemainingCopies), len(ev.BlockHashes))
	case ev.Kind == KindStored:
		return ev.checkStore(s)
	}
	return nil
}

// checkStore checks what only stores have.
func (ev *Event) checkStore(s shape) *EncodeError {
	for _, raw := range [...]struct {
		name string
		list []byte
	}{{"Raw.ExtraKeys", ev.raw().ExtraKeys}, {"Raw.BlockMMInfos", ev.raw().BlockMMInfos}, {"Raw.MMKeys", ev.raw().MMKeys}} {
		if raw.list != nil && !isList(raw.list) {
			return problem(raw.name, "is not one MessagePack list, of at most %d arrays and maps inside one another", maxDepth-eventDepth)
		}
	}
	switch n := len(ev.Tokens); {
	case tooLong(n):
		return problem("Tokens", tooManyElements, n)
	case ev.OpaqueTokens && ev.Eagle:
		return problem("Eagle", "is set with OpaqueTokens, but opaque tokens are not in pairs")
	case ev.OpaqueTokens && n > 0:
		return problem("Tokens", "has %d tokens, want none where they are opaque", n)
	case ev.Eagle && n < 2:
		return problem("Tokens", "has %d tokens, want at least 2 for EAGLE", n)
	case s == storeAIBrix && n == 0 && ev.BlockSize != 0:
		return problem("BlockSize", "is %d, want 0 where there are no tokens: the first block's length tells it", ev.BlockSize)
	case s == storeAIBrix && n > 0 && (ev.BlockSize == 0 || uint64(ev.BlockSize) > uint64(n)):
		return problem("BlockSize", "is %d, want 1 to %d, the number of tokens: the first block's length tells it", ev.BlockSize, n)
	}
	return nil
}

// checkText checks that the strings are what decoding gives back.
func (ev *Event) checkText() *EncodeError {
	for _, text := range [...]struct{ name, s string }{
		{"Medium", ev.Medium}, {"LoRAName", ev.LoRAName}, {"SpecKind", ev.SpecKind}, {"CacheSalt", ev.CacheSalt},
		{"Rare.Locality", ev.rare().Locality}, {"Rare.Ownership", ev.rare().Ownership},
		{"Rare.SessionID", ev.rare().SessionID}, {"Rare.ModelName", ev.rare().ModelName},
	} {
		switch {
		case tooLong(len(text.s)):
			return problem(text.name, tooManyElements, len(text.s))
		case !utf8.ValidString(text.s):
			return problem(text.name, "is not UTF-8")
		}
	}
	return nil
}

// Formats of problems that several fields may have.
const (
	notTime         = "is %v, want at most %v seconds, of which more would be milliseconds"
	tooManyElements = "has %d elements, more than MessagePack can count"
)

// isTime reports whether a time decodes to itself.
func isTime(t float64) bool { return !math.IsNaN(t) && !math.IsInf(t, 0) && t <= maxSeconds }

// tooLong reports whether a list or string is longer than a header can say.
func tooLong(n int) bool { return uint64(n) > math.MaxUint32 }

// eventDepth is how many arrays and maps a field of an event stands in.
const eventDepth = 3

// isList reports whether p is one well-formed list, which an event may hold.
func isList(p []byte) bool {
	end, f := skip(p, 0, eventDepth)
	return f == 0 && end == len(p) && codes[p[0]].class == classArray
}
