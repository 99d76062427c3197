package hashtable

// Index finds records that are stored elsewhere, by a hash of their keys, in 11 to 13 bytes a
// record. Records are identified by numbers from 1. Several records may have the same hash.
// NewIndex makes an index. An index is not safe for concurrent use.
type Index struct {
	// table has, in place of each hash, the hash's high 32 bits and the record's number, so
	// that equal hashes of two records differ.
	table Table[struct{}, struct{}]
}

// NewIndex returns an empty index.
func NewIndex() Index { return Index{New[struct{}, struct{}]()} }

func indexEntry(hash uint64, record uint32) uint64 { return hash>>32<<32 | uint64(record) }

// Len returns the number of records.
func (x *Index) Len() int { return x.table.n }

// Find returns the record with a hash for which match returns true; 0 if there is none. match
// is called for a few other records too.
func (x *Index) Find(hash uint64, match func(record uint32) bool) uint32 {
	slots := x.table.dir[x.table.index(hash)].Slots
	for i := Home(hash, len(slots)); ; {
		entry := slots[i].hash
		if entry == 0 {
			return 0
		}
		if entry>>32 == hash>>32 && match(uint32(entry)) {
			return uint32(entry)
		}
		if i++; i == len(slots) {
			i = 0
		}
	}
}

// Add adds a record, which the index must not have.
func (x *Index) Add(hash uint64, record uint32) { x.table.put(indexEntry(hash, record)) }

// Remove removes a record, which the index must have with that hash.
func (x *Index) Remove(hash uint64, record uint32) {
	s := x.table.dir[x.table.index(hash)]
	i, _ := s.find(indexEntry(hash, record))
	x.table.Delete(s, i)
}
