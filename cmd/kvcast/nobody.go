package main

import (
	"context"
	"fmt"
	"io"
	"strings"

	kvcastv1 "github.com/kvcast/kvcast/proto/kvcast/v1"
)

// maxNamed is how many workers are named to somebody who asked for another one.
const maxNamed = 8

// tellOfNobody tells where nobody is what was asked for, which may be meant, as
// workers come and go, and may be a slip. It is a hint: where the server does not
// answer, what comes next says why.
func (f *filterFlags) tellOfNobody(ctx context.Context, client kvcastv1.RouterEventServiceClient, stderr io.Writer) {
	if len(f.Worker)+len(f.Model) == 0 {
		return
	}
	asked, err := client.ListWorkers(ctx, &kvcastv1.ListWorkersRequest{Filter: &kvcastv1.Filter{Workers: f.Worker, Models: f.Model}})
	if err == nil && len(asked.GetWorkers()) == 0 {
		_ = f.nobody(ctx, client, stderr)
	}
}

// nobody tells that nobody is what was asked for, and who there is.
func (f *filterFlags) nobody(ctx context.Context, client kvcastv1.RouterEventServiceClient, out io.Writer) error {
	all, err := client.ListWorkers(ctx, &kvcastv1.ListWorkersRequest{})
	if err == nil {
		_, err = fmt.Fprintf(out, "no worker fits%s; %s\n", f.text(), named(all.GetWorkers()))
	}
	return err
}

// named tells which workers there are.
func named(workers []*kvcastv1.WorkerStatus) string {
	if len(workers) == 0 {
		return "there are none at all"
	}
	var names []string
	for _, w := range workers[:min(len(workers), maxNamed)] {
		names = append(names, fmt.Sprintf("%s (model %q)", visible(w.GetName()), w.GetModel()))
	}
	if more := len(workers) - len(names); more > 0 {
		names = append(names, fmt.Sprintf("%d more", more))
	}
	return "there are " + strings.Join(names, ", ")
}
