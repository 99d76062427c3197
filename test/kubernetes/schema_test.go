package kubernetes_test

import (
	"encoding/json"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/kvcast/kvcast/test/kubernetes"
)

// definitionRef is the start of a reference to a definition of an OpenAPI document.
const definitionRef = "#/definitions/"

// writeSchemas writes a JSON schema for each kind of an API server, from its own OpenAPI document, and returns kubeconform's
// location of them. The schemas allow no unknown fields.
func writeSchemas(t *testing.T, s *kubernetes.APIServer) string {
	t.Helper()
	var document struct{ Definitions map[string]any }
	if err := json.Unmarshal([]byte(run(t, s, "kubectl", "get", "--raw", "/openapi/v2")), &document); err != nil {
		t.Fatal(err)
	}
	for _, d := range document.Definitions {
		makeStrict(d)
	}
	dir := t.TempDir()
	for name, d := range document.Definitions {
		var kinds struct {
			Of []struct{ Group, Version, Kind string } `json:"x-kubernetes-group-version-kind"`
		}
		text, err := json.Marshal(d)
		if err == nil {
			err = json.Unmarshal(text, &kinds)
		}
		if err != nil {
			t.Fatal(err)
		}
		if len(kinds.Of) != 1 { // options and status, which every API group has
			continue
		}
		kind := kinds.Of[0]
		group, _, _ := strings.Cut(kind.Group, ".")
		if group != "" {
			group = "-" + group
		}
		needed := make(map[string]any)
		reach(document.Definitions, d, needed)
		needed[name] = d
		schema, err := json.Marshal(map[string]any{"$ref": definitionRef + name, "definitions": needed})
		if err != nil {
			t.Fatal(err)
		}
		file := filepath.Join(dir, strings.ToLower(kind.Kind+group+"-"+kind.Version)+".json")
		if err := os.WriteFile(file, schema, 0o600); err != nil {
			t.Fatal(err)
		}
	}
	return filepath.Join(dir, "{{.ResourceKind}}{{.KindSuffix}}.json")
}

// makeStrict changes a part of a schema: objects with properties have no others, and an int-or-string is either.
func makeStrict(part any) {
	switch part := part.(type) {
	case []any:
		for _, p := range part {
			makeStrict(p)
		}
	case map[string]any:
		for _, p := range part {
			makeStrict(p)
		}
		if part["format"] == "int-or-string" {
			delete(part, "format")
			part["type"] = []string{"integer", "string"}
		}
		if _, isProperties := part["properties"].(map[string]any); isProperties && part["additionalProperties"] == nil {
			part["additionalProperties"] = false
		}
	}
}

// reach adds the definitions that a part of a schema refers to.
func reach(all map[string]any, part any, needed map[string]any) {
	switch part := part.(type) {
	case []any:
		for _, p := range part {
			reach(all, p, needed)
		}
	case map[string]any:
		for _, p := range part {
			reach(all, p, needed)
		}
		ref, _ := part["$ref"].(string)
		name, isRef := strings.CutPrefix(ref, definitionRef)
		if _, isKnown := needed[name]; isRef && !isKnown {
			needed[name] = all[name]
			reach(all, all[name], needed)
		}
	}
}
