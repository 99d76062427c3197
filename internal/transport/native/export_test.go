package native

// Accepted returns the number of accepted connections.
func (t *Transport) Accepted() int {
	t.connections.mu.Lock()
	defer t.connections.mu.Unlock()
	return t.connections.all
}
