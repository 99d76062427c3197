package main

import (
	"cmp"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"

	"github.com/alecthomas/kong"

	"github.com/kvcast/kvcast/cmd/kvcast/internal/cli"
)

type completionCmd struct {
	Shell string `arg:"" enum:"bash,zsh,fish" help:"The shell: bash, zsh or fish."`
}

func (*completionCmd) Help() string {
	return `Load it in the current shell, or in the shell's start-up file:

  source <(kvcast completion bash)
  source <(kvcast completion zsh)
  kvcast completion fish | source
`
}

// completionScripts make a shell call kvcast with the command line in COMP_LINE. Where kvcast offers nothing, bash and zsh offer files.
var completionScripts = map[string]string{
	"bash": "complete -o default -C BINARY kvcast\n",
	"zsh":  "autoload -U +X bashcompinit && bashcompinit\ncomplete -o default -C BINARY kvcast\n",
	"fish": "function __complete_kvcast\n    set -lx COMP_LINE (commandline -cp)\n    test -z (commandline -ct)\n    and set COMP_LINE \"$COMP_LINE \"\n    BINARY\nend\ncomplete -f -c kvcast -a '(__complete_kvcast)'\n",
}

// Run prints the script.
func (c *completionCmd) Run(p cli.Process) error {
	binary, err := os.Executable()
	if err != nil {
		return fmt.Errorf("find kvcast: %w", err)
	}
	quoted := cli.ShellWord(binary)
	if c.Shell != "fish" {
		quoted = cli.ShellWord(quoted) // a shell parses it again
	}
	_, err = fmt.Fprint(p.Out, strings.ReplaceAll(completionScripts[c.Shell], "BINARY", quoted))
	return err
}

// complete prints the possible continuations of a command line, one a line. Args are those of bash: the program, the part of the last word
// that it replaces, which begins after a = or :, and the word before. Other shells give none, and replace the whole word.
func complete(p cli.Process, root *kong.Node, line string, args []string) error {
	shell := p.Getenv("COMP_POINT") // where the cursor is: bash and zsh set it
	if point, err := strconv.Atoi(shell); err == nil && point >= 0 {
		runes := []rune(line)
		line = string(runes[:min(point, len(runes))])
	}
	words := shellWords(line)
	last := words[len(words)-1]
	keep := 0 // the beginning of the last word that the shell does not replace
	if len(args) == 3 && strings.HasSuffix(last, args[1]) {
		keep = len(last) - len(args[1])
	}
	for _, c := range candidates(root, words[:len(words)-1], last, shell == "") {
		if strings.HasPrefix(c, last) {
			if _, err := fmt.Fprintln(p.Out, c[keep:]); err != nil {
				return err
			}
		}
	}
	return nil
}

// shellWords returns the words of a command line without their quotes and backslashes. The last is the one that is being written: it may be
// empty, and a quote in it open.
func shellWords(line string) []string {
	words, begun := []string{""}, false
	var quote rune
	escaped := false
	for _, r := range line {
		last := &words[len(words)-1]
		switch {
		case escaped:
			escaped = false
			*last += string(r)
		case r == '\\' && quote != '\'':
			escaped, begun = true, true
		case r == quote:
			quote = 0
		case quote == 0 && (r == '"' || r == '\''):
			quote, begun = r, true
		case quote == 0 && (r == ' ' || r == '\t' || r == '\n'):
			if begun {
				words, begun = append(words, ""), false
			}
		default:
			begun = true
			*last += string(r)
		}
	}
	return words
}

// candidates returns what may follow the words of a command line, the first of which is the program. Files are among them if asked for.
func candidates(node *kong.Node, words []string, last string, files bool) []string {
	var flag *kong.Flag // whose value is next
	positional := 0
	for _, word := range words[min(1, len(words)):] {
		switch next := childNamed(node, word); {
		case flag != nil:
			flag = nil
		case strings.HasPrefix(word, "-"):
			if flag = flagNamed(node, word); flag != nil && flag.IsBool() {
				flag = nil
			}
		case next != nil:
			node, positional = next, 0
		default:
			positional++
		}
	}
	switch {
	case flag != nil:
		return valuesOf(flag.Value, last, files)
	case strings.HasPrefix(last, "--") && strings.Contains(last, "="):
		name, value, _ := strings.Cut(last, "=")
		flag := flagNamed(node, name)
		if flag == nil {
			return nil
		}
		var words []string
		for _, v := range valuesOf(flag.Value, value, files) {
			words = append(words, name+"="+v)
		}
		return words
	case strings.HasPrefix(last, "-"):
		return flagNames(node)
	case positional < len(node.Positional):
		return valuesOf(node.Positional[positional], last, files)
	case positional > 0: // there is no such command, or no further argument
		return nil
	}
	var names []string
	for _, child := range node.Children {
		if !child.Hidden {
			names = append(names, child.Name)
		}
	}
	return names
}

func childNamed(node *kong.Node, name string) *kong.Node {
	for _, child := range node.Children {
		if child.Name == name {
			return child
		}
	}
	return nil
}

// flagNamed returns the flag --NAME or -N of a command or the program; nil if there is none, or if the word has its value.
func flagNamed(node *kong.Node, word string) *kong.Flag {
	for _, group := range node.AllFlags(true) {
		for _, f := range group {
			if word == "--"+f.Name || f.Short != 0 && word == "-"+string(f.Short) {
				return f
			}
		}
	}
	return nil
}

func flagNames(node *kong.Node) (names []string) {
	for _, group := range node.AllFlags(true) {
		for _, f := range group {
			names = append(names, "--"+f.Name)
		}
	}
	return names
}

// valuesOf returns the values of an enumeration, or, if asked for, the files in the directory of a path.
func valuesOf(v *kong.Value, path string, files bool) (all []string) {
	if v.Enum != "" {
		return v.EnumSlice()
	}
	if !files || v.Tag == nil || !v.Tag.Has("predictor") {
		return nil
	}
	dir, _ := filepath.Split(path)
	entries, err := os.ReadDir(cmp.Or(dir, "."))
	if err != nil {
		return nil // there is nothing to offer
	}
	for _, e := range entries {
		name := dir + e.Name()
		if e.IsDir() {
			name += "/"
		}
		all = append(all, name)
	}
	return all
}
