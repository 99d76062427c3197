package client

import (
	"context"

	kvcastv1 "github.com/kvcast/kvcast/proto/kvcast/v1"
)

// Workers returns the workers that a filter selects, by name; nil: all. The tiers of the filter are ignored. Errors of the server are an *Error.
func (c *Client) Workers(ctx context.Context, filter *kvcastv1.Filter) ([]*kvcastv1.WorkerStatus, error) {
	var all []*kvcastv1.WorkerStatus
	err := c.call(func(conn connection) error {
		res, err := kvcastv1.NewRouterEventServiceClient(conn).ListWorkers(ctx, &kvcastv1.ListWorkersRequest{Filter: filter})
		all = res.GetWorkers()
		return err
	})
	return all, err
}

// Lookup asks which dp ranks hold blocks: 1 to 10,000 hashes in all.
type Lookup struct {
	// BlockHashes are the engine's own hashes, as in Stored.block_hashes.
	BlockHashes []uint64
	// TokensHashes are hashes of the contents, as in Stored.tokens_hashes. A lookup of them is slow: it reads every block of the selected workers.
	TokensHashes []uint64
	// Filter selects workers and tiers; nil: all.
	Filter *kvcastv1.Filter
}

// LookupBlocks returns the holders of blocks. A block that no worker holds is not in the result. Errors of the server are an *Error.
func (c *Client) LookupBlocks(ctx context.Context, l Lookup) ([]*kvcastv1.BlockHolder, error) {
	var all []*kvcastv1.BlockHolder
	req := &kvcastv1.LookupBlocksRequest{BlockHashes: l.BlockHashes, TokensHashes: l.TokensHashes, Filter: l.Filter}
	err := c.call(func(conn connection) error {
		res, err := kvcastv1.NewRouterEventServiceClient(conn).LookupBlocks(ctx, req)
		all = res.GetHolders()
		return err
	})
	return all, err
}
