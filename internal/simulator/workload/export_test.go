package workload

// Running returns the number of running requests.
func (r *TraceRun) Running() int { return len(r.running) }
