package pipeline

// Aliases returns the blocks of a worker with several sources that one of the block hashes names for one of the sources:
// by the block hash that events have, the names of the sources that hold the block. It returns nil for a worker with one
// source.
func (p *Pipeline) Aliases(worker string, rank uint32, hashes []uint64) map[uint64][]string {
	p.mu.Lock()
	l := p.lanes[worker]
	p.mu.Unlock()
	if l == nil {
		return nil
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	tr := l.tracker(rank)
	if tr == nil {
		return nil
	}
	names := make(map[uint64][]string)
	for hash, sources := range tr.Lookup(hashes...) {
		names[hash] = []string{}
		for _, source := range sources {
			names[hash] = append(names[hash], l.sourceNames[source])
		}
	}
	return names
}
