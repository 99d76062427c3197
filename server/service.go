package server

import (
	kvcastv1 "github.com/kvcast/kvcast/proto/kvcast/v1"
)

// routerEvents is kvcast.v1.RouterEventService.
type routerEvents struct {
	kvcastv1.UnimplementedRouterEventServiceServer
	*Server
}
