package objects

// LMCacheOf is LMCache with other limits.
func LMCacheOf(page, most int) Server { return lmcache{page, most} }
