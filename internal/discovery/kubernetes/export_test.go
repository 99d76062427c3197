package kubernetes

import "k8s.io/client-go/rest"

// REST returns the client's connection, for requests of tests.
func (c *Client) REST() *rest.RESTClient { return c.rest }
