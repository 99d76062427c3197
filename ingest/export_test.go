package ingest

// HeldBytes returns how many bytes of live batches are held back.
func HeldBytes(in *Ingest) int64 { return in.shared.budget.used.Load() }
