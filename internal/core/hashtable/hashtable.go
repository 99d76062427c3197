// Package hashtable has hash tables for millions of entries in which no insertion takes long:
// Table maps 64-bit keys to values, and Index finds records that are stored elsewhere.
//
// Both have a directory of entries, which are 32 bits of a hash and the number of a record. It is an extendible hash table: segments of 128
// entries, in buckets that are a cache line each. A full segment splits in two, which moves half of its entries, and reads no record. On
// average, an entry takes 14 bytes. The records of a Table are slots in the order of their insertion, except that a new key takes the place of a
// deleted one, or the last slot does if there are many. A new key thus changes one cache line at a random address. The garbage collector does not scan segments, nor slots whose
// values have no pointers.
//
// A lookup reads the directory, then the bucket, then the slot. Prefetch makes the cache misses of several lookups overlap.
//
// Hashes depend on a random seed of the process, since engines choose block hashes, some counting from 1, and users choose prompts.
package hashtable

import "math/rand/v2"

var seed = rand.Uint64()

// Hash returns the hash of a key, never 0: splitmix64 of the key and the process's seed.
// Distinct keys have distinct hashes, except for one pair of keys that depends on the seed.
func Hash(key uint64) uint64 {
	x := key ^ seed
	x = (x ^ x>>30) * 0xbf58476d1ce4e5b9
	x = (x ^ x>>27) * 0x94d049bb133111eb
	if x ^= x >> 31; x == 0 {
		return 1
	}
	return x
}

func unhash(x uint64) uint64 {
	x = (x ^ x>>31 ^ x>>62) * 0x319642b2d24d8ec3
	x = (x ^ x>>27 ^ x>>54) * 0x96de1b173f119089
	return x ^ x>>30 ^ x>>60 ^ seed
}
