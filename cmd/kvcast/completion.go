package main

import (
	"fmt"
	"os"
	"strconv"
	"strings"

	"github.com/alecthomas/kong"
	kongcompletion "github.com/jotaen/kong-completion"
	posener "github.com/posener/complete"
)

type completionCmd struct {
	Shell string `arg:"" enum:"bash,zsh,fish" help:"The shell: bash, zsh or fish."`
}

// Help tells where what is printed goes.
func (*completionCmd) Help() string {
	return `For this shell alone, or in its start-up file for all:

  source <(kvcast completion bash)
  source <(kvcast completion zsh)
  kvcast completion fish | source
`
}

// shells have kvcast itself asked for what may come next: it finds the line in
// COMP_LINE.
var shells = map[string]string{
	"bash": "complete -C BINARY kvcast\n",
	"zsh":  "autoload -U +X bashcompinit && bashcompinit\ncomplete -C BINARY kvcast\n",
	"fish": "function __complete_kvcast\n    set -lx COMP_LINE (commandline -cp)\n    test -z (commandline -ct)\n    and set COMP_LINE \"$COMP_LINE \"\n    BINARY\nend\ncomplete -f -c kvcast -a '(__complete_kvcast)'\n",
}

// Run prints the shell's commands.
func (c *completionCmd) Run(std stdio) error {
	binary, err := os.Executable()
	if err != nil {
		return fmt.Errorf("find kvcast: %w", err)
	}
	quoted := shellWord(binary)
	if c.Shell != "fish" {
		quoted = strconv.Quote(quoted) // complete has a shell read it again
	}
	_, err = fmt.Fprint(std.out, strings.ReplaceAll(shells[c.Shell], "BINARY", quoted))
	return err
}

// complete prints what may come next where a shell asks for it, and tells whether one
// did.
func complete(parser *kong.Kong) (asked bool, err error) {
	if os.Getenv("COMP_LINE") == "" {
		return false, nil
	}
	kongcompletion.Register(parser,
		kongcompletion.WithPredictors(map[string]posener.Predictor{
			"file": posener.PredictFiles("*"),
			"tier": posener.PredictSet("device", "host_pinned", "disk", "external"),
			"from": posener.PredictSet("snapshot", "earliest", "latest"),
		}),
		kongcompletion.WithExitFunc(func(int) {}),
		kongcompletion.WithErrorHandler(func(failed error) { err = failed }))
	return true, err
}
