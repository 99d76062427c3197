package conformance_test

import (
	"os"
	"regexp"
	"testing"
)

// TestReasonsOfClients compares the reasons of errors that clients know with the table of the contract.
func TestReasonsOfClients(t *testing.T) {
	t.Parallel()
	read := func(file string) string {
		t.Helper()
		text, err := os.ReadFile("../../" + file)
		if err != nil {
			t.Fatal(err)
		}
		return string(text)
	}
	rows := regexp.MustCompile(`(?m)^//   [A-Z_]+ +([A-Z_]+)  `).FindAllStringSubmatch(read("proto/kvcast/v1/router_event_service.proto"), -1)
	if len(rows) < 20 {
		t.Fatalf("got %d rows of the table, want at least 20", len(rows))
	}
	for _, file := range []string{
		"client/errors.go", "clients/python/src/kvcast/errors.py", "clients/rust/src/error.rs", "clients/typescript/src/errors.ts",
	} {
		text := read(file)
		for _, row := range rows {
			if !regexp.MustCompile(`"` + row[1] + `"`).MatchString(text) {
				t.Errorf("%s: the reason %s is missing", file, row[1])
			}
		}
	}
}
