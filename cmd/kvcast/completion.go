package main

import (
	"fmt"
	"os"
	"strconv"
	"strings"

	"github.com/alecthomas/kong"
	kongcompletion "github.com/jotaen/kong-completion"
	posener "github.com/posener/complete"

	"github.com/kvcast/kvcast/cmd/kvcast/internal/cli"
)

type completionCmd struct {
	Shell string `arg:"" enum:"bash,zsh,fish" help:"The shell: bash, zsh or fish."`
}

// Help implements kong.HelpProvider.
func (*completionCmd) Help() string {
	return `Load it in the current shell, or in the shell's start-up file:

  source <(kvcast completion bash)
  source <(kvcast completion zsh)
  kvcast completion fish | source
`
}

// completionScripts make a shell call kvcast with the command line in COMP_LINE.
var completionScripts = map[string]string{
	"bash": "complete -C BINARY kvcast\n",
	"zsh":  "autoload -U +X bashcompinit && bashcompinit\ncomplete -C BINARY kvcast\n",
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
		quoted = strconv.Quote(quoted) // a shell parses it again
	}
	_, err = fmt.Fprint(p.Out, strings.ReplaceAll(completionScripts[c.Shell], "BINARY", quoted))
	return err
}

// complete prints the possible continuations of the command line in COMP_LINE.
func complete(parser *kong.Kong) (err error) {
	kongcompletion.Register(parser,
		kongcompletion.WithPredictors(map[string]posener.Predictor{
			"file": posener.PredictFiles("*"),
		}),
		kongcompletion.WithExitFunc(func(int) {}),
		kongcompletion.WithErrorHandler(func(failure error) { err = failure }))
	return err
}
