// Program follow keeps a view of all KV caches. It reads prompts, one JSON list of token
// ids per line, and prints the workers that hold the longest prefixes of each prompt.
package main

import (
	"bufio"
	"context"
	"encoding/json"
	"flag"
	"fmt"
	"io"
	"log/slog"
	"os"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"

	"github.com/kvcast/kvcast/client"
)

func main() {
	addr := flag.String("addr", "localhost:50051", "address of the kvcast server")
	model := flag.String("model", "", "model of the prompts; empty: all")
	flag.Parse()
	if err := run(context.Background(), *addr, *model, os.Stdin, os.Stdout); err != nil {
		fmt.Fprintln(os.Stderr, "follow:", err)
		os.Exit(1)
	}
}

func run(ctx context.Context, addr, model string, prompts io.Reader, out io.Writer) error {
	c, err := client.New(addr, grpc.WithTransportCredentials(insecure.NewCredentials()))
	if err != nil {
		return err
	}
	ctx, stop := context.WithCancel(ctx)
	defer stop()
	view, ended := client.NewView(), make(chan error, 2)
	go func() {
		// Subscribe logs interruptions and resumes. An error is permanent, such as a token
		// that the server does not accept. With Digests, the view is compared with the server's.
		ended <- view.Follow(c.Subscribe(ctx, client.Config{ClientID: "follow", Digests: true, Logger: slog.Default()}))
	}()
	go func() { ended <- answer(ctx, view, model, prompts, out) }()
	return <-ended
}

// answer prints the matches of each prompt.
func answer(ctx context.Context, view *client.View, model string, prompts io.Reader, out io.Writer) error {
	ready, cancel := context.WithTimeout(ctx, time.Minute)
	defer cancel()
	if err := view.WaitReady(ready); err != nil {
		return fmt.Errorf("wait for the first snapshot: %w", err)
	}
	lines := bufio.NewScanner(prompts)
	lines.Buffer(nil, 16<<20)
	for lines.Scan() {
		var tokens []uint32
		if err := json.Unmarshal(lines.Bytes(), &tokens); err != nil {
			return fmt.Errorf("read prompt: %w: want a JSON list of token ids", err)
		}
		matches := view.Match(client.Prompt{Model: model, Tokens: tokens})
		for _, m := range matches { // the longest prefix comes first
			_, _ = fmt.Fprintf(out, "%s (%s), dp rank %d: %d blocks, %d tokens\n", m.Worker, m.Endpoint, m.Rank, m.Blocks, m.Tokens)
		}
		if len(matches) == 0 {
			_, _ = fmt.Fprintln(out, "no worker has its first block")
		}
		if now := view.Status(); !now.Live {
			_, _ = fmt.Fprintln(out, "the server is disconnected; this is the state at", now.Position)
		}
	}
	return lines.Err()
}
