package wire

// Error is why a batch was rejected whole. Its values are the sentinels below,
// to be compared with errors.Is.
type Error uint8

// The reasons to reject a batch.
const (
	// ErrTruncated is a value that runs past the end of the payload.
	ErrTruncated Error = iota + 1
	// ErrBadBatchShape is a payload that is no batch.
	ErrBadBatchShape
	// ErrBadTS is a batch time that is no finite number.
	ErrBadTS
	// ErrTrailingBytes is a payload that goes on after the batch.
	ErrTrailingBytes
	// ErrBadCode is 0xc1, which MessagePack never uses.
	ErrBadCode
	// ErrOversize is a length prefix larger than the whole payload.
	ErrOversize
	// ErrDepth is nesting beyond 16 arrays and maps.
	ErrDepth

	numErrors = iota + 1
)

var errorNames = [numErrors]string{
	ErrTruncated:     "truncated",
	ErrBadBatchShape: "bad_batch_shape",
	ErrBadTS:         "bad_ts",
	ErrTrailingBytes: "trailing_bytes",
	ErrBadCode:       "bad_code",
	ErrOversize:      "oversize",
	ErrDepth:         "depth",
}

// Errors lists all reasons to reject a batch.
func Errors() []Error {
	all := make([]Error, 0, numErrors-1)
	for e := ErrTruncated; e < numErrors; e++ {
		all = append(all, e)
	}
	return all
}

// Name returns the error's name, as metrics label it.
func (e Error) Name() string {
	if e == 0 || e >= numErrors {
		return "unknown"
	}
	return errorNames[e]
}

// Error returns what went wrong.
func (e Error) Error() string { return "decode batch: " + e.Name() }

// fault is what a reader found wrong: nothing (0), an Error, or the Reason to
// leave out one event. One byte for all three keeps the readers' returns in
// registers.
type fault uint8

const reasonFault fault = 0x80

const (
	truncated     = fault(ErrTruncated)
	badBatchShape = fault(ErrBadBatchShape)
	badTS         = fault(ErrBadTS)
	trailingBytes = fault(ErrTrailingBytes)
	badCode       = fault(ErrBadCode)
	oversize      = fault(ErrOversize)
	tooDeep       = fault(ErrDepth)

	unknownTag    = reasonFault | fault(ReasonUnknownTag)
	badEventShape = reasonFault | fault(ReasonBadEventShape)
	badTag        = reasonFault | fault(ReasonBadTag)
	missingField  = reasonFault | fault(ReasonMissingField)
	badType       = reasonFault | fault(ReasonBadType)
	badUTF8       = reasonFault | fault(ReasonBadUTF8)
)

// rejects tells whether the fault is one of the whole batch.
func (f fault) rejects() bool { return f != 0 && f < reasonFault }

// reason returns the Reason of a fault that does not reject the batch.
func (f fault) reason() Reason { return Reason(f &^ reasonFault) }
