package cli

import "testing"

func TestShellWord(t *testing.T) {
	for word, want := range map[string]string{
		"vllm-0": "vllm-0", "Qwen/Qwen3-0.6B": "Qwen/Qwen3-0.6B", "": "''", "a b": "'a b'", "it's": `'it'\''s'`, "$(x)": "'$(x)'", "é": "'é'",
	} {
		if got := ShellWord(word); got != want {
			t.Errorf("%q: got %s, want %s", word, got, want)
		}
	}
}
