package main_test

import (
	"regexp"
	"strings"
	"testing"
)

// TestManPageHasEveryCommand compares the man page with the help of each command: the page has a section of the command, with all flags.
func TestManPageHasEveryCommand(t *testing.T) {
	page := kvcast(t, nil, "man")
	if page.status != 0 || !strings.HasPrefix(page.out, ".TH KVCAST 1 ") {
		t.Fatalf("got status %d and\n%s", page.status, page.out)
	}
	sections := make(map[string]string)
	for section := range strings.SplitSeq(strings.ReplaceAll(page.out, `\-`, "-"), "\n.S") {
		if title, text, ok := strings.Cut(section, "\n"); ok && strings.HasPrefix(title, "S kvcast ") {
			sections[strings.Fields(title)[2]] = text
		}
	}
	_, list, _ := strings.Cut(kvcast(t, nil, "--help").out, "\nCommands:\n")
	commands := regexp.MustCompile(`(?m)^  ([a-z]+) `).FindAllStringSubmatch(list, -1)
	if len(commands) < 10 || len(commands) != len(sections) {
		t.Errorf("got %d sections, want one for each of the %d commands", len(sections), len(commands))
	}
	for _, c := range commands {
		section, ok := sections[c[1]]
		if !ok {
			t.Errorf("kvcast %s has no section", c[1])
			continue
		}
		flags := regexp.MustCompile(`(?m)^  (?:-., |    )(--[a-z-]+)`).FindAllStringSubmatch(kvcast(t, nil, c[1], "--help").out, -1)
		if len(flags) == 0 {
			t.Errorf("kvcast %s --help has no flags", c[1])
		}
		for _, flag := range flags {
			if !regexp.MustCompile(`(?m)^\.B (-., )?`+flag[1]+`(=|$)`).MatchString(section) && flag[1] != "--help" {
				t.Errorf("the section of kvcast %s has no %s", c[1], flag[1])
			}
		}
	}
}
