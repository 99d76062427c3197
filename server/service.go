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

// Replay implements kvcastv1.RouterEventServiceServer.
func (s routerEvents) Replay(*kvcastv1.ReplayRequest, kvcastv1.RouterEventService_ReplayServer) error {
	return errUnimplemented(s.journal.Bounds(), `Replay is not built in this version; use Subscribe with "after" or "earliest"`)
}

// Snapshot implements kvcastv1.RouterEventServiceServer.
func (s routerEvents) Snapshot(*kvcastv1.SnapshotRequest, kvcastv1.RouterEventService_SnapshotServer) error {
	return errUnimplemented(s.journal.Bounds(), `Snapshot is not built in this version; use Subscribe with "earliest"`)
}

// GetStatus implements kvcastv1.RouterEventServiceServer.
func (s routerEvents) GetStatus(context.Context, *kvcastv1.GetStatusRequest) (*kvcastv1.GetStatusResponse, error) {
	return nil, errUnimplemented(s.journal.Bounds(), `GetStatus is not built in this version; epoch, oldest and newest seq are in the Accepted of a Subscribe, counts in /metrics of the admin port`)
}

// ListWorkers implements kvcastv1.RouterEventServiceServer.
func (s routerEvents) ListWorkers(context.Context, *kvcastv1.ListWorkersRequest) (*kvcastv1.ListWorkersResponse, error) {
	return nil, errUnimplemented(s.journal.Bounds(), `ListWorkers is not built in this version; use Subscribe with "earliest", which tells of each worker added, or /metrics of the admin port`)
}

// LookupBlocks implements kvcastv1.RouterEventServiceServer.
func (s routerEvents) LookupBlocks(context.Context, *kvcastv1.LookupBlocksRequest) (*kvcastv1.LookupBlocksResponse, error) {
	return nil, errUnimplemented(s.journal.Bounds(), `LookupBlocks is not built in this version; use Subscribe with "earliest" and look into the blocks it tells of`)
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
