package query

import (
	"cmp"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"math"
	"os"
	"strconv"
	"strings"
	"unicode"

	kvcastv1 "github.com/kvcast/kvcast/proto/kvcast/v1"
)

// promptFlags are the flags that give a prompt.
type promptFlags struct {
	Tokens       string `xor:"prompt" placeholder:"IDS" help:"Token ids of the prompt, separated by commas; - reads them from standard input."`
	TokensFile   string `xor:"prompt" placeholder:"FILE" predictor:"file" help:"File of the prompt's token ids, a JSON array or separated by commas or white space; - reads standard input."`
	TokensHashes string `xor:"prompt" placeholder:"HASHES" help:"Tokens hashes of the prompt's blocks, decimal or 0x hexadecimal, separated by commas."`
	BlockHashes  string `xor:"prompt" placeholder:"HASHES" help:"The engine's block hashes of the prompt's blocks, in the same form."`
	LoRA         string `name:"lora" placeholder:"NAME" help:"LoRA adapter of the prompt; with token ids. Default: the base model."`
	Salt         string `placeholder:"SALT" help:"Cache salt of the prompt; with token ids. Default: none."`
	Eagle        bool   `help:"The workers are SGLang engines with EAGLE decoding; with token ids."`
	ExcludeLast  bool   `name:"exclude-last-token" help:"Match what an engine reuses, which computes the last token always; with token ids."`
	BlockSize    uint32 `placeholder:"N" help:"Tokens per block: only workers with this block size match. Default: the block size of each worker."`
}

// prompt returns the prompt of a request. Errors name the flag.
func (f *promptFlags) prompt(stdin io.Reader) (p *kvcastv1.Prompt, err error) {
	p = &kvcastv1.Prompt{LoraName: f.LoRA, CacheSalt: f.Salt, Eagle: f.Eagle, BlockSize: f.BlockSize, ExcludeLastToken: f.ExcludeLast}
	flag := "--tokens"
	switch {
	case f.TokensFile != "", f.Tokens == "-":
		if f.TokensFile != "" {
			flag = "--tokens-file"
		}
		var text string
		if text, err = readTokens(cmp.Or(f.TokensFile, f.Tokens), stdin); err == nil {
			p.TokenIds, err = parseTokens(text)
		}
	case f.Tokens != "":
		p.TokenIds, err = parseTokens(f.Tokens)
	case f.TokensHashes != "":
		flag = "--tokens-hashes"
		p.TokensHashes, err = parseNumbers[uint64](f.TokensHashes, 0, math.MaxUint64)
	case f.BlockHashes != "":
		flag = "--block-hashes"
		p.BlockHashes, err = parseNumbers[uint64](f.BlockHashes, 0, math.MaxUint64)
	default:
		return nil, errors.New("no prompt is given: want --tokens, --tokens-file, --tokens-hashes or --block-hashes")
	}
	if err != nil {
		return nil, fmt.Errorf("%s: %w", flag, err)
	}
	if hashes := len(p.GetTokenIds()) == 0; hashes && (f.LoRA != "" || f.Salt != "" || f.Eagle) {
		return nil, fmt.Errorf("%s: --lora, --salt and --eagle are not allowed: hashes already depend on them", flag)
	} else if hashes && f.ExcludeLast {
		return nil, fmt.Errorf("%s: --exclude-last-token is not allowed: leave out the blocks that the last token is in", flag)
	}
	return p, nil
}

// readTokens returns the text of a file, or of standard input for "-".
func readTokens(file string, stdin io.Reader) (string, error) {
	if file != "-" {
		text, err := os.ReadFile(file)
		return string(text), err
	}
	text, err := io.ReadAll(stdin)
	if err != nil {
		err = fmt.Errorf("read standard input: %w", err)
	}
	return string(text), err
}

// parseTokens parses a JSON array of token ids, or token ids with separators.
func parseTokens(text string) (ids []uint32, err error) {
	if strings.HasPrefix(strings.TrimSpace(text), "[") {
		if err := json.Unmarshal([]byte(text), &ids); err != nil {
			return nil, fmt.Errorf("the JSON is not allowed: want an array of token ids, 0 to %d: %w", uint32(math.MaxUint32), err)
		}
		if len(ids) == 0 {
			return nil, errors.New("the array is empty: want at least one token id")
		}
		return ids, nil
	}
	return parseNumbers[uint32](text, 10, math.MaxUint32)
}

// parseNumbers parses at least one number, separated by commas or white space. With base 0, numbers may have the prefix 0x.
func parseNumbers[T uint32 | uint64](text string, base int, largest T) (all []T, err error) {
	words := strings.FieldsFunc(text, func(r rune) bool { return r == ',' || unicode.IsSpace(r) })
	if len(words) == 0 {
		return nil, fmt.Errorf("no number is given: want numbers of 0 to %d, separated by commas", largest)
	}
	for _, word := range words {
		n, err := strconv.ParseUint(word, base, 64)
		if err != nil || n > uint64(largest) {
			return nil, fmt.Errorf("%.64q is not allowed: want a number of 0 to %d", word, largest)
		}
		all = append(all, T(n))
	}
	return all, nil
}
