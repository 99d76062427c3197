package expected

// Size returns the number of elements that the Set has for notes.
func (s *Set[K]) Size() int { return len(s.byFirst) + len(s.ranks) + len(s.due) + len(s.callers) }
