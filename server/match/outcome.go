package match

import (
	"fmt"

	kvcastv1 "github.com/kvcast/kvcast/proto/kvcast/v1"
)

// Limits of outcomes.
const (
	MaxOutcomes      = 1_000 // of a request
	maxOutcomeTokens = 1 << 40
)

// CheckOutcomes returns the invalid fields of outcomes.
func CheckOutcomes(all []*kvcastv1.Outcome) (violations []*Violation) {
	violate := func(field, format string, args ...any) {
		violations = append(violations, &Violation{Field: field, Description: fmt.Sprintf(format, args...)})
	}
	if len(all) > MaxOutcomes {
		violate("outcomes", "more than %d outcomes are not allowed", MaxOutcomes)
		return violations
	}
	for i, o := range all {
		invalid := func(field, format string, args ...any) {
			violate(fmt.Sprintf("outcomes[%d].%s", i, field), format, args...)
		}
		if o.GetWorker() == "" {
			invalid("worker", "is missing: want a worker's name")
		}
		if o.GetPosition() == nil {
			invalid("position", "is missing: want the position of the prediction")
		}
		if n := o.GetPredictedTokens(); n > maxOutcomeTokens {
			invalid("predicted_tokens", "%d is not allowed: want at most 2^40", n)
		}
		if n := o.GetCachedTokens(); n > maxOutcomeTokens {
			invalid("cached_tokens", "%d is not allowed: want at most 2^40", n)
		}
		if _, ok := kvcastv1.Trust_name[int32(o.GetTrust())]; !ok {
			invalid("trust", "%d is not known: want a value of Trust", o.GetTrust())
		}
	}
	return violations
}
