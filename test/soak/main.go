package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"math"
	"os"
	"os/signal"
	"syscall"
	"time"
)

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	err := run(ctx, os.Args[1:], os.Stdout)
	stop()
	if err != nil {
		fmt.Fprintln(os.Stderr, "soak:", err)
		os.Exit(1)
	}
}

// config configures a soak. All fields but transport are required.
type config struct {
	// total is the duration of the soak, including checks. every is the interval of the checks.
	total, every time.Duration
	engines      int
	rate         float64 // batches per second of each engine
	seed         uint64
	race         bool
	transport    string // --ingest-listen-transport and --ingest-connect-transport; empty for the defaults
	// waitTimeout bounds each wait of a check.
	waitTimeout time.Duration
}

// run runs a soak as configured by its arguments. It returns an error if a check failed, or if the
// soak could not run.
func run(ctx context.Context, args []string, out io.Writer) error {
	flags := flag.NewFlagSet("soak", flag.ContinueOnError)
	flags.SetOutput(out)
	c := config{waitTimeout: 3 * time.Minute}
	minutes := flags.Float64("minutes", 10, "duration in minutes")
	flags.DurationVar(&c.every, "every", time.Minute, "time between checks")
	flags.IntVar(&c.engines, "engines", 50, "number of simulated engines, 10 or more")
	flags.Float64Var(&c.rate, "rate", 10, "batches per second of each engine")
	flags.Uint64Var(&c.seed, "seed", uint64(time.Now().UnixNano()), "seed of workloads and faults; by default the current time")
	flags.BoolVar(&c.race, "race", false, "build the server with the race detector")
	flags.StringVar(&c.transport, "transport", "", "ZeroMQ implementation: native or libzmq; by default the server's defaults")
	if err := flags.Parse(args); err != nil {
		if errors.Is(err, flag.ErrHelp) {
			return nil
		}
		return err
	}
	if !(*minutes > 0) || *minutes > math.MaxInt32 || c.every <= 0 || c.engines < 10 || !(c.rate > 0) || flags.NArg() > 0 {
		return errors.New("minutes, every and rate must be above 0, engines 10 or more, and there are no further arguments")
	}
	c.total = time.Duration(*minutes * float64(time.Minute))
	return soak(ctx, c, out)
}
