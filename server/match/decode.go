package match

import (
	"errors"

	"google.golang.org/protobuf/encoding/protowire"
	"google.golang.org/protobuf/proto"

	"github.com/kvcast/kvcast/internal/core/encode"
	"github.com/kvcast/kvcast/internal/core/index"
	kvcastv1 "github.com/kvcast/kvcast/proto/kvcast/v1"
)

// lists are the elements of all prompts of a query, and its names.
type lists struct {
	tokenIDs     []uint32
	tokensHashes []uint64
	blockHashes  []uint64
	ends         []ends
	names        []string
	model        string // of the last request that has one; usually that of the next
}

// ends are the ends of a prompt's elements in lists. They begin at the ends of the prompt before.
type ends struct{ tokenIDs, tokensHashes, blockHashes int }

// Decode sets the query to that of an encoded MatchPrefixesRequest, and returns the request's id. It reads what the
// generated code reads, into reused memory. The query does not reference b.
func (q *Query) Decode(b []byte) (id uint64, err error) {
	q.reset()
	err = eachField(b, func(f *encode.Field) error {
		switch {
		case f.IsVarint(kvcastv1.MatchPrefixesRequestIDField):
			id = f.Value
		case f.IsBytes(kvcastv1.MatchPrefixesRequestRequestField):
			q.requested = true
			return eachField(f.Bytes, q.decodeField)
		case f.IsBytes(kvcastv1.MatchPrefixesRequestOutcomesField) && len(q.Outcomes) <= MaxOutcomes:
			o := new(kvcastv1.Outcome)
			q.Outcomes = append(q.Outcomes, o)
			return proto.Unmarshal(f.Bytes, o)
		case f.IsBytes(kvcastv1.MatchPrefixesRequestRoutedField) && len(q.Routed) <= MaxRouted:
			r := new(kvcastv1.RoutedPrompt)
			q.Routed = append(q.Routed, r)
			return proto.Unmarshal(f.Bytes, r)
		}
		return nil
	})
	if err != nil {
		return 0, err
	}
	var start ends
	for i, end := range q.lists.ends { // the lists do not move any more
		p := &q.Prompts[i]
		p.TokenIDs = q.lists.tokenIDs[start.tokenIDs:end.tokenIDs]
		p.TokensHashes = q.lists.tokensHashes[start.tokensHashes:end.tokensHashes]
		p.BlockHashes = q.lists.blockHashes[start.blockHashes:end.blockHashes]
		start = end
	}
	q.finish(q.lists.names)
	return id, nil
}

// decodeField decodes a field of a MatchPrefixRequest.
func (q *Query) decodeField(f *encode.Field) (err error) {
	switch {
	case f.IsBytes(kvcastv1.MatchPrefixRequestModelField):
		err = f.SetString(&q.lists.model)
		q.Model = q.lists.model
	case f.IsBytes(kvcastv1.MatchPrefixRequestPromptsField):
		err = q.decodePrompt(f.Bytes)
	case f.IsBytes(kvcastv1.MatchPrefixRequestWorkersField):
		var name string
		err = f.SetString(&name)
		q.lists.names = append(q.lists.names, name)
	case f.IsVarint(kvcastv1.MatchPrefixRequestLimitField):
		q.Limit = int(uint32(f.Value))
	case f.IsBytes(kvcastv1.MatchPrefixRequestAfterField):
		if q.After == nil {
			q.After = new(kvcastv1.Position)
		}
		err = eachField(f.Bytes, func(f *encode.Field) error {
			switch {
			case f.IsBytes(kvcastv1.PositionEpochField):
				return f.SetString(&q.After.Epoch)
			case f.Number == kvcastv1.PositionSeqField && f.Type == protowire.Fixed64Type:
				q.After.Seq = f.Value
			}
			return nil
		})
	case f.IsVarint(kvcastv1.MatchPrefixRequestMaxBlockHashesField):
		q.BlockHashes = int(uint32(f.Value))
	case f.IsVarint(kvcastv1.MatchPrefixRequestMaxWaitNanoField):
		q.maxWaitNano = f.Value
	}
	return err
}

