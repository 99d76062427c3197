package objects

// LMCacheOf is LMCache with other limits.
func LMCacheOf(page, bytes, most int) Server { return lmcache{page, bytes, most} }
