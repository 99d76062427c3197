package wire

// HashTokensPortable is the path that big-endian machines take.
var HashTokensPortable = hashTokensPortable
