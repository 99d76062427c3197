package kvblock

// HashCopied is the implementation for big-endian machines and multimodal blocks.
var HashCopied = hashCopied
