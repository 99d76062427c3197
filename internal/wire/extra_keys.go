package wire

import "bytes"

// extraKeys is what a store's extra keys say about the content of its blocks, beside their tokens and multimodal inputs.
type extraKeys struct {
	// salt is the cache salt, a view of the payload; nil if there is none.
	salt []byte
	// known is the number of the first blocks whose content is known: all, unless the keys of a block cannot be interpreted.
	known int
	// embeds reports whether the next block has the digest of prompt embeddings. Otherwise, its keys may be of any content.
	embeds bool
}

// saltPrefix marks a cache salt among extra keys.
const saltPrefix = "dynamo-cache-salt:"

// readExtraKeys reads the extra keys of a store: a list with an element for each block, which is nil or a list of keys.
//
//  1. The first string that equals the adapter's name is that name. vLLM before adapters had names sent the adapter's id.
//  2. A pair of a string and an integer, and a map of type mm or mm_key, is a multimodal input.
//  3. A string with saltPrefix, and a map of type cache_salt, is the cache salt.
//  4. Bytes are the digest of prompt embeddings, which take the place of tokens.
//  5. Another string in the first block of a prompt is the cache salt, if the store has no other: vLLM sends it so.
//  6. The content of a block with any other key is unknown.
func readExtraKeys(ev *Event) extraKeys {
	p, blocks := ev.raw().ExtraKeys, len(ev.BlockHashes)
	all := extraKeys{known: blocks}
	if p == nil || allNil(p) {
		return all
	}
	n, salt := 0, []byte(nil)
	bare := bareSaltFits(ev)
	for i := range elements(p, 0) {
		if n == blocks {
			break
		}
		keys := blockKeys{lora: ev.LoRAName, id: ev.LoRAID, hasID: ev.HasLoRAID, field: ev.CacheSalt, salt: salt, bareSalt: bare && n == 0}
		if known, embeds := keys.read(p, i); !known {
			return extraKeys{salt: keys.salt, known: n, embeds: embeds}
		}
		salt = keys.salt
		n++
	}
	all.salt = salt
	return all
}

// bareSaltFits reports whether the store's first block is the first of a prompt, in whose extra keys a bare string is a
// salt. A store with tokens of more blocks than it names may omit the first.
func bareSaltFits(ev *Event) bool {
	return ev.CacheSalt == "" && (!ev.HasParent || ev.Parent == 0) && !ev.sparse()
}

// sparse reports whether a store has tokens of more whole blocks than it names, so that it is unknown which it names.
func (ev *Event) sparse() bool {
	return ev.BlockSize > 0 && (len(ev.Tokens)-eagleOverlap(ev))/int(ev.BlockSize) > len(ev.BlockHashes)
}

// blockKeys reads the keys of one block.
type blockKeys struct {
	lora  string // until its name was read
	id    int64
	hasID bool
	field string // the store's field cache_salt
	salt  []byte
	// bareSalt reports whether a bare string may be the salt.
	bareSalt bool
}

// read reads the list of keys at i. known is false if a key cannot be interpreted, or is the digest of prompt embeddings.
// embeds reports whether it is the latter alone.
func (k *blockKeys) read(p []byte, i int) (known, embeds bool) {
	list, _ := readValue(p, i)
	if list.class == classNil {
		return true, false
	}
	known = list.class == classArray
	bare := []byte(nil)
	for i := range elements(p, i) {
		v, _ := readValue(p, i)
		switch v.class {
		case classNil:
		case classStr:
			known = k.readString(v.bytes, &bare) && known
		case classMap:
			understood, embedded := k.readMap(p, i)
			known, embeds = known && understood, embeds || embedded
		case classArray:
			known = known && isPair(p, v)
		case classBin:
			embeds = true
		case classUint, classInt:
			id, ok := v.int()
			known = known && ok && k.hasID && id == k.id
		default:
			known = false
		}
	}
	if known = known && (len(bare) == 0 || len(k.salt) == 0); known { // else the store has another salt
		k.setSalt(bare)
	}
	return known && !embeds, known && embeds
}

// readMap reads vLLM's typed keys: an input, a salt, the adapter's name or the digest of prompt embeddings.
func (k *blockKeys) readMap(p []byte, i int) (understood, embeds bool) {
	var kind, name, salt []byte
	for key, i := range members(p, i) {
		s, _, f := readText(p, i)
		switch {
		case f != 0:
		case string(key) == "type":
			kind = s
		case string(key) == "name":
			name = s
		case string(key) == "salt":
			salt = s
		}
	}
	switch string(kind) {
	case "mm", "mm_key":
		return true, false
	case "prompt_embeds":
		return true, true
	case "lora":
		understood = len(name) > 0 && string(name) == k.lora
		if understood {
			k.lora = "" // a string of this name is no adapter
		}
		return understood, false
	case "cache_salt":
		k.setSalt(bytes.TrimPrefix(salt, []byte(saltPrefix)))
		return salt != nil, false
	}
	return false, false
}

// readString reads a string among the keys, and reports whether it can be interpreted. bare is the bare string that was
// read before; empty for none.
func (k *blockKeys) readString(s []byte, bare *[]byte) bool {
	switch {
	case len(s) == 0, string(s) == k.field:
	case k.lora != "" && string(s) == k.lora:
		k.lora = ""
	case bytes.HasPrefix(s, []byte(saltPrefix)):
		k.setSalt(s[len(saltPrefix):])
	case !k.bareSalt || len(*bare) > 0:
		return false
	default:
		*bare = s
	}
	return true
}

// setSalt sets the salt unless there is one.
func (k *blockKeys) setSalt(salt []byte) {
	if len(k.salt) == 0 && len(salt) > 0 {
		k.salt = salt
	}
}

// isPair reports whether a key is a multimodal input: a list of an identifier and an offset.
func isPair(p []byte, v value) bool {
	if v.class != classArray || v.n != 2 {
		return false
	}
	_, end, f := readText(p, v.end)
	if f != 0 {
		return false
	}
	offset, _ := readValue(p, end)
	return offset.class == classUint || offset.class == classInt
}

// taggedInput reads {"type": "mm" or "mm_key", "hash" or "identifier": ...}, and returns where the identifier is.
func taggedInput(p []byte, i int) (identifier int, multimodal bool) {
	identifier = len(p)
	for name, i := range members(p, i) {
		switch string(name) {
		case "type":
			tag, _, f := readText(p, i)
			multimodal = f == 0 && (string(tag) == "mm" || string(tag) == "mm_key")
		case "hash", "identifier":
			identifier = i
		}
	}
	return identifier, multimodal
}

// allNil reports whether p is a list of nils only, which vLLM sends for plain text.
func allNil(p []byte) bool {
	_, _, i, f := readHeader(p, 0)
	if f != 0 {
		return false
	}
	for _, c := range p[i:] {
		if c != nilCode {
			return false
		}
	}
	return true
}
