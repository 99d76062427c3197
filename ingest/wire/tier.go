package wire

// maxMedium is the length of the longest medium that has a tier.
const maxMedium = len("SHARED_STORAGE")

// TierOf returns the tier that engines call so, in any case, and whether there
// is one.
func TierOf(medium string) (Tier, bool) {
	if medium == "" || medium == "GPU" {
		return TierDevice, true
	}
	if len(medium) > maxMedium {
		return 0, false
	}
	var upper [maxMedium]byte
	for i := range len(medium) {
		c := medium[i]
		if 'a' <= c && c <= 'z' {
			c -= 'a' - 'A'
		}
		upper[i] = c
	}
	switch string(upper[:len(medium)]) {
	case "GPU", "DEVICE":
		return TierDevice, true
	case "CPU", "CPU_PINNED", "CPU_TIER1":
		return TierHostPinned, true
	case "CPU_TIER2", "DISK", "NVME", "STORAGE", "FS", "OBJ":
		return TierDisk, true
	case "EXTERNAL", "NETWORK", "REMOTE", "SHARED", "SHARED_STORAGE":
		return TierExternal, true
	default:
		return 0, false
	}
}
