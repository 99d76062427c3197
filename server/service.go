package server

import (
	"context"

	kvcastv1 "github.com/kvcast/kvcast/proto/kvcast/v1"
)

// routerEvents is kvcast.v1.RouterEventService.
type routerEvents struct {
	kvcastv1.UnimplementedRouterEventServiceServer
	*Server
}

// workers is kvcast.v1.WorkerService.
type workers struct {
	kvcastv1.UnimplementedWorkerServiceServer
	*Server
}

// RegisterWorker implements kvcastv1.WorkerServiceServer.
func (s workers) RegisterWorker(context.Context, *kvcastv1.RegisterWorkerRequest) (*kvcastv1.RegisterWorkerResponse, error) {
	return nil, errUnimplemented(s.journal.Bounds(), "RegisterWorker is not built in this version; name the worker with kvcast serve --worker, or let it connect to a port given with --bind")
}

// DeregisterWorker implements kvcastv1.WorkerServiceServer.
func (s workers) DeregisterWorker(context.Context, *kvcastv1.DeregisterWorkerRequest) (*kvcastv1.DeregisterWorkerResponse, error) {
	return nil, errUnimplemented(s.journal.Bounds(), "DeregisterWorker is not built in this version; start kvcast serve without the worker")
}
