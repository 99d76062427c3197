// Package peer has the messages of other projects' gRPC protocols. buf generates them from the .proto files in the folders here.
package peer

import (
	"fmt"

	"google.golang.org/protobuf/proto"

	"github.com/kvcast/kvcast/internal/core/encode"
)

// CheckTypes returns an error if a message was decoded from one with a known field of another type. Generated code treats such a field
// as unknown, so that another schema would not be noticed.
func CheckTypes(m proto.Message) error {
	message := m.ProtoReflect()
	for rest := []byte(message.GetUnknown()); len(rest) > 0; {
		var f encode.Field
		var err error
		if rest, err = f.Next(rest); err != nil {
			return err
		}
		if known := message.Descriptor().Fields().ByNumber(f.Number); known != nil {
			return fmt.Errorf("%s has the wrong type: want %s", known.Name(), known.Kind())
		}
	}
	return nil
}