// decodePrompt decodes a Prompt. Of more prompts than are allowed, it keeps as many as Set does.
func (q *Query) decodePrompt(b []byte) error {
	var omitted index.Prompt
	p, before := &omitted, q.lists
	keep := len(q.Prompts) <= maxPrompts
	if keep {
		q.Prompts = append(q.Prompts, index.Prompt{})
		p = &q.Prompts[len(q.Prompts)-1]
	}
	if err := eachField(b, func(f *encode.Field) error { return q.lists.decodePrompt(p, f) }); err != nil {
		return err
	}
	if keep {
		q.lists.ends = append(q.lists.ends, ends{len(q.lists.tokenIDs), len(q.lists.tokensHashes), len(q.lists.blockHashes)})
	} else {
		q.lists = before
	}
	return nil
}

// LimitPrompts shortens an encoded MatchPrefixRequest that has more prompts than are allowed, before the generated code decodes
// it. What is left has so many that Check refuses it.
func LimitPrompts(b []byte) []byte {
	return limitElements(b, kvcastv1.MatchPrefixRequestPromptsField, maxPrompts)
}

// LimitOutcomes does the same for an encoded ReportOutcomeRequest and CheckOutcomes.
func LimitOutcomes(b []byte) []byte {
	return limitElements(b, kvcastv1.ReportOutcomeRequestOutcomesField, MaxOutcomes)
}

// LimitRouted does the same for an encoded NoteRoutedRequest and CheckRouted.
func LimitRouted(b []byte) []byte {
	return limitElements(b, kvcastv1.NoteRoutedRequestRoutedField, MaxRouted)
}

// limitElements shortens a message after the first element of a repeated field beyond the most that are allowed.
func limitElements(b []byte, field protowire.Number, most int) []byte {
	n := 0
	var f encode.Field
	for rest := b; len(rest) > 0; {
		next, err := f.Next(rest)
		if err != nil {
			return b
		}
		if f.Number == field {
			if n++; n > most {
				return b[:len(b)-len(next)]
			}
		}
		rest = next
	}
	return b
}

// decodePrompt decodes a field of a Prompt. The elements of its lists are appended to the lists of all prompts.
func (l *lists) decodePrompt(p *index.Prompt, f *encode.Field) (err error) {
	switch {
	case f.IsBytes(kvcastv1.PromptTokenIDsField), f.IsVarint(kvcastv1.PromptTokenIDsField):
		l.tokenIDs, err = f.AppendUint32s(l.tokenIDs)
	case f.Number == kvcastv1.PromptTokensHashesField:
		l.tokensHashes, err = f.AppendFixed64s(l.tokensHashes)
	case f.Number == kvcastv1.PromptBlockHashesField:
		l.blockHashes, err = f.AppendFixed64s(l.blockHashes)
	case f.IsBytes(kvcastv1.PromptLoraNameField):
		err = f.SetString(&p.LoRA)
	case f.IsBytes(kvcastv1.PromptCacheSaltField):
		err = f.SetString(&p.Salt)
	case f.IsVarint(kvcastv1.PromptEagleField):
		p.Eagle = f.Value != 0
	case f.IsVarint(kvcastv1.PromptExcludeLastTokenField):
		p.ExcludeLastToken = f.Value != 0
	case f.IsVarint(kvcastv1.PromptBlockSizeField):
		p.BlockSize = uint32(f.Value)
	}
	return err
}

// eachField calls yield with each field of a message, until an error.
func eachField(b []byte, yield func(*encode.Field) error) error {
	var f encode.Field
	for len(b) > 0 {
		var err error
		switch b, err = f.Next(b); {
		case err != nil:
			return err
		case f.Number > protowire.MaxValidNumber:
			return errors.New("a field number is not valid")
		}
		if err := yield(&f); err != nil {
			return err
		}
	}
	return nil
}
