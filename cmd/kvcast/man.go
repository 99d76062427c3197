package main

import (
	"fmt"
	"strings"

	"github.com/alecthomas/kong"

	"github.com/kvcast/kvcast/cmd/kvcast/internal/cli"
)

type manCmd struct{}

func (manCmd) Help() string {
	return cli.Examples("kvcast man | man -l -", "kvcast man >/usr/local/share/man/man1/kvcast.1")
}

// Run prints the man page: the help of all commands, in the macros of man(7).
func (manCmd) Run(p cli.Process, line *kong.Context) error {
	var page strings.Builder
	root := line.Model.Node
	fmt.Fprintf(&page, ".TH KVCAST 1 \"\" \"kvcast %s\" \"User Commands\"\n", roffEscaper.Replace(cli.Version()))
	page.WriteString(".nh\n.ad l\n") // a flag must not be broken at its hyphens
	fmt.Fprintf(&page, ".SH NAME\nkvcast \\- %s\n", roffEscaper.Replace(strings.TrimPrefix(root.Help, "kvcast ")))
	page.WriteString(".SH SYNOPSIS\n.B kvcast\n.I COMMAND\n[flags]\n.SH DESCRIPTION\n")
	writeRoff(&page, root.Help)
	page.WriteString(".SH COMMANDS\n")
	for _, command := range root.Leaves(true) {
		fmt.Fprintf(&page, ".SS kvcast %s\n", roffEscaper.Replace(command.Summary()))
		writeRoff(&page, command.Help+"\n\n"+command.Detail)
		for _, argument := range command.Positional {
			writeTagged(&page, argument.Summary(), argument.Help)
		}
		for _, flag := range command.Flags {
			if !flag.Hidden {
				writeTagged(&page, flag.String(), kong.DefaultHelpValueFormatter(flag.Value))
			}
		}
	}
	page.WriteString(".SH EXIT STATUS\n")
	writeTagged(&page, "0", "Success.")
	writeTagged(&page, "1", "The command failed.")
	writeTagged(&page, "2", "The command line or the configuration has a mistake.")
	_, err := fmt.Fprint(p.Out, page.String())
	return err
}

// roffEscaper escapes text within a line. Hyphens become minus signs, which can be copied to a shell.
var roffEscaper = strings.NewReplacer(`\`, `\e`, "-", `\-`)

// writeTagged writes a flag, an argument or an exit status with its description.
func writeTagged(page *strings.Builder, tag, text string) {
	fmt.Fprintf(page, ".TP\n.B %s\n", roffEscaper.Replace(tag))
	writeRoff(page, text)
}

// writeRoff writes the paragraphs of a text. Lines that begin with a space are examples.
func writeRoff(page *strings.Builder, text string) {
	isExample := false
	for text := range strings.Lines(strings.TrimSpace(text) + "\n") {
		text = strings.TrimSuffix(text, "\n")
		switch indented := strings.HasPrefix(text, " "); {
		case text == "" && isExample:
			page.WriteString(".EE\n.RE\n.PP\n")
			isExample = false
			continue
		case text == "":
			page.WriteString(".PP\n")
			continue
		case indented && !isExample:
			page.WriteString(".RS\n.EX\n")
			isExample = true
		}
		fmt.Fprintf(page, "\\&%s\n", roffEscaper.Replace(strings.TrimSpace(text)))
	}
	if isExample {
		page.WriteString(".EE\n.RE\n")
	}
}
