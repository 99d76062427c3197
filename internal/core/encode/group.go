package encode

import kvcastv1 "github.com/kvcast/kvcast/proto/kvcast/v1"

// GroupBlocks reads an encoded GroupStored, or GroupRemoved: both have the same fields. It appends the hashes of the blocks.
func GroupBlocks(b []byte, hashes []uint64) (group uint64, all []uint64, err error) {
	var f Field
	for len(b) > 0 {
		rest, err := f.Next(b)
		if err == nil {
			switch f.Number {
			case kvcastv1.GroupStoredGroupField:
				group = f.Value
			case kvcastv1.GroupStoredBlockHashesField:
				hashes, err = f.AppendFixed64s(hashes)
			default: // a field of a later version
			}
		}
		if err != nil {
			return 0, hashes, err
		}
		b = rest
	}
	return group, hashes, nil
}
