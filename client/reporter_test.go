package client_test

import (
	"log/slog"
	"strings"
	"testing"

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"

	"github.com/kvcast/kvcast/client"
)

// TestReporterWithoutAServerDropsOutcomes reports to a port that nobody listens to.
func TestReporterWithoutAServerDropsOutcomes(t *testing.T) {
	c, err := client.New("127.0.0.1:1", grpc.WithTransportCredentials(insecure.NewCredentials()))
	if err != nil {
		t.Fatal(err)
	}
	var log strings.Builder
	r := c.NewReporter(slog.New(slog.NewTextHandler(&log, nil)))
	for range 10_003 {
		r.Report(client.Outcome{Worker: "w"})
	}
	r.Close()
	if !strings.Contains(log.String(), `msg="outcomes are not reported" dropped=10003`) {
		t.Errorf("got %q", log.String())
	}
}
