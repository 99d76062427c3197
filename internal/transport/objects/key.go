package objects

import (
	"bytes"
	"regexp"
	"strconv"
	"strings"
)

// key is what an object's key says.
type key struct {
	// namespace is what keeps the objects of several models or deployments apart.
	namespace []byte
	// shard names the part of the block that the object is, with the attention group.
	shard []byte
	// group is the index of the attention group.
	group uint32
	// hash is the block's hash, as the engine's events have it.
	hash uint64
	// isPart reports whether the object is a part of attention, whatever the shard is named.
	isPart bool
}

const (
	// hashDigits is how many hexadecimal digits the hash in an event has.
	hashDigits = 16
	// maxDigits is how many the longest digest has: 64 bytes.
	maxDigits = 128
	// pageDigits is how many the hash of a page of SGLang has: SHA-256.
	pageDigits = 64
)

// parse parses the key of an object. ok is false if it has none of these forms:
//
//   - of vLLM's MooncakeStoreConnector (vLLM 0.32 and 0.33, mooncake/store/data.py), where HEX is the block's hash, of which events have the last 8 bytes:
//     [PREFIX@]MODEL[@store_tp:N@store_pp:N@store_format:NAME]@tp_rank:N@pcpN@dcpN@pp_rank:N@group:N@HEX
//   - of SGLang's HiCache (SGLang 0.5.23, mooncake_store.py), where HEX is SHA-256 of a page, of which events have the first 8 bytes. RANKS are such
//     as 0, 0_1 or dcp0_cp0, and may be empty; the keys of other components than attention have its name in their place:
//     [[TAG_]MODEL[_RANKS]_]HEX_RANKS_k, and the same with v
func parse(text []byte) (k key, ok bool) {
	if k, ok = parseVLLM(text); ok {
		return k, true
	}
	return parseSGLang(text)
}

var (
	vllmShard = []byte("@tp_rank:")
	vllmGroup = []byte("@group:")
)

func parseVLLM(text []byte) (k key, ok bool) {
	at := bytes.LastIndexByte(text, '@')
	if at < 0 {
		return k, false
	}
	before, digest := text[:at], text[at+1:]
	group := bytes.LastIndex(before, vllmGroup)
	shard := bytes.Index(before, vllmShard)
	if group < 0 || shard <= 0 || group < shard {
		return k, false
	}
	n, err := strconv.ParseUint(string(before[group+len(vllmGroup):]), 10, 32)
	if err != nil || len(digest) < hashDigits || len(digest) > maxDigits || len(digest)%2 != 0 || !isHex(digest) {
		return k, false
	}
	hash, err := strconv.ParseUint(string(digest[len(digest)-hashDigits:]), 16, 64)
	return key{namespace: before[:shard], shard: before[shard:], group: uint32(n), hash: hash}, err == nil
}

func parseSGLang(text []byte) (k key, ok bool) {
	for from := 0; len(text)-from >= pageDigits; {
		end := bytes.IndexByte(text[from:], '_')
		if end < 0 {
			return k, false
		}
		if word := text[from : from+end]; len(word) == pageDigits && isHex(word) {
			hash, err := strconv.ParseUint(string(word[:hashDigits]), 16, 64)
			return key{namespace: bytes.TrimSuffix(text[:from], []byte("_")), shard: text[from+end:], hash: hash}, err == nil
		}
		from += end + 1
	}
	return k, false
}

// isAttention reports whether an object is of attention, and its key has the forms of parse throughout.
func (k *key) isAttention() bool {
	return k.isPart || vllmPart.Match(k.shard) || pagePart.Match(k.shard)
}

var (
	vllmPart = regexp.MustCompile(`^@tp_rank:[0-9]+@pcp[0-9]+@dcp[0-9]+@pp_rank:[0-9]+@group:[0-9]+$`)
	pagePart = regexp.MustCompile(`^_((dcp|cp)?[0-9]+(_(dcp|cp)?[0-9]+)*)?_[kv]$`)
)

// isOf reports whether the namespace names a model: vLLM's ends with the last part of its path, but for the format of the store, and SGLang's has its
// whole path, with a hyphen for each slash, between a tag and the ranks. That of SGLang may be empty, and then names none.
func (k *key) isOf(model string) bool {
	if bytes.HasPrefix(k.shard, vllmShard) {
		namespace, _, _ := bytes.Cut(k.namespace, []byte("@store_tp:"))
		model = strings.TrimRight(model, "/")
		return string(namespace[bytes.LastIndexByte(namespace, '@')+1:]) == model[strings.LastIndexByte(model, '/')+1:]
	}
	return len(k.namespace) == 0 || strings.Contains("_"+string(k.namespace)+"_", "_"+strings.ReplaceAll(model, "/", "-")+"_")
}

// isHex reports whether a text has lower-case hexadecimal digits alone.
func isHex(text []byte) bool {
	for _, c := range text {
		if (c < '0' || c > '9') && (c < 'a' || c > 'f') {
			return false
		}
	}
	return true
}
